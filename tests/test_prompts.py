"""The input of batch evaluation: what is understood, what is refused and in which words, and the built-in set."""

import collections
import json
import tomllib
from pathlib import Path

import models
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sharpi_jax.assets import BUILTIN_PROMPTS
from sharpi_jax.errors import OptionError
from sharpi_jax.evaluate.prompts import Prompt, fingerprint, parse_prompts
from sharpi_jax.evaluation_files import builtin_prompts, read_prompts

ROOT = Path(__file__).parent.parent
GOOD = b'{"prompt": "Once"}'
KINDS = ["python", "cpp", "explanation", "summary", "factual", "translation", "story", "arithmetic", "review"]


def parse(*lines, on_error="stop"):
    return parse_prompts(b"\n".join(lines), "p.jsonl", on_error=on_error)


def test_every_field_arrives():
    whole = {"id": "a", "domain": "d", "prompt": " x\n", "max_tokens": 7, "reference": "4"}
    talk = [{"role": "system", "content": ""}, {"role": "user", "content": "Hé"}]
    lines = [json.dumps(o).encode() for o in (whole, {"messages": talk}, {"prompt_ids": [0, 5], "id": 12})]
    prompts, faults = parse(*lines)
    assert faults == []
    assert prompts == [
        Prompt("a", domain="d", text=" x\n", max_tokens=7, reference="4"),
        Prompt("2", messages=tuple(talk)),
        Prompt("12", prompt_ids=(0, 5)),
    ]


def test_what_is_allowed_between_and_around_lines():
    data = b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n  \t\n{"prompt": "b\xe2\x80\xa8c", "id": null, "max_tokens": null}\n\n'
    assert parse(data)[0] == [Prompt("1", text="a"), Prompt("4", text="b\u2028c")]


FAULTS = {
    b"{": "line 2: it is not JSON (Expecting property name enclosed in double quotes, column 2).",
    b"prompt": "line 2: it is not JSON (Expecting value, column 1).",
    b'["a"]': 'line 2: it is no JSON object; write {"prompt": "..."}.',
    b"null": 'line 2: it is no JSON object; write {"prompt": "..."}.',
    b'{"promt": "a"}': 'line 2: unknown key "promt"; the nearest known one is prompt.',
    b'{"Prompt": "a"}': 'line 2: unknown key "Prompt"; the nearest known one is prompt.',
    b'{"zzz": 1, "prompt": "a"}': 'unknown key "zzz"; known are id, domain, prompt, messages, prompt_ids, max_tokens',
    b'{"prompt": "a", "prompt": "b"}': 'line 2: the key "prompt" is there twice.',
    b"{}": "line 2: exactly one of prompt, messages and prompt_ids is needed, but there is none.",
    b'{"prompt": null}': "but there is none.",
    b'{"prompt": "a", "prompt_ids": [1]}': "but there is prompt and prompt_ids.",
    b'{"prompt": ""}': "line 2: prompt is empty; give at least one character.",
    b'{"prompt": 5}': "line 2: prompt must be text, not 5.",
    b'{"prompt": ["a"]}': "line 2: prompt must be text, not a list.",
    b'{"prompt": "\\ud800"}': "line 2: prompt holds half of a surrogate pair, which is no character.",
    b'{"prompt": "\xff"}': "line 2: it is not UTF-8 text (byte 12 of the line).",
    '{"prompt": "a"}'.encode("utf-16"): "line 2: it is not UTF-8 text (byte 0 of the line).",
    b'{"prompt_ids": []}': "line 2: prompt_ids is empty; give at least one.",
    b'{"prompt_ids": "1,2"}': 'line 2: prompt_ids must be a list, not "1,2".',
    b'{"prompt_ids": [1, -3]}': "line 2: prompt_ids[1] must be 0 to 2147483647, not -3.",
    b'{"prompt_ids": [2147483648]}': "prompt_ids[0] must be 0 to 2147483647, not 2147483648.",
    b'{"prompt_ids": [true]}': "line 2: prompt_ids[0] must be a whole number, not true.",
    b'{"prompt_ids": [1.0]}': "line 2: prompt_ids[0] must be a whole number, not 1.0.",
    b'{"prompt_ids": [NaN]}': "line 2: NaN is no number of JSON.",
    b'{"prompt": "a", "max_tokens": Infinity}': "line 2: Infinity is no number of JSON.",
    b'{"prompt": "a", "max_tokens": 1e999}': "line 2: max_tokens must be a whole number, not Infinity.",
    b'{"prompt": "a", "max_tokens": true}': "line 2: max_tokens must be a whole number, not true.",
    b'{"prompt": "a", "max_tokens": 0}': "line 2: max_tokens must be 1 to 2147483647, not 0.",
    b'{"prompt": "a", "max_tokens": 1' + b"0" * 5000 + b"}": "line 2: a number in it has too many digits.",
    b'{"prompt": "a", "id": true}': "line 2: id must be text, not true.",
    b'{"prompt": "a", "id": ""}': "line 2: id is empty; give at least one character.",
    b'{"prompt": "a", "id": 1}': 'line 2: the id "1" is taken by line 1; give each its own.',
    b'{"prompt": "a", "domain": 1}': "line 2: domain must be text, not 1.",
    b'{"prompt": "a", "reference": 4}': "line 2: reference must be text, not 4.",
    b'{"prompt": "a", "reference": " \\n"}': "line 2: reference is blank; leave it out.",
    b'{"messages": {}}': "line 2: messages must be a list, not an object.",
    b'{"messages": []}': "line 2: messages is empty; give at least one.",
    b'{"messages": ["a"]}': 'line 2: messages[0] must be an object with role and content, not "a".',
    b'{"messages": [{"role": "user"}]}': "line 2: messages[0] has no content.",
    b'{"messages": [{"content": "a"}]}': "line 2: messages[0] has no role.",
    b'{"messages": [{"role": "user", "contents": "a"}]}': 'unknown key "contents" in messages[0]; the nearest',
    b'{"messages": [{"role": "", "content": "a"}]}': "line 2: role of messages[0] is empty",
    b'{"messages": [{"role": "user", "content": null}]}': "content of messages[0] must be text, not null.",
    b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}": "line 2: it is nested too deeply.",
    b'{"prompt": "' + b"a" * (1 << 24) + b'"}': "the line has 16777230 bytes, more than the 16777216 allowed",
}


@pytest.mark.parametrize(("line", "fault"), FAULTS.items(), ids=range(len(FAULTS)))
def test_a_bad_line_is_named_with_its_fault(line, fault):
    with pytest.raises(OptionError) as error:
        parse(GOOD, line, GOOD)
    message = str(error.value)
    assert message.startswith("p.jsonl, line 2: ")
    assert fault in message
    assert message.endswith(".")
    assert "\n" not in message
    assert len(message) < 250
    assert message.isascii()
    prompts, faults = parse(GOOD, line, GOOD, on_error="skip")
    assert [p.id for p in prompts] == ["1", "3"]
    assert faults == [message]


def test_skipping_goes_on_and_stopping_names_the_first():
    lines = [b"x", GOOD, b'{"prompt": ""}', b'{"prompt": "a", "id": "4"}', GOOD]
    prompts, faults = parse(*lines, on_error="skip")
    assert [p.id for p in prompts] == ["2", "4", "5"]
    assert [f.split(":")[0] for f in faults] == ["p.jsonl, line 1", "p.jsonl, line 3"]
    with pytest.raises(OptionError, match="line 1: "):
        parse(*lines)


def test_an_id_of_a_skipped_line_is_free():
    lines = [b'{"id": "a", "prompt": ""}', b'{"id": "a", "prompt": "x"}']
    assert [p.id for p in parse(*lines, on_error="skip")[0]] == ["a"]


def test_no_prompt_at_all_is_refused():
    for data in (b"", b"\n \r\n", b"\xef\xbb\xbf"):
        with pytest.raises(OptionError, match=r"^p.jsonl holds no prompt\.$"):
            parse(data)
    with pytest.raises(
        OptionError, match=r"holds no prompt; 2 bad lines were skipped, the first is p.jsonl, line 1: it"
    ):
        parse(b"x", b"y", on_error="skip")
    with pytest.raises(OptionError, match="on_error must be stop or skip, not 'go'"):
        parse(GOOD, on_error="go")


@settings(deadline=None)
@given(st.binary(max_size=60) | st.text(alphabet='{}[]":, \n\r\\uprmtid0123-.eaNn', max_size=60).map(str.encode))
def test_whatever_the_bytes_there_is_an_answer(data):
    prompts, faults = parse_prompts(data + b"\n" + GOOD, "p.jsonl", on_error="skip")  # one good line, so one prompt
    assert prompts[-1].text == "Once"
    used = sum(bool(line.strip()) for line in data.removeprefix(b"\xef\xbb\xbf").split(b"\n"))
    assert len(prompts) + len(faults) == used + 1


def test_nesting_of_any_depth_is_refused_in_words():
    for depth in range(900, 1100, 7):
        with pytest.raises(OptionError, match=r"line 1: (it is nested too deeply|prompt must be text)"):
            parse(b'{"prompt": ' + b"[" * depth + b"]" * depth + b"}")


def test_a_fingerprint_changes_with_all_that_is_said():
    base = {"id": "a", "prompt": "x", "domain": "d", "max_tokens": 3, "reference": "r"}
    changed = [base | {key: "other"} for key in ("id", "prompt", "domain", "reference")] + [base | {"max_tokens": 4}]
    prints = {fingerprint(parse(json.dumps(o).encode())[0]) for o in [base, *changed]}
    assert len(prints) == 6
    assert fingerprint(parse(json.dumps(dict(reversed(base.items()))).encode())[0]) in prints
    two = parse(b'{"prompt": "a", "id": "a"}', b'{"prompt": "b", "id": "b"}')[0]
    assert fingerprint(two) != fingerprint(two[::-1])


def test_files(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_bytes(GOOD + b"\nx")
    assert read_prompts(str(path), on_error="skip")[1] == [
        f"{path}, line 2: it is not JSON (Expecting value, column 1)."
    ]
    for bad, reason in ((tmp_path, "Is a directory"), (tmp_path / "no", "No such file"), ("a\0b", "null")):
        with pytest.raises(OptionError, match=f"^cannot read the prompts in .*{reason}"):
            read_prompts(bad)


def test_the_builtin_prompts_cover_what_they_promise():
    prompts = builtin_prompts()
    count = collections.Counter(p.domain for p in prompts)
    assert set(count) == {*KINDS, "demo"}
    assert min(count.values()) >= 4
    assert count["demo"] >= 28
    assert len(prompts) >= 64
    assert all(p.text for p in prompts)  # any model can take text; chat needs a template
    assert len({p.text for p in prompts}) == len(prompts)
    assert {p.domain for p in prompts if p.reference} == {"factual", "arithmetic"}
    assert all(p.reference for p in prompts if p.domain in ("factual", "arithmetic"))
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["sharpi_jax"]
    assert BUILTIN_PROMPTS in {path for pattern in patterns for path in (ROOT / "sharpi_jax").glob(pattern)}
    assert len(BUILTIN_PROMPTS.read_bytes().splitlines()) == len(prompts)  # one to a line, none blank


def test_the_builtin_prompts_suit_the_demo_model():
    model = models.demo()
    for prompt in builtin_prompts():
        ids = model.tokenizer.encode_prompt(prompt.text)
        assert model.tokenizer.decode(ids) == prompt.text
        if prompt.domain == "demo":
            assert 5 <= len(ids) <= 60, prompt.id
        assert len(ids) < model.config.context_length / 2
    lengths = {len(model.tokenizer.encode_prompt(p.text)) for p in builtin_prompts() if p.domain == "demo"}
    assert len(lengths) > 10
