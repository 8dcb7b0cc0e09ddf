"""The parts of the command line that need no model: trace lines, figures, the JSON file, a scripted conversation."""

import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sharpi_jax.cli import json_file, report
from sharpi_jax.cli.main import main
from sharpi_jax.cli.run_flags import check_run, parse_run
from sharpi_jax.cli.trace import trace_line
from sharpi_jax.decode.options import DecodeOptions
from sharpi_jax.decode.stats import Statistics, StepRecord, Timing
from sharpi_jax.errors import OptionError

CapSys = pytest.CaptureFixture[str]


def _token_text(token: int) -> str:
    return {1: " a", 2: "\n", 3: "é"}[token]


@pytest.mark.parametrize(
    ("accepted", "passed", "argmax", "expected"),
    [
        (0, 0, (False, True), 'd1=2 "\\n" p=0.2500 reject | d2=3 "é" p=0.0000 - | correction=1 " a"'),
        (1, 1, (True, False), 'd1=2 "\\n" p=0.2500 ACCEPT | d2=3 "é" p=0.0000 reject | correction=1 " a"'),
        (1, 1, (False, False), 'd1=2 "\\n" p=0.2500 ACCEPT(p_min) | d2=3 "é" p=0.0000 reject | correction=1 " a"'),
        (2, 2, (False, True), 'd1=2 "\\n" p=0.2500 ACCEPT(p_min) | d2=3 "é" p=0.0000 ACCEPT | bonus=1 " a"'),
        (0, 2, (True, True), 'd1=2 "\\n" p=0.2500 stop | d2=3 "é" p=0.0000 -'),
        (1, 2, (True, True), 'd1=2 "\\n" p=0.2500 ACCEPT | d2=3 "é" p=0.0000 stop'),
    ],
)
def test_trace_lines(accepted: int, passed: int, argmax: tuple[bool, ...], expected: str) -> None:
    choices = (*(d if own else 1 for d, own in zip((2, 3), argmax, strict=True)), 1)
    step = StepRecord(42, 1, (2, 3), (0.25, 0.00001), argmax, accepted, passed, 1, choices)
    assert trace_line(step, _token_text) == f'[mtp] P=42 t1=1 " a" | {expected}'


def test_trace_line_of_a_plain_step() -> None:
    assert trace_line(StepRecord(7, 3, (), (), (), 0, 0, 2, (2,)), _token_text) == '[mtp] P=7 t1=3 "é" | bonus=2 "\\n"'


class FakeGeneration:
    """As much of a Generation as the report reads."""

    drafting = True
    options = DecodeOptions()
    finish_reason = "length"
    timing = Timing(10, 0.5, 100, 2.0, 3.0)

    def __init__(self, **counts: Any) -> None:
        self.stats = Statistics(**counts)


def test_statistics_lines() -> None:
    counts = {"steps": 50, "drafted": 100, "accepted": 50, "accepted_argmax": 40, "accepted_p_min": 10}
    run: Any = FakeGeneration(**counts, drafted_per_position=(50, 50), accepted_per_position=(30, 20))
    assert report.statistics(run) == [
        "prompt:   10 tokens in 0.500 s, 20.0 tokens/s",
        "decode:   100 tokens in 2.000 s, 50.0 tokens/s",
        "accepted: 50/100 (50.0%), 40 by argmax, 10 by p_min",
        "by draft: 1: 30/50  2: 20/50",
        "length:   2.00 tokens per step on average, 50 steps",
        "compile:  3.00 s, not counted above",
        "finish:   length (--max_tokens reached)",
    ]


@pytest.mark.parametrize(("drafted", "accepted", "warned"), [(64, 0, True), (63, 0, False), (64, 1, False)])
def test_a_head_that_never_agrees_is_told(drafted: int, accepted: int, warned: bool) -> None:
    run: Any = FakeGeneration(steps=drafted, drafted=drafted, accepted=accepted, drafted_per_position=(drafted,),
                              accepted_per_position=(accepted,))  # fmt: skip
    assert any("none of" in line for line in report.statistics(run)) is warned


def test_json_replaces_files_whole_and_devices_never(tmp_path: Path) -> None:
    target, link = tmp_path / "real.json", tmp_path / "link.json"
    target.write_text("old")
    link.symlink_to(target)
    json_file.check_writable(str(link))
    assert target.read_text() == "old"
    json_file.write(str(link), {"text": "é"})
    assert link.is_symlink()
    assert json.loads(target.read_text()) == {"text": "é"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.json", "real.json"]
    json_file.check_writable(os.devnull)
    json_file.write(os.devnull, {})
    assert not Path(os.devnull).is_file()
    for folder in (tmp_path, f"{tmp_path}/absent/"):
        with pytest.raises(OptionError, match="Is a directory"):
            json_file.check_writable(str(folder))


class FakeModel:
    """A model whose replies are scripted: a text, or an exception to raise after the first piece."""

    has_mtp = True
    config = SimpleNamespace(vocab_size=512)
    notes = ("a remark about the file",)

    def __init__(self, replies: list[Any]) -> None:
        self.replies = replies
        self.prompts: list[str] = []
        self.chat_template = self

    def render(self, messages: list[dict[str, str]], add_generation_prompt: bool, thinking: bool | None) -> str:
        assert add_generation_prompt
        assert thinking is None
        return "".join(f"{message['role']}:{message['content']};" for message in messages)

    def generate(self, prompt: str, options: Any, *, on_text: Callable[[str], None], **kwargs: Any) -> Any:
        self.prompts.append(prompt)
        reply = self.replies.pop(0)
        if isinstance(reply, BaseException):
            if isinstance(reply, KeyboardInterrupt):
                on_text("half")
            raise reply
        on_text(reply)
        generation = FakeGeneration()
        generation.text = reply  # type: ignore[attr-defined]
        generation.finish_reason = "context" if reply == "long" else "stop"
        return generation


class Terminal(io.StringIO):
    """Standard input with somebody typing; ^C on a line of its own interrupts."""

    def isatty(self) -> bool:
        return True

    def readline(self, size: int | None = -1, /) -> str:
        line = super().readline()
        if line == "^C\n":
            raise KeyboardInterrupt
        return line


def test_conversation(data_dir: Path, capsys: CapSys, monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeModel(["one", KeyboardInterrupt(), OptionError("the prompt has too many tokens."), "long"])
    monkeypatch.setattr("sharpi_jax.api.load", lambda *args, **kwargs: model)
    monkeypatch.setattr(sys, "stdin", Terminal("a\n \n^C\nb\nc\nd\n"))
    argv = ["--chat", "--system_prompt=s", f"--model={data_dir / 'qwen35-tiny-f32.gguf'}"]
    assert main(argv) == 0
    out, err = capsys.readouterr()
    assert model.prompts == [
        "system:s;user:a;",
        "system:s;user:a;assistant:one;user:b;",
        "system:s;user:a;assistant:one;user:b;assistant:half;user:c;",
        "system:s;user:a;assistant:one;user:b;assistant:half;user:d;",
    ]
    assert out.replace("> ", "") == "one\nhalflong\n"
    assert "a remark about the file" in err
    assert "the prompt has too many tokens." in err
    assert "the context is full" in err
    assert "Ctrl-D ends.\n" in err
    monkeypatch.setattr(sys, "stdin", Terminal(""))
    assert main([*argv, "--output_json=x"]) == 2
    assert "a conversation is many runs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], ["MTP: drafting up to 3 tokens per step"]),
        (["--spec_draft_n_max=1"], ["MTP: drafting up to 1 token per step"]),
        (["--spec_type=none", "--spec_draft_p_min=0.1"], ["MTP: off (--spec_type=none)"]),
        (["--spec_draft_vocab=512"], ["MTP: drafting up to 3 tokens per step"]),
        (["--spec_draft_vocab=9"], ["MTP: drafting up to 3 tokens per step, chosen among 9 of 512 and the prompt's"]),
        (
            ["--spec_draft_vocab=9", "--spec_draft_p_min=0.5"],
            [..., ..., "--spec_draft_vocab=9 too can change the text: such a run depends on its drafts"],
        ),
        (["--spec_draft_vocab=9", "--spec_draft_p_min=0.6"], [..., ...]),
        (["--spec_draft_n_max=auto"], ["MTP: drafting up to 7 tokens per step as pays"]),
        (
            ["--spec_draft_n_max=auto", "--accept_rule=typical"],
            [
                ...,
                "--accept_rule=typical is lossy: the text may be another than the model alone would write",
                "--spec_draft_n_max=auto too can change the text: such a run depends on its drafts",
            ],
        ),
        (
            ["--accept_rule=block", "--temperature=1"],
            [..., "--accept_rule=block keeps the distribution, but a seed gives other text than without drafts"],
        ),
        (["--temperature=1"], ["MTP: drafting up to 3 tokens per step"]),
        (["--spec_draft_p_min=0"], [..., "--spec_draft_p_min=0 means not set: taken as 1, which is exact"]),
        (["--spec_draft_p_min=0.5"], [..., "--spec_draft_p_min=0.5 is lossy: the text may leave the greedy path"]),
        (
            ["--spec_draft_p_min=0.501"],
            [..., "--spec_draft_p_min=0.501 is the same as 1: two tokens cannot both exceed one half"],
        ),
    ],
)
def test_notices(argv: list[str], expected: list[Any]) -> None:
    flags = check_run(parse_run(["--model=m", "--prompt=x", *argv]), {})
    model: Any = FakeModel([])
    lines = report.notices(flags, model)
    assert lines[0] == "a remark about the file"
    assert len(lines) == len(expected) + 1
    assert all(wanted in (..., line) for wanted, line in zip(expected, lines[1:], strict=True))
