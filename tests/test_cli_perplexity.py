"""`sharpi-jax perplexity`: what it prints, its JSON, its bar, and every refusal."""

import io
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import models
import pytest

from sharpi_jax.cli.main import main

CapSys = pytest.CaptureFixture[str]
NAME = "qwen35-tiny-f32"
TEXT = "Why does the forest wait? It's red, and the valley isn't far. " * 6
CTX = "--ctx_size=32"


@pytest.fixture
def base(tmp_path: Path) -> list[str]:
    """The command on a text file that ends in a newline, in windows of 32 tokens."""
    path = tmp_path / "text.txt"
    path.write_text(TEXT + "\n")
    return ["perplexity", f"--model={models.fixture(NAME)}", f"--file={path}", CTX]


def figures(out: str) -> dict[str, list[float]]:
    """The numbers of each line, by what stands before the colon."""
    lines = (line.partition(":") for line in out.splitlines())
    return {name: [float(n) for n in re.findall(r"\d+(?:\.\d+)?", rest)] for name, _, rest in lines}


def test_figures_are_the_librarys(base: list[str], capsys: CapSys) -> None:
    found = models.model(NAME).perplexity(TEXT, ctx_size=32)
    assert main(base) == 0
    out, err = capsys.readouterr()
    assert err == ""
    printed = figures(out)
    assert printed["text"][-3:] == [found.windows, 32, found.tokens]
    for name, values in (
        ("perplexity", [found.perplexity, found.perplexity_error]),
        ("nats per token", [found.nats_per_token, found.nats_error]),
        ("bits per byte", [found.bits_per_byte]),
    ):
        assert printed[name] == pytest.approx(values, abs=6e-5)
    assert found.agreement is not None
    rates = [x for d in (1, 2, 3) for x in (d, 100 * found.agreement.rate(d), 100 * found.agreement.standard_error(d))]
    assert printed["MTP head"] == pytest.approx(rates, abs=0.06)


def test_json_on_standard_output_is_alone_there(base: list[str], capsys: CapSys) -> None:
    assert main([*base, "--output_json=-", "--cache-dtype=float16"]) == 0
    out, err = capsys.readouterr()
    document: dict[str, Any] = json.loads(out)
    assert document["perplexity"] == pytest.approx(math.exp(document["nats_per_token"]))
    assert (document["options"]["ctx_size"], document["options"]["cache_dtype"]) == (32, "float16")
    assert [entry["depth"] for entry in document["mtp"]["agreement"]] == [1, 2, 3]
    assert figures(err)["perplexity"][0] == pytest.approx(document["perplexity"], abs=6e-5)


def test_a_head_in_a_file_of_its_own(base: list[str], capsys: CapSys) -> None:
    trunk, head = (models.fixture(f"qwen35-tiny-{name}-f16") for name in ("nomtp", "mtponly"))
    assert main([*base, f"--model={trunk}", f"--mtp_model={head}"]) == 0
    beside = capsys.readouterr().out
    assert main([*base, f"--model={models.fixture('qwen35-tiny-f16')}"]) == 0
    assert beside == capsys.readouterr().out
    assert figures(beside)["MTP head"]
    assert main(["perplexity", base[2], f"--mtp_model={head}"]) == 2
    assert "a --model beside it" in capsys.readouterr().err


def test_json_in_a_file_and_a_model_without_a_head(base: list[str], tmp_path: Path, capsys: CapSys) -> None:
    model = f"--model={models.fixture('qwen35-tiny-nomtp-f16')}"
    assert main([*base, model, f"--output_json={tmp_path / 'out.json'}"]) == 0
    out, _ = capsys.readouterr()
    assert out.splitlines()[-1] == "MTP head:       none in this file"
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["mtp"] is None
    assert figures(out)["perplexity"][0] == pytest.approx(document["perplexity"], abs=6e-5)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_bar_is_shown_on_a_terminal_and_goes(
    base: list[str], capsys: CapSys, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert main(base) == 0
    out, _ = capsys.readouterr()
    shown = terminal.getvalue()
    windows = int(figures(out)["text"][-3])
    assert f"{windows}/{windows} [" in shown
    assert f"{figures(out)['perplexity'][0]:.4f}" in shown
    assert shown.endswith("\r")


@pytest.mark.parametrize(
    ("content", "flags", "code", "words"),
    [
        (None, [], 1, "cannot read the text file"),
        (b"caf\xe9", [], 1, "is not UTF-8 text (byte 3)"),
        (b"", [], 1, "the text has 0 tokens, but one window takes 32; give a longer text or lower ctx_size."),
        (b"too short\n", [], 1, "but one window takes 32"),
        (b"long enough" * 99, ["--ctx_size=4"], 1, "a window of perplexity needs at least 8 tokens"),
        (b"long enough" * 9999, ["-c", "5000"], 1, "ctx_size is 5000, but the model was made for at most 4096 tokens."),
        (b"x", ["--ctx_size=0"], 2, "--ctx_size"),
        (b"x", ["--file="], 2, "flag --file needs a path; give --file=TEXT."),
        (b"x", ["--model="], 2, "flag --model needs a path"),
        (b"x", ["--output_json="], 2, "flag --output_json needs a path"),
        (b"x", ["--output_json=/"], 1, "--output_json=/ cannot be written"),
        (b"x", ["story.txt"], 2, "unexpected argument 'story.txt'; give the text as --file=FILE."),
        (b"x", ["--prompt=x"], 2, "unknown flag --prompt"),
        (b"x", ["--model=absent.gguf"], 1, "absent.gguf"),
    ],
)
def test_refusals_are_one_line(
    content: bytes | None, flags: list[str], code: int, words: str, base: list[str], capsys: CapSys
) -> None:
    path = Path(base[2].removeprefix("--file="))
    path.unlink() if content is None else path.write_bytes(content)
    assert main([*base, *flags]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert words in err


def test_the_text_must_be_named(capsys: CapSys) -> None:
    assert main(["perplexity"]) == 2
    assert "flag --file needs a path; give --file=TEXT." in capsys.readouterr().err


def test_the_demo_model_and_standard_input(capsys: CapSys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(TEXT.encode())))
    assert main(["perplexity", "--file=-", CTX]) == 0
    out, _ = capsys.readouterr()
    expected = models.demo().perplexity(TEXT, ctx_size=32)
    assert figures(out)["perplexity"][0] == pytest.approx(expected.perplexity, abs=6e-5)


def test_help_and_version_need_no_file(capsys: CapSys) -> None:
    assert main(["perplexity", "--help"]) == 0
    assert "--file=FILE" in capsys.readouterr().out
    assert main(["perplexity", "--version"]) == 0
    assert capsys.readouterr().out.startswith("sharpi-jax ")
