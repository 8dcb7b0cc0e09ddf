"""Chat prompts byte for byte, and templates that misbehave."""

import lzma
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from chat_cases import THINKING, THINKING_OFF

from sharpi_jax.checkpoint import chat
from sharpi_jax.checkpoint.chat import ChatTemplate
from sharpi_jax.checkpoint.gguf_file import open_gguf
from sharpi_jax.checkpoint.tokenizer import Tokenizer
from sharpi_jax.errors import CheckpointError, OptionError

USER = [{"role": "user", "content": "Hi"}]
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "  1 < 2?\n"},
    {"role": "assistant", "content": "Ja, größer: 日本 👍"},
]


def render(source: str, **variables: object) -> str:
    return ChatTemplate(source, "<b>", "<e>").render(USER, **variables)


def test_the_fixture_template(data_dir: Path) -> None:
    metadata = open_gguf(data_dir / "qwen35-tiny-f32.gguf").metadata
    template = ChatTemplate.from_metadata(metadata)
    assert template is not None
    assert (template.bos_token, template.eos_token) == ("", "<|im_end|>")
    prompt = template.render(TALK)
    assert prompt == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\n  1 < 2?\n<|im_end|>\n"
        "<|im_start|>assistant\nJa, größer: 日本 👍<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert template.render(USER, add_generation_prompt=False) == "<|im_start|>user\nHi<|im_end|>\n"
    # 476 and 477 are the marks, 198 the line break: each mark is one token, wherever it stands
    ids = Tokenizer.from_metadata(metadata).encode_prompt(prompt)
    assert (ids.count(476), ids.count(477), ids[0], ids[-1]) == (4, 3, 476, 198)


def test_the_template_of_a_real_vocabulary(data_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "qwen35.gguf"
    path.write_bytes(lzma.decompress((data_dir / "vocab" / "qwen35.gguf.xz").read_bytes()))
    template = ChatTemplate.from_metadata(open_gguf(path).metadata)
    assert template is not None
    assert (template.bos_token, template.eos_token) == ("<|endoftext|>", "<|endoftext|>")
    assert template.render(USER) == (
        "<|im_start|>system\nYou are a helpful assistant<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert template.render(TALK[:1], add_generation_prompt=False) == "<|im_start|>system\nBe brief.<|im_end|>\n"


def test_thinking_switched_off_ends_in_the_empty_block() -> None:
    begin = "<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert render(THINKING, thinking=False) == begin + "<think>\n\n</think>\n\n"
    assert render(THINKING, thinking=True) == begin + "<think>\n"
    assert render(THINKING) == begin + "<think>\n"  # its own default
    assert render(THINKING_OFF, thinking=True).endswith("<assistant><think>")
    assert render(THINKING_OFF, thinking=False) == render(THINKING_OFF) == "<user>Hi<assistant></think>"


@pytest.mark.parametrize(
    "source", ["{{ messages }}", "{% set enable_thinking = true %}{{ enable_thinking }}", "thinking"]
)
def test_thinking_without_a_switch_is_refused(source: str) -> None:
    for thinking in (True, False):
        with pytest.raises(OptionError, match="no switch for thinking; give neither --thinking nor --no_thinking"):
            render(source, thinking=thinking)
    render(source)
    with pytest.raises(CheckpointError, match="Expected an expression"):  # a broken template is the worse fault
        render("{% if %}", thinking=True)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a\n  {% if true %}\n  b\n  {% endif %}\nc\n", "a\n  b\nc"),  # trim_blocks, lstrip_blocks, last line break
        ("{{ {'b': 'é<&>', 'a': [1, none, true]}|tojson }}", '{"b": "é<&>", "a": [1, null, true]}'),
        ("{{ {'a': 12345678901}|tojson(indent=2) }}", '{\n  "a": 12345678901\n}'),
        ("{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% if i > 2 %}{% break %}{% endif %}"
         "{% endfor %}", "023"),
        ("{% for i in 'abc' if i != 'b' %}{{ loop.index ~ '/' ~ loop.length ~ i ~ loop.last }} {% endfor %}",
         "1/2aFalse 2/2cTrue "),
        ("{% for x in [1, [2]] recursive %}{{ x if x is number else '(' ~ loop(x) ~ ')' }}{% endfor %}", "1(2)"),
        ("{{ bos_token }}{{ eos_token }}{{ tools is none }}{{ documents is none }}{{ absent }}", "<b><e>TrueTrue"),
        ("{{ extra ~ '!' ~ (1 ~ ('a' ~ none)) }}", "x!1aNone"),
        ("{{ '%d' % 131072 }}{{ '{}'.format(131072) }}{{ absent|default(131072) }}", "131072" * 3),
        ("{{ strftime_now('%Y')|length }}", "4"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = 2 + ns.n %}{% endfor %}{{ ns.n }}", "2"),
        ("{% macro m(x) %}[{{ x }}]{% endmacro %}{{ m('a') }}{% set y %}{{ m(1) }}b{% endset %}{{ y }}", "[a][1]b"),
        ("{{ messages|map(attribute='role')|join('-') }}{{ messages|join('+', attribute='content') }}", "userHi"),
        ("{{ 'a-b'.replace('-', '+') }}{{ 'a-b'|replace('-', '') }}{{ ', '.join(['x', 'y']) }}", "a+babx, y"),
        ("{{ '%s:%03d' % ('a', 7) }}{{ '{}{:>3}'.format('b', 1) }}{{ '%s'|format('c') }}{{ 7 % 4 }}", "a:007b  1c3"),
        ("{{ 'x\ny'|indent(2) }}{{ '\nz '.strip() }}{{ messages[-1].content[:1] }}{{ [1] * 2 }}", "x\n  yzH[1, 1]"),
    ],
)  # fmt: skip
def test_rendering(source: str, expected: str) -> None:
    assert render(source, extra="x") == expected


def test_a_long_conversation_is_well_within_the_bounds() -> None:
    messages = [{"role": "user", "content": "word " * 200}] * 2000
    assert len(ChatTemplate(THINKING).render(messages)) == 39 + 2000 * 1028 + 30


def test_no_template_and_no_text() -> None:
    assert ChatTemplate.from_metadata({}) is None
    with pytest.raises(CheckpointError, match="no text"):
        ChatTemplate.from_metadata({"tokenizer.chat_template": np.zeros(3)})
    metadata = {"tokenizer.chat_template": "{{ eos_token }}!", "tokenizer.ggml.eos_token_id": 9}
    template = ChatTemplate.from_metadata({**metadata, "tokenizer.ggml.tokens": ["a"]})  # an id outside: no text
    assert template is not None
    assert template.render(USER) == "!"


REFUSED = {
    "syntax": ("{% if %}", "Expected an expression"),
    "an unknown tag": ("{% nonsense %}", "nonsense"),
    "its own complaint": ("{{ raise_exception('Roles must\nalternate') }}", r"\(Roles must alternate\)"),
    "undefined": ("{{ absent.field }}", "undefined"),
    "arithmetic": ("{{ 1 / 0 }}", "division"),
    "another file": ("{% include '/etc/passwd' %}", "no loader"),
    "escape by class": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
    "escape by globals": ("{{ raise_exception.__globals__['json'] }}", "unsafe"),
    "escape by the macro": ("{% macro m() %}{% endmacro %}{{ m.__init__.__globals__ }}", "unsafe"),
    "escape by attr": ("{{ (''|attr('__class__')).mro() }}", "undefined|unsafe"),
    "escape by format": ("{{ '{0.__globals__[json]}'.format(raise_exception) }}", "unsafe"),
    "changing the messages": ("{{ messages.append(1) }}", "unsafe"),
    "a huge range": ("{% for i in range(10**9) %}{% endfor %}", "[Rr]ange too big"),
    "loops in loops": (
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "longer than 0.5 seconds",
    ),
    "filters in loops": ("{% for i in range(99999) %}{{ range(99999)|sum }}{% endfor %}", "longer than 0.5 seconds"),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    "branching recursion": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(50) }}",
        "longer than 0.5 seconds",
    ),
    "recursive loop": (
        "{% for x in range(99999) recursive %}{% if x %}{{ loop(range(1)) }}{% endif %}"
        "{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "longer than 0.5 seconds",
    ),
    "power": ("{{ 9 ** 99999999 }}", "power"),
    "product": (
        "{% set n = namespace(x=9) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
        "product in it",
    ),
    "a repeated text": ("{{ 'a' * 10 ** 11 }}", "more than 67108864"),
    "a repeated list": ("{{ 10 ** 11 * [1] }}", "more than 67108864"),
    "a wide field": ("{{ 'a'.center(10 ** 11) }}", "number above"),
    "a wide filter": ("{{ 'a'|center(10 ** 11) }}", "number above"),
    "a wide percent": ("{{ '%99999999999d' % 1 }}", "enormous width"),
    "a wide star": ("{{ '%*d' % (10 ** 9, 1) }}", "number above"),
    "a nested format": ("{{ '{:{}}'.format(1, 10 ** 9) }}", "number above"),
    "a wide star filter": ("{{ '%*d'|format(10 ** 9, 1) }}", "number above"),
    "a wide format": ("{{ '{:99999999999}'.format(1) }}", "enormous width"),
    "a wide format filter": ("{{ '%99999999999d'|format(1) }}", "enormous width"),
    "many fields": ("{{ ('%s' * 9000) % (('x' * 1000000,) * 9000) }}", "more than 67108864"),
    "a deep indent": ("{{ ('a\n' * 1000000)|indent(9999) }}", "more than 67108864"),
    "a method beside the hooks": ("{{ ['a']|map('center', 10 ** 11)|list }}", "number above"),
    "filler text": ("{{ lipsum(n=10 ** 9) }}", "undefined"),
    "a large text in a loop": (
        "{% set x %}{% for i in range(99999) %}" + "q" * 9999 + "{% endfor %}{% endset %}",
        "more than 67108864",
    ),
    "a large output": ("{% for i in range(99999) %}" + "q" * 9999 + "{% endfor %}", "more than 67108864"),
}
for _name, _step in {
    "plus": "{% set n.x = n.x + n.x %}",
    "tilde": "{% set n.x = n.x ~ n.x %}",
    "block": "{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}",
    "join": "{% set n.x = [n.x, n.x]|join %}",
    "join by attribute": "{% set n.x = [{'a': n.x}, {'a': n.x}]|join(attribute='a') %}",
    "join method": "{% set n.x = ''.join([n.x, n.x]) %}",
    "replace": "{% set n.x = n.x|replace('a', 'aa') %}",
    "replace method": "{% set n.x = n.x.replace('', 'aa') %}",
    "format": "{% set n.x = '{0}{0}'.format(n.x) %}",
    "list": "{% set n.x = n.x|list + n.x|list %}",
}.items():
    REFUSED[f"doubling by {_name}"] = (
        "{% set n = namespace(x='aaaa') %}{% for i in range(99) %}" + _step + "{% endfor %}",
        "more than 67108864",
    )


@pytest.mark.parametrize("case", REFUSED)
def test_refused_templates(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence, soon, and without the memory that the template asks for."""
    source, message = REFUSED[case]
    monkeypatch.setattr(chat, "_MAX_SECONDS", 0.5)
    if "longer" not in message:
        monkeypatch.setattr(chat, "_MAX_SECONDS", 60.0)
    tracemalloc.start()
    began = time.perf_counter()
    try:
        with pytest.raises(CheckpointError, match=message) as caught:
            render(source)
        assert time.perf_counter() - began < 10.0
        assert tracemalloc.get_traced_memory()[1] < 1_200_000_000
    finally:
        tracemalloc.stop()
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600
