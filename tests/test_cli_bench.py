"""`sharpi-jax bench`: its table, its JSON, its advice, and every refusal."""

import json
from pathlib import Path

import models
import pytest

from sharpi_jax.cli.bench import _report
from sharpi_jax.cli.main import main
from sharpi_jax.decode.options import DecodeOptions
from sharpi_jax.decode.stats import Statistics
from sharpi_jax.evaluate import Costs, DepthSpeed, Speed, bandwidth

CapSys = pytest.CaptureFixture[str]
NAME = "qwen35-tiny-f32"
TEXT = "Why does the forest wait?"
BASE = ["bench", "--max_tokens=6", "--rounds=1", "--draft-max=1", "--threads=2"]


@pytest.fixture(autouse=True)
def _small_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "READ_BYTES", 1 << 20)


def test_a_run_on_a_file(tmp_path: Path, capsys: CapSys) -> None:
    target = tmp_path / "out.json"
    model = f"--model={models.fixture(NAME)}"
    assert main([*BASE, model, f"--prompt={TEXT}", "--prompt_tokens=20", f"--output_json={target}"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    document = json.loads(target.read_text())
    ids = models.model(NAME).tokenizer.encode_prompt(TEXT)
    run = models.model(NAME).generate((ids * 20)[:20], DecodeOptions(6, spec_draft_n_max=1, ignore_eos=True))
    assert [d["K"] for d in document["depths"]] == [0, 1]
    assert document["depths"][1]["stats"] == run.stats.as_dict()
    assert (document["prompt_tokens"], document["max_tokens"], document["options"]["threads"]) == (20, 6, 2)
    rows = [line.split() for line in out.splitlines() if line.strip()[:1].isdigit()]
    for row, depth in zip(rows, document["depths"], strict=True):
        assert row[0] == str(depth["K"])
        assert float(row[1]) == pytest.approx(depth["tokens_per_s"], abs=0.06)
        assert row[-1] == "yes"


def test_json_on_standard_output_is_alone_there(tmp_path: Path, capsys: CapSys) -> None:
    (tmp_path / "text").write_text(TEXT + "\n")
    model = f"--model={models.fixture('qwen35-tiny-nomtp-f16')}"
    assert main([*BASE, model, f"--prompt_file={tmp_path / 'text'}", "--output_json=-"]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert document["best_K"] == 0
    assert document["prompt_tokens"] == len(models.model("qwen35-tiny-nomtp-f16").tokenizer.encode_prompt(TEXT))
    assert err.splitlines()[-1] == "best:      K = 0, the only one: there are no drafts without an MTP head"


def measured(*tokens_per_s: float) -> Speed:
    """Made-up figures: steps of 20 ms and 10 more for each draft, of 200 MB and 100 more."""
    depths = tuple(
        DepthSpeed(K, speed, 20.0 + 10 * K, Statistics(steps=4, drafted=4 * K, accepted=3 * K), K != 2, (2 + K) * 10**8)
        for K, speed in enumerate(tokens_per_s)
    )
    costs = Costs(tuple(20.0 + K for K in range(len(depths))), tuple(9.0 * K for K in range(len(depths))))
    return Speed(30, 64, 128, 5, 99.5, depths, costs, 20.0, 12.34)


def test_the_table() -> None:
    lines = _report(measured(50, 60, 40), "m.gguf", 2)
    assert lines[:5] == [
        "model:     m.gguf",
        "each run:  30 tokens of prompt, 64 decoded, in a context of 128; medians of 5",
        "bandwidth: 20.0 GB/s read, 2 threads",
        "prefill:   99.5 tokens/s",
        "compile:   12.3 s, not counted",
    ]
    assert [line.split() for line in lines[7:10]] == [
        ["0", "50.0", "1.00", "1.00", "20.00", "20.00", "0.00", "200.0", "10.0", "50.0%", "yes"],
        ["1", "60.0", "1.20", "75.0%", "1.75", "30.00", "21.00", "9.00", "300.0", "10.0", "50.0%", "yes"],
        ["2", "40.0", "0.80", "75.0%", "2.50", "40.00", "22.00", "18.00", "400.0", "10.0", "50.0%", "no"],
    ]
    assert len({len(line.rpartition("  ")[0]) for line in lines[6:10]}) == 1  # columns stand under their heads
    assert lines[-1] == "best:      K = 1 (--spec_draft_n_max=1), 1.20 times plain decoding"
    assert _report(measured(50, 40), "m", 2)[-1] == "best:      K = 0 (--spec_type=none), 1.00 times plain decoding"


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (["--rounds=0"], 2, "must be 1 to 1000"),
        (["--max_tokens=0"], 2, "must be 1 to"),
        (["--spec_draft_n_max=17"], 2, "must be 0 to 16"),
        (["--prompt_tokens=0"], 2, "must be 1 to"),
        (["--prompt=a", "--prompt_file=b"], 2, "--prompt and --prompt_file were both given; give one prompt."),
        (["--prompt=\udcff"], 2, "--prompt is not valid UTF-8."),
        (["--prompt="], 1, "the prompt is empty"),
        (["--prompt_file=/nonexistent"], 1, "cannot read the prompt file '/nonexistent'"),
        (["--prompt_tokens=5000"], 1, "the prompt has 5000 tokens, but the context holds 4096"),
        (["--model="], 2, "flag --model needs a path"),
        (["--model=absent.gguf"], 1, "absent.gguf"),
        (["--output_json="], 2, "flag --output_json needs a path"),
        (["--output_json=/"], 1, "--output_json=/ cannot be written"),
        (["model.gguf"], 2, "unexpected argument 'model.gguf'; give the model as --model=FILE."),
        (["--chat"], 2, "unknown flag --chat"),
    ],
)
def test_refusals_are_one_line(flags: list[str], code: int, words: str, capsys: CapSys) -> None:
    assert main([*BASE, f"--model={models.fixture(NAME)}", *flags]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert words in err


def test_help_and_version_need_no_file(capsys: CapSys) -> None:
    assert main(["bench", "--help"]) == 0
    assert "--rounds=N" in capsys.readouterr().out
    assert main(["bench", "--version"]) == 0
    assert capsys.readouterr().out.startswith("sharpi-jax ")
