"""Byte-level BPE built from a GGUF file's own vocabulary.

What must not go wrong here: the ids are those that llama.cpp gives for the same file. So there is no normaliser (a
GGUF carries none, and decomposed text must stay decomposed), the split patterns are exactly the named ones, special
tokens are taken out of the text before the pattern sees it, and decoding joins bytes before it reads UTF-8, because
one character may be spread over several tokens.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Any

import tokenizers
from tokenizers import pre_tokenizers
from tokenizers.models import BPE

from sharpi_jax.errors import CheckpointError

_CONTRACTIONS = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_QWEN_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"


def _qwen2(digits: str) -> str:
    words = r"[^\r\n\p{L}\p{N}]?\p{L}+"
    return rf"{_CONTRACTIONS}|{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_QWEN_TAIL}"


# tokenizer.ggml.pre: the patterns, applied one after the other to the pieces of the one before. What no pattern
# matches stays a piece of its own.
_PATTERNS: dict[str, tuple[str, ...]] = {
    "qwen35": (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_QWEN_TAIL}",
    ),
    "qwen2": (_qwen2(r"\p{N}"),),
    "llama-bpe": (_qwen2(r"\p{N}{1,3}"),),
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
}

# Control tokens that end a turn in one model family or another. llama.cpp stops at them by their text, whatever the
# metadata says, because many files name only one of the two or three that their model uses. The last three end an
# infilling.
_END_OF_TURN = {
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
    *("<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>"),
    *("<end_of_utterance>", "<eos>", "<turn|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"),
}


class _TokenType(IntEnum):
    """The values of tokenizer.ggml.token_type that matter here."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def _byte_alphabet() -> dict[str, bytes]:
    """The characters that stand for the 256 bytes in a byte-level vocabulary.

    A byte that is a visible Latin-1 character stands for itself, the others take the characters from U+0100 on.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    alphabet = {chr(byte): bytes([byte]) for byte in visible}
    return alphabet | {chr(0x100 + index): bytes([byte]) for index, byte in enumerate(hidden)}


_BYTE_OF = _byte_alphabet()


def _matcher(texts: Iterable[str]) -> re.Pattern[str] | None:
    """A pattern that finds any of the texts, the longest first; its group makes `split` keep what it found."""
    alternatives = "|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True))
    return re.compile(f"({alternatives})") if alternatives else None


class Tokenizer:
    """Text to token ids and back, for one model file."""

    def __init__(
        self,
        tokens: Sequence[str],
        token_types: Sequence[int],
        merges: Sequence[str],
        pre: str,
        *,
        bos_id: int | None = None,
        eos_id: int | None = None,
        stop_ids: Iterable[int] = (),
        add_bos: bool = False,
    ) -> None:
        """Build the tokenizer.

        Args:
            tokens: the vocabulary, by id, in the byte-level alphabet (special tokens as plain text).
            token_types: their kinds, by id.
            merges: "left right" in order of rank.
            pre: the name of the split pattern.
            bos_id: the token that begins a text.
            eos_id: the token that ends a text.
            stop_ids: tokens at which generation ends, beside the end-of-turn tokens known by their text.
            add_bos: whether a prompt begins with `bos_id`.

        Raises:
            CheckpointError: the pattern is unknown or the vocabulary does not fit together.
        """
        if pre not in _PATTERNS:
            raise CheckpointError(
                f"the model file's pre-tokenizer {_shown(pre)} is not supported; use a model with one of "
                f"{_names(_PATTERNS)}."
            )
        self._tokens = list(tokens)
        self._types = list(token_types)
        ids = {text: index for index, text in enumerate(self._tokens)}
        self._bpe = _build_bpe(ids, merges, pre)

        def of_type(*kinds: int) -> dict[str, int]:
            return {text: index for text, index in ids.items() if text and self._types[index] in kinds}

        plain, control = of_type(_TokenType.USER_DEFINED), of_type(_TokenType.CONTROL)
        # llama.cpp looks for the unknown token in the text as well.
        self._special_ids = plain | control | of_type(_TokenType.UNKNOWN)
        self._find_special = _matcher(self._special_ids)
        self._find_user_defined = _matcher(plain)
        self.vocab_size = len(self._tokens)
        self.bos_id = bos_id
        self.eos_id = eos_id
        by_text = {index for text, index in control.items() if text in _END_OF_TURN}
        self.stop_ids = tuple(sorted({*stop_ids, *by_text}))
        self.add_bos = add_bos and bos_id is not None

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> "Tokenizer":
        """Build the tokenizer that a GGUF file describes.

        Args:
            metadata: the file's metadata, as `open_gguf` gives it.

        Raises:
            CheckpointError: there is no tokenizer, or one of a kind that is not supported, or a damaged one.
        """
        model = metadata.get("tokenizer.ggml.model")
        if model is None:
            raise CheckpointError(
                "the model file holds no tokenizer (no key tokenizer.ggml.model); use a complete one."
            )
        if not isinstance(model, str) or model != "gpt2":
            raise CheckpointError(
                f"the model file's tokenizer kind {_shown(model)} is not supported; use a model with byte-level BPE "
                "('gpt2')."
            )
        pre = metadata.get("tokenizer.ggml.pre")
        if not isinstance(pre, str):
            raise CheckpointError(
                f"the model file names no pre-tokenizer (key tokenizer.ggml.pre), where {_names(_PATTERNS)} are "
                "supported; convert the model again with a current converter."
            )
        tokens = _strings(metadata, "tokenizer.ggml.tokens")
        bos, eos, eot, eom = (_token_id(metadata, name, len(tokens)) for name in ("bos", "eos", "eot", "eom"))
        # Where the key is absent llama.cpp adds a BOS for the llama-bpe pattern and for none of the others.
        add_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe"))
        return cls(
            tokens,
            _token_types(metadata, len(tokens)),
            _strings(metadata, "tokenizer.ggml.merges"),
            pre,
            bos_id=bos,
            eos_id=eos,
            stop_ids=[stop for stop in (eos, eot, eom) if stop is not None],
            add_bos=add_bos,
        )

    def encode(self, text: str, *, parse_special: bool = True) -> list[int]:
        """The token ids of a text, without a BOS.

        Args:
            text: any text; a lone surrogate counts as U+FFFD.
            parse_special: whether the text of a control token gives that token. User-defined tokens always do.
        """
        try:
            text.encode()
        except UnicodeEncodeError:
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        special = self._find_special if parse_special else self._find_user_defined
        ids: list[int] = []
        for index, part in enumerate(special.split(text) if special else [text]):
            if index % 2:
                ids.append(self._special_ids[part])
            elif part:
                ids.extend(self._bpe.encode(part, add_special_tokens=False).ids)
        return ids

    def encode_prompt(self, text: str, *, parse_special: bool = True) -> list[int]:
        """As `encode`, with the BOS in front where the model wants one and the text does not begin with it."""
        ids = self.encode(text, parse_special=parse_special)
        if self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """The text of token ids. It never raises: invalid bytes become U+FFFD, unknown ids give nothing.

        Args:
            ids: any integers.
            skip_special: whether control tokens are left out.
        """
        pieces = (self.token_bytes(item) for item in ids if not (skip_special and self.is_special(item)))
        return b"".join(pieces).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; none for an unused slot or an id outside the vocabulary."""
        kind = self._type(token_id)
        if kind is None or kind == _TokenType.UNUSED:
            return b""
        text = self._tokens[token_id]
        if kind in (_TokenType.UNKNOWN, _TokenType.CONTROL, _TokenType.USER_DEFINED):
            return text.encode()
        if kind == _TokenType.BYTE and re.fullmatch("<0x[0-9A-Fa-f]{2}>", text):
            return bytes.fromhex(text[3:5])
        return b"".join(_BYTE_OF.get(char) or char.encode() for char in text)

    def token_text(self, token_id: int) -> str:
        """A printable form of one token for traces: partial characters and control characters are escaped."""
        kind = self._type(token_id)
        if kind is None:
            return f"[id {token_id}]"
        raw = self._tokens[token_id].encode() if kind == _TokenType.UNUSED else self.token_bytes(token_id)
        text = raw.decode("utf-8", errors="backslashreplace")
        return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)

    def is_special(self, token_id: int) -> bool:
        """Whether a token steers the model (control or unknown) rather than standing for text."""
        return self._type(token_id) in (_TokenType.CONTROL, _TokenType.UNKNOWN)

    def _type(self, token_id: int) -> int | None:
        return self._types[token_id] if 0 <= token_id < self.vocab_size else None


def _build_bpe(ids: dict[str, int], merges: Sequence[str], pre: str) -> Any:
    """The merge engine, without special tokens: those are cut out of the text before it."""
    pairs = []
    for merge in dict.fromkeys(merges):  # of two equal merges the first counts
        at = merge.find(" ", 1)  # from 1: the left part may itself begin with a space
        if at < 0:
            raise CheckpointError(f"the model file's merge {_shown(merge)} is no pair; convert the model again.")
        pairs.append((merge[:at], merge[at + 1 :]))
    try:
        engine: Any = tokenizers.Tokenizer(BPE(vocab=ids, merges=pairs, ignore_merges=pre == "llama-bpe"))
    except Exception as error:  # the library raises bare Exceptions: a merge whose parts or result are no tokens
        raise CheckpointError(
            f"the model file's merges do not fit its tokens ({_shown(str(error))}); the file is damaged, so "
            "download it again."
        ) from None
    engine.pre_tokenizer = pre_tokenizer(pre)
    return engine


def pre_tokenizer(pre: str) -> Any:
    """What cuts text into words before the merges, for a `tokenizer.ggml.pre` (a key of _PATTERNS)."""
    splits = [pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated") for pattern in _PATTERNS[pre]]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _shown(value: object) -> str:
    """A value of the file for a message: on one line, and short whatever the file holds."""
    return " ".join(repr(value).split())[:120]


def _names(names: Iterable[str]) -> str:
    return ", ".join(names)


def _strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    values = metadata.get(key)
    if not isinstance(values, list):
        raise CheckpointError(f"the model file holds no list of strings at {key}; convert the model again.")
    return values


def _token_types(metadata: Mapping[str, Any], count: int) -> list[int]:
    """The kind of each token; without the key all are normal."""
    values = metadata.get("tokenizer.ggml.token_type")
    if values is None:
        return [int(_TokenType.NORMAL)] * count
    types = getattr(values, "tolist", lambda: None)()
    if not isinstance(types, list) or len(types) < count:
        raise CheckpointError(
            f"the model file's tokenizer.ggml.token_type does not cover its {count} tokens; convert the model again."
        )
    return types[:count]


def _token_id(metadata: Mapping[str, Any], name: str, vocab_size: int) -> int | None:
    """The id at tokenizer.ggml.NAME_token_id, or None without the key."""
    key = f"tokenizer.ggml.{name}_token_id"
    value = metadata.get(key)
    if value is not None and not (isinstance(value, int) and 0 <= value < vocab_size):
        raise CheckpointError(
            f"the model file's {key} is {_shown(value)}, which is no id of its {vocab_size} tokens; convert the "
            "model again."
        )
    return value
