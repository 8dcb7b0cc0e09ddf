"""Sampling, rules and log-probabilities from the command line, by ids of the fixture."""

import json
from pathlib import Path
from typing import Any

import pytest
from fixtures import fixture

from sharpi_jax.cli.main import main

CapSys = pytest.CaptureFixture[str]
BASE = (f"--model={fixture('qwen35-tiny-f32')}", "--prompt_ids=1,2,3,40,50,60", "--max_tokens=20", "--output_json=-")


def run(capsys: CapSys, *argv: str) -> tuple[dict[str, Any], str]:
    """The document, and what was said beside it."""
    assert main([*BASE, *argv]) == 0
    captured = capsys.readouterr()
    return json.loads(captured.out), captured.err


def test_a_seed_gives_the_same_text_with_and_without_drafts(capsys: CapSys) -> None:
    drawn = ("--temp", "0.8", "--top_k=40", "--min_p=0.02", "--repeat_penalty=1.1", "--logit_bias=258-1", "-s", "7")
    plain, _ = run(capsys, *drawn, "--spec_type=none", "--logprobs=2")
    drafted, _ = run(capsys, *drawn, "--logprobs=2")
    assert drafted["output_ids"] == plain["output_ids"]
    assert drafted["logprobs"] == plain["logprobs"]
    assert [entry["token"] for entry in plain["logprobs"]] == plain["output_ids"]
    assert all(entry["logprob"] < 0 and len(entry["top"]) == 2 for entry in plain["logprobs"])
    assert drafted["stats"]["drafted"] > 0
    other, _ = run(capsys, *drawn[:-1], "8")
    assert other["output_ids"] != plain["output_ids"]
    assert "logprobs" not in other
    assert other["options"]["seed"] == 8
    assert other["options"]["logit_bias"] == [[258, -1.0]]


def test_greedy_knows_no_seed(capsys: CapSys) -> None:
    """Field case 17: at temperature 0 the seed has no effect, at any depth."""
    found = [run(capsys, f"--seed={seed}", f"--spec_draft_n_max={K}")[0] for K in (1, 3) for seed in (0, 9, 0)]
    assert len({tuple(document["output_ids"]) for document in found}) == 1


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--accept_rule=typical",), "--accept_rule=typical is lossy"),
        (("--accept_rule=rejection", "--temperature=1"), "--accept_rule=rejection keeps the distribution"),
        (("--spec_draft_stop_p=0.5", "--spec_draft_p_min=0.2"), "--spec_draft_stop_p too can change the text"),
    ],
)
def test_what_changes_the_text_is_said(capsys: CapSys, argv: tuple[str, ...], said: str) -> None:
    document, err = run(capsys, *argv)
    assert said in err
    rule = argv[0].partition("=")[2] if "rule" in argv[0] else "p_min"
    assert f"by argmax, {document['stats']['accepted_p_min']} by {rule}" in err


@pytest.mark.parametrize(
    "argv",
    [
        ("--temperature=1", "--spec_draft_p_min=0.2"),
        ("--temperature=1", "--accept_rule=relaxed"),
        ("--accept_rule=block",),
        ("--logit_bias=9999+1",),
        ("--temperature=warm",),
    ],
)
def test_refused_in_one_line(capsys: CapSys, argv: tuple[str, ...]) -> None:
    """Field case 18: what cannot be honoured is never ignored."""
    assert main([*BASE, *argv]) != 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("sharpi-jax: error: ")
    assert captured.err.count("\n") == 1


def test_auto_measures_once_and_keeps_the_text(capsys: CapSys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    plain, _ = run(capsys, "--spec_type=none")
    found, err = run(capsys, "--spec_draft_n_max=auto")
    assert found["output_ids"] == plain["output_ids"]
    assert found["options"]["spec_draft_n_max"] == "auto"
    assert "MTP: drafting up to 7 tokens per step as pays" in err
    assert list((tmp_path / "sharpi_jax" / "costs").iterdir())
