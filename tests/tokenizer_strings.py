"""3,000 strings that are hard on a tokenizer, made by a seeded script: the same on every machine and Python.

Nothing here looks at a tokenizer. `tools/peers/tokens.py` asks llama-server for their ids, and test_tokenizer_peer.py
holds the package to what it answered.
"""

import hashlib
import random
from collections.abc import Callable, Sequence

COUNT = 3000

_WORDS = """
the of and Hello world tokenization antidisestablishmentarianism I'm we'LL they'Ve it's DON'T o'clock
rock'n'roll naïve façade Übergröße straße cœur señor İstanbul ﬁne ǅ ª º ßẞ zażółć gęślą příliš žluťoučký
Привет мир Съешь ещё этих мягких булок Україна Ελληνικά Ξεσκεπάζω ψυχοφθόρα Հայերեն ქართული საქართველო 日本語 漢字
東京都 こんにちは カタカナ ﾊﾝｶｸ 中文
你好世界 繁體字 한국어 안녕하세요 𠮷野家 ㍿ ① ⅷ हिन्दी देवनागरी नमस्ते क्षत्रिय संस्कृतम् বাংলা ভাষা தமிழ்
மொழி తెలుగు ಕನ್ನಡ മലയാളം ગુજરાતી ਪੰਜਾਬੀ සිංහල ภาษาไทย กิ่งก้าน ที่นี่ ลาว ພາສາລາວ မြန်မာဘာသာ ភាសាខ្មែរ
བོད་སྐད་ አማርኛ ᏣᎳᎩ ᠮᠣᠩᠭᠣᠯ ⴰⵎⴰⵣⵉⵖ 𐌰𐍄𐍄𐌰 𓂀𓃭 𝒳𝔜ℤ العربية مَرْحَبًا بِكَ ٱلسَّلَامُ فارسی می‌خواهم اردو עברית
שָׁלוֹם בְּרֵאשִׁית ייִדיש ܣܘܪܝܝܐ ދިވެހި ߒߞߏ
"""
WORDS = _WORDS.split()
# fmt: off
MARKS = [  # combining marks on their letters, on other letters and alone; joiners and selectors alone
    "e\u0301", "a\u0308\u0304", "n\u0303", "o\u0302\u0323", "ź\u0317", "q\u0361p", "\u0301", " \u0308",
    "Z\u0351\u036b\u0343", "क\u094dष", "क\u0940", "\u093f", "ก\u0e34\u0e48", "\u0e47", "م\u064e\u0651", "\u0652",
    "ש\u05c1\u05b8", "\u0bbe", "각", "한", "か\u3099", "ハ\u309a", "a\u20dd", "1\u0338", "=\u0338", "x\ufe0f",
    "\u200d", "\u200b", "\u0483", "а\u0301", "ё\u0300", "ำ", "\u0f71\u0f72", "\u1039တ", "\U0001d165", "\U000e0101",
]
EMOJI = [
    "😀", "👍🏽", "👩\u200d👩\u200d👧\u200d👦", "🧑🏿\u200d🚀", "🏳\ufe0f\u200d🌈",
    "🏴\U000e0067\U000e0062\U000e0073\U000e0063\U000e0074\U000e007f", "🇩🇪🇯🇵", "🇦", "❤\ufe0f\u200d🔥", "☺\ufe0f", "☺",
    "1\ufe0f\u20e3", "#\ufe0f\u20e3", "👁\ufe0f\u200d🗨\ufe0f", "🤷🏻\u200d♀\ufe0f", "🧑\u200d🤝\u200d🧑", "\U0001fae8",
    "🏽", "\u200d🔥", "©\ufe0f", "⁉", "🀄",
]
CODE = [
    "def f(x):\n    return x**2", "for (int i = 0; i < n; ++i) {\n\t\tsum += a[i];\n\t}", "#include <stdio.h>\r\n",
    "x != y || !z", "std::vector<std::pair<int,int>>", "SELECT * FROM t WHERE a='b';", "$HOME/.config/**/*.py",
    "https://ex.org/?q=a%20b&c=1#d", "<div class=\"a\">&nbsp;</div>", "\\begin{align}\\frac{1}{2}\\end{align}",
    "{\"k\": [1, null, -2.5e-3]}", "a->b(c)...d", "===>", "//////", "--------", "/* ** */", "`x`", "\"\"\"doc\"\"\"",
    "'''", "user@host:~$ ls -la", "0x7fFF_u64", "C:\\dir\\new", "!!!???", "((((", "don't", "'s", "'S", " 't", "''s",
    "'", "’s", "'ſ", "_a_b__c", "CamelCaseHTTPServer", "x=1;y=2", "a.b.c", "@a #b $c", "-->", "<!--",
]
DIGITS = [
    "٠١٢٣٤", "०१२३", "１２３", "½", "¾", "²³", "Ⅷ", "④", "௧௨", "𝟘𝟙", "〇一二三", "৳৫", "𐒠", "㊿", "1st", "2nd", "v2.0",
    "1,234.56",
]
SPACES = [
    " ", "  ", "   ", "\t", "\n", "\n\n", "\r\n", "\r", "\u00a0", "\u2003", "\u3000", "\u2028", "\x0b", "\x0c",
    "\u0085", "\u202f", "\u180e", "\u1680",
]
SPECIAL = [  # control tokens of one vocabulary or another, and what only looks like one
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<s>",
    "</s>", "<unk>", "<|reserved_special_token_0|>", "<repo_name>", "<file_sep>", "[PAD151700]", "<|im_end",
    "im_start|>", "<0x41>", "<0x0A>", "<|", "|>", "<s",
]
PUNCTUATION = [
    "!", "?", ".", ",", ";", ":", ")", "]", "}", ">", "\"", "'", "-", "—", "…", "。", "、", "！", "？", "«", "»", "“",
    "”", "¡", "¿", "&", "%", "€", "$", "#", "@", "*", "/", "\\", "|", "~", "^", "`", "+", "=", "<", "_", "...", "?!",
    ".)", "\n", " ", "  ",
]
RANGES = [
    (0x21, 0x7E), (0xA1, 0x17F), (0x250, 0x2AF), (0x370, 0x4FF), (0x531, 0x5F4), (0x600, 0x6FF), (0x900, 0x97F),
    (0xE01, 0xE5B), (0x1000, 0x109F), (0x1200, 0x135A), (0x1E00, 0x1FFE), (0x2010, 0x2BFF), (0x3040, 0x30FF),
    (0x4E00, 0x9FA5), (0xAC00, 0xD7A3), (0xE000, 0xE0FF), (0xFB00, 0xFDFF), (0xFF01, 0xFFEF), (0x10000, 0x102FF),
    (0x1D400, 0x1D7FF), (0x1F300, 0x1F9FF), (0x20000, 0x2A6DF), (0x1, 0x20), (0x7F, 0xA0),
]
# fmt: on


class _Maker:
    """Draws strings. Only `random()` is used, since Python keeps its sequence and may change that of the others."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def below(self, count: int) -> int:
        return int(self._random.random() * count)

    def one(self, items: list[str]) -> str:
        return items[self.below(len(items))]

    def some(self, low: int, high: int, make: Callable[[], str], separator: str = "") -> str:
        return separator.join(make() for _ in range(low + self.below(high - low + 1)))

    def word(self) -> str:
        return self.one(WORDS)

    def words(self) -> str:
        return self.some(1, 6, self.word, self.one([" ", " ", " ", "", "  ", "-", ", ", "\n", "。", "\u00a0"]))

    def marks(self) -> str:
        return self.some(1, 8, lambda: self.one([self.word(), self.one(MARKS), self.one(MARKS), " "]))

    def emoji(self) -> str:
        return self.some(1, 5, lambda: self.one([self.one(EMOJI), self.one(EMOJI), self.word(), " ", "!"]))

    def code(self) -> str:
        return self.some(1, 3, lambda: self.one(CODE), self.one(["", " ", "\n", "\n    ", "\t", "; "]))

    def digits(self) -> str:
        def number() -> str:
            return self.some(1, 9, lambda: self.one(list("0123456789")))

        return self.some(
            1, 4, lambda: self.one([number(), number(), self.one(DIGITS), self.word()]), self.one(["", " ", ".", "  "])
        )

    def spaces(self) -> str:
        def run() -> str:
            return self.one(SPACES) * (1 + self.below(1 + self.below(12)))

        return self.some(1, 6, lambda: self.one([run(), run(), self.word(), self.one(PUNCTUATION), "a"]))

    def special(self) -> str:
        return self.some(1, 4, lambda: self.one(["", self.word(), " "]) + self.one(PUNCTUATION) + self.one(SPECIAL))

    def points(self) -> str:
        def point() -> str:
            low, high = RANGES[self.below(len(RANGES))]
            return chr(low + self.below(high - low + 1))

        return self.some(1, 10, point)

    def mixture(self) -> str:
        kinds = [self.words, self.marks, self.emoji, self.code, self.digits, self.spaces, self.special, self.points]
        return self.some(2, 4, lambda: kinds[self.below(len(kinds))]())


def strings() -> list[str]:
    """The strings, all different, none empty."""
    maker = _Maker(14)
    kinds = [maker.words, maker.marks, maker.emoji, maker.code, maker.digits, maker.spaces, maker.special, maker.points]
    kinds.append(maker.mixture)
    made: dict[str, None] = {}
    while len(made) < COUNT:
        made[kinds[maker.below(len(kinds))]()] = None
    return list(made)


def digest(made: Sequence[str]) -> str:
    """A SHA-256 of strings, which shows whether ids belong to them."""
    return hashlib.sha256("\0".join(made).encode()).hexdigest()
