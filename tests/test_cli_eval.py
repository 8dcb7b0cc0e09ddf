"""`sharpi-jax eval`: what it prints and writes, how it goes on after it was killed, and every refusal."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import models
import pytest

from sharpi_jax.cli.main import main

CapSys = pytest.CaptureFixture[str]
SMALL = ["--max_tokens=8", "--sweep_p_min=1,0.1", "--sweep_n_max=1", "--batch_size=4"]


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "He said", "domain": "one"}, {"prompt_ids": [7, 8, 9]}, {"prompt": "In the", "max_tokens": 3}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def table(out: str) -> list[list[str]]:
    """The cells of the printed table."""
    lines = out.partition("\nprompts:")[0].splitlines()
    return [re.split(r"\s{2,}", line.strip()) for line in lines]


def test_the_table_and_the_files(prompts: str, tmp_path: Path, capsys: CapSys) -> None:
    folder = tmp_path / "new" / "out"
    argv = ["eval", f"--prompts={prompts}", f"--report_dir={folder}", "--rounds=2", *SMALL, "--cache-dtype=float32"]
    assert main(argv) == 0
    out, err = capsys.readouterr()
    assert err == ""
    headings, *rows = table(out)
    assert headings[:6] == ["K", "p_min", "speed-up", "tokens/s", "accepted", "by p_min"]
    assert [row[:2] for row in rows] == [["0", "-"], ["1", "1"], ["1", "0.1"]]
    assert rows[0][2] == "1.00"
    document = json.loads((folder / "summary.json").read_text())
    for row, summary in zip(rows, document["summaries"], strict=True):
        assert row[3] == f"{summary['timing']['tokens_per_s']:.1f}"
        assert row[4] == ("-" if row[0] == "0" else f"{summary['overall']['acceptance_rate']['value']:.1%}")
    assert re.search(r"^prompts: 3, timed: 3, 2 rounds, medians, batch size 4$", out, re.M)
    compiled = re.search(r"^compiled: (\d+) programs, (\d) of them decode loops, in \d+\.\d s, not counted$", out, re.M)
    assert compiled is not None
    assert (int(compiled[1]), compiled[2]) == (document["compilations"], "2")
    assert f"report: {folder / 'report.html'}\n" in out
    assert document["details"]["command"].startswith("sharpi-jax eval --prompts=")
    assert len((folder / "results.jsonl").read_bytes().splitlines()) == 1 + 9
    assert (folder / "results.csv").read_text().count("\n") == 1 + 9
    assert "<html" in (folder / "report.html").read_text()


def test_bad_lines_are_skipped_with_a_note(prompts: str, capsys: CapSys) -> None:
    """Field case 22: an empty prompt, a line that is none, and a prompt that does not fit."""
    with open(prompts, "a") as file:
        file.write('{"prompt": ""}\nnonsense\n' + json.dumps({"id": "long", "prompt_ids": [1] * 2000}) + "\n")
    argv = ["eval", f"--prompts={prompts}", "--rounds=0", *SMALL, "--cache-dtype=float32"]
    assert main(argv) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "prompts.jsonl, line 4: prompt is empty" in err
    # JSON on standard output is alone there
    assert main([*argv, "--on_error=skip", "--output_json=-", "--draft_cost=0.5", "--verify_cost=0.25"]) == 0
    out, err = capsys.readouterr()
    assert [line.partition(":")[0] for line in err.splitlines()[:3]] == ["skipped"] * 3
    assert "line 5: it is not JSON" in err
    assert "prompt 'long': the prompt has 2000 tokens" in err
    assert "prompts: 3," in err
    assert "report: none; for one give --report_dir=FOLDER" in err
    document = json.loads(out)
    assert document["cost"] == {"draft": 0.5, "verify": 0.25}
    assert document["options"]["cache_dtype"] == "float32"
    assert [s["timing"] for s in document["summaries"]] == [None] * 3


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_there_is_a_bar_and_a_drawn_table(
    prompts: str, capsys: CapSys, monkeypatch: pytest.MonkeyPatch
) -> None:
    err, out = Terminal(), Terminal()
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["eval", f"--prompts={prompts}", "--rounds=1", *SMALL, "--cache-dtype=float32"]) == 0
    bar = err.getvalue()
    assert "9/9 [" in bar
    assert re.search(r"decoding: .*\d+ tokens/s, \d+\.\d% accepted", bar)
    assert "timing: " in bar
    assert "\u2502" in out.getvalue()  # a drawn column
    assert "speed-up" in out.getvalue()


def test_killed_and_given_again_the_results_are_those_of_one_run(tmp_path: Path, capsys: CapSys) -> None:
    """Interrupted, then killed, then left alone: three processes, and every line as of one that nothing befell."""
    flags = ["--max_tokens=16", "--sweep_p_min=1,0.05", "--sweep_n_max=1", "--batch_size=5", "--rounds=0"]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    command = [sys.executable, "-m", "sharpi_jax", "eval", *flags, f"--report_dir={broken}"]
    results = broken / "results.jsonl"

    def stopped_after(lines: int, by: signal.Signals) -> tuple[int, str]:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 120
        while not results.exists() or results.read_bytes().count(b"\n") < lines:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.002)
        process.send_signal(by)
        out, err = process.communicate(timeout=60)
        assert out == ""
        return process.returncode, err.splitlines()[-1]

    code, line = stopped_after(10, signal.SIGINT)
    assert code == 130
    done = re.fullmatch(rf"interrupted with (\d+) of 84 runs in {broken}; the same command goes on from there\.", line)
    assert done is not None
    first = results.read_bytes()
    written = first.count(b"\n") - 1
    assert int(done[1]) in (written - 1, written)  # Ctrl-C may come between the writing and the counting
    assert written < 84
    code, _ = stopped_after(first.count(b"\n") + 15, signal.SIGKILL)
    assert code == -signal.SIGKILL
    second = results.read_bytes()
    assert second.startswith(first)
    assert second.count(b"\n") < 85
    assert sorted(os.listdir(broken)) == ["results.jsonl"]  # no report of a part
    assert main(["eval", *flags, f"--report_dir={broken}"]) == 0
    assert main(["eval", *flags, f"--report_dir={whole}"]) == 0
    assert results.read_bytes().count(b"\n") == 85
    assert results.read_bytes() == (whole / "results.jsonl").read_bytes()
    assert (broken / "results.csv").read_bytes() == (whole / "results.csv").read_bytes()
    parts = [json.loads((folder / "summary.json").read_text())["summaries"] for folder in (whole, broken)]
    assert parts[0] == parts[1]
    assert capsys.readouterr().err.startswith("the demo model and prompts of its own domain")


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (
            ["--sweep_p_min=1,0"],
            2,
            "=1,0: must be numbers above 0 and at most 1, separated by commas, and '0' is none",
        ),
        (["--sweep_p_min=1,,0.5"], 2, "and '' is none"),
        (["--sweep_p_min=nan"], 2, "and 'nan' is none"),
        (["--sweep_n_max=1,99"], 2, "must be integers from 0 to 16, separated by commas, and '99' is none"),
        (["--sweep_n_max=1.5"], 2, "and '1.5' is none"),
        (["--on_error=panic"], 2, "must be one of stop, skip"),
        (["--draft_cost=-1"], 2, "must be a number of at least 0"),
        (["--batch_size=0"], 2, "must be 1 to 1024"),
        (["--report_dir="], 2, "flag --report_dir needs a path"),
        (["--prompts="], 2, "flag --prompts needs a path"),
        (["--prompts=absent.jsonl"], 1, "cannot read the prompts in 'absent.jsonl'"),
        (["--report_dir=/proc/none"], 1, "--report_dir=/proc/none cannot be written"),
        (["--report_dir=/dev/null"], 1, "--report_dir=/dev/null cannot be written"),
        (["--output_json=/"], 1, "--output_json=/ cannot be written"),
        (["--model=absent.gguf"], 1, "absent.gguf"),
        (["prompts.jsonl"], 2, "unexpected argument 'prompts.jsonl'; give the prompts as --prompts=FILE."),
        (["--spec_draft_p_min=1"], 2, "unknown flag --spec_draft_p_min"),
    ],
)
def test_refusals_are_one_line(flags: list[str], code: int, words: str, capsys: CapSys) -> None:
    assert main(["eval", *flags]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert words in err


def test_other_results_in_the_folder_stay(prompts: str, tmp_path: Path, capsys: CapSys) -> None:
    (tmp_path / "results.jsonl").write_text("mine\n")
    assert main(["eval", f"--prompts={prompts}", f"--report_dir={tmp_path}", *SMALL]) == 1
    _, err = capsys.readouterr()
    assert "holds no results of ours and is left as it is; give another report_dir." in err
    assert (tmp_path / "results.jsonl").read_text() == "mine\n"


def test_a_model_without_a_head(prompts: str, capsys: CapSys) -> None:
    model = f"--model={models.fixture('qwen35-tiny-nomtp-f16')}"
    assert main(["eval", model, f"--prompts={prompts}"]) == 1
    assert "no MTP head" in capsys.readouterr().err


def test_help_and_version_need_no_file(capsys: CapSys) -> None:
    assert main(["eval", "--help"]) == 0
    assert "--sweep_p_min=P,P,..." in capsys.readouterr().out
    assert main(["eval", "--version"]) == 0
    assert capsys.readouterr().out.startswith("sharpi-jax ")
