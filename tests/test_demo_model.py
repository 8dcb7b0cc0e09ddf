"""The model that ships with the package, held to llama.cpp, to the NumPy reference, and to what it was trained for.

`data/demo_llama.json` holds llama-server's own greedy tokens and counts on the float32 file of the same values
(tools/demo_model/peer.py); `data/demo_heldout.json` prompts and text that training never saw (evaluate.py).
"""

import dataclasses
import json
import tomllib
from pathlib import Path

import models
import numpy as np
import pytest
from reference import numpy_model
from scripted import ShiftedDrafter

import sharpi_jax
from sharpi_jax.api import Model
from sharpi_jax.assets import DEMO_MODEL, DEMO_PROMPT
from sharpi_jax.cli import demo, run_flags
from sharpi_jax.cli.main import main
from sharpi_jax.decode.decoder import Decoder
from sharpi_jax.decode.score import score
from sharpi_jax.evaluate import Agreement
from tools.demo_model import measures

ROOT = Path(__file__).parent.parent
LLAMA = json.loads((models.DATA / "demo_llama.json").read_text())
HELD_OUT = json.loads((models.DATA / "demo_heldout.json").read_text())
TOKENS = 64


def counts(model: Model, K: int) -> measures.Counts:
    """Over 20 held-out prompts, up to each output's first repetition."""
    return measures.counts_before_loops(measures.decode(model, HELD_OUT["prompts"][:20], K, 1.0, TOKENS))


def test_it_is_the_default_and_small_and_in_the_wheel():
    assert models.demo().path == DEMO_MODEL
    assert DEMO_MODEL.stat().st_size <= 12e6
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["sharpi_jax"]
    assert DEMO_MODEL in {path for pattern in patterns for path in (ROOT / "sharpi_jax").glob(pattern)}


def test_it_is_a_hybrid_with_a_tied_head_and_an_mtp_block():
    cfg, params = models.demo().config, models.demo().decoder.params
    assert cfg.layer_kinds.count("delta") == 3 * cfg.layer_kinds.count("attention") > 0
    assert cfg.delta_heads != cfg.delta_key_heads
    assert cfg.has_mtp
    assert params.head is params.embed


def test_its_logits_are_those_of_the_numpy_reference():
    ids = HELD_OUT["windows"][0][:120]
    reference, scores = numpy_model.load(DEMO_MODEL), models.demo().score(ids)
    out = reference.trunk(ids)
    drafts = reference.mtp(ids, out["hidden"])
    for ours, theirs in ((scores.logits, out["logits"]), (scores.mtp_logits, drafts["logits"])):
        assert np.abs(ours - theirs).max() < 5e-5
        np.testing.assert_array_equal(ours.argmax(-1), theirs.argmax(-1))


@pytest.mark.parametrize("K", [1, 2, 3])
def test_tokens_and_counts_are_llama_cpps(K):
    """llama-server emits the first token outside its steps: its 64 tokens are our 63, with the same drafts."""
    assert len(LLAMA) == 20
    for run in LLAMA:
        options = sharpi_jax.DecodeOptions(max_tokens=TOKENS - 1, spec_draft_n_max=K, ignore_eos=True)
        ours = models.demo().generate(run["prompt"], options)
        assert list(ours.output_ids) == run["tokens"][: TOKENS - 1]
        assert [ours.stats.drafted, ours.stats.accepted] == run["counts"][str(K)]


def test_acceptance_on_held_out_prompts():
    assert counts(models.demo(), 1).acceptance_rate >= 0.60
    assert counts(models.demo(), 3).mean_accepted_length >= 2.2


def test_the_head_agrees_with_the_trunk_on_held_out_text():
    found = Agreement.of(measures.depth_hits(models.demo().decoder, HELD_OUT["windows"][:45]))
    assert found.positions >= 10_000
    assert found.rate(1) >= 0.65
    assert found.rate(2) >= 0.50


def test_the_hidden_from_before_the_final_norm_costs_agreement():
    """At depth 1, over all held-out text, by more than two standard errors."""
    right = models.demo().decoder
    wrong = measures.with_params(right, measures.without_final_norm(right.params))
    gains = []
    for window in HELD_OUT["windows"]:
        scores = score(right, window[:-1])
        choice = scores.logits.argmax(-1)
        handed_wrong = score(wrong, window[:-1]).mtp_logits
        gains.append((scores.mtp_logits.argmax(-1) == choice).astype(float) - (handed_wrong.argmax(-1) == choice))
    gain = np.concatenate(gains)
    assert len(gain) >= 10_000
    assert gain.mean() > 2 * gain.std() / len(gain) ** 0.5


def test_bits_per_byte_on_held_out_text():
    pairs = [measures.bits_per_byte(models.demo(), window) for window in HELD_OUT["windows"][:20]]
    bits, size = np.sum(pairs, axis=0)
    assert bits / size <= 1.5


def test_swapped_halves_of_the_mtp_input_cost_a_quarter_of_the_acceptance():
    wrong = sharpi_jax.load()
    wrong.decoder = Decoder(measures.swapped_halves(wrong.decoder.params), wrong.config)
    assert counts(wrong, 1).acceptance_rate <= 0.75 * counts(models.demo(), 1).acceptance_rate


class ShiftedDecoder(Decoder):
    def advance(self, state, controls, until, drafter=None):
        return super().advance(state, controls, until, ShiftedDrafter())


def test_drafts_shifted_by_one_are_not_accepted():
    """And do not change the text: no drafter can."""
    wrong = sharpi_jax.load()
    wrong.decoder = ShiftedDecoder(wrong.decoder.params, wrong.config)
    options = sharpi_jax.DecodeOptions(max_tokens=TOKENS - 1, spec_draft_n_max=3, ignore_eos=True)
    runs = [wrong.generate(run["prompt"], options) for run in LLAMA[:5]]
    assert [list(run.output_ids) for run in runs] == [run["tokens"][: TOKENS - 1] for run in LLAMA[:5]]
    drafted, accepted = (sum(getattr(run.stats, name) for run in runs) for name in ("drafted", "accepted"))
    assert drafted > 300
    assert accepted < 0.05 * drafted


# --- the command line without --model ---------------------------------------------------------------------------------


def test_without_arguments_it_shows_that_drafting_changes_nothing_but_the_speed(capsys):
    assert main(["--max_tokens=48", f"--prompt={DEMO_PROMPT}"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(DEMO_PROMPT)
    assert out.count("\n") >= 1
    for line in (
        "MTP off:  48 tokens in ",
        "MTP on:   48 tokens in ",
        "outputs:  identical, all 48 tokens",
        "by draft: 1: ",
    ):
        assert line in err


def test_a_lossy_run_shows_both_texts_and_where_they_part(capsys):
    assert main(["--max_tokens=48", f"--prompt={DEMO_PROMPT}", "--spec_draft_p_min=0.01"]) == 0
    out, err = capsys.readouterr()
    assert out.count(DEMO_PROMPT) == 2
    assert "is lossy" in err
    assert "outputs:  different from output token " in err


def test_a_difference_under_an_exact_rule_is_called_a_fault(capsys, monkeypatch):
    """Against a second run that a lossy rule made, under flags that say exact."""
    flags = run_flags.check_run(run_flags.parse_run(["--max_tokens=24"]))
    model = models.demo()
    lossy = dataclasses.replace(flags.options, spec_draft_p_min=0.01)
    honest = model.generate

    def wrong(prompt, options, **rest):
        return honest(prompt, options if options.spec_type == "none" else lossy, **rest)

    monkeypatch.setattr(model, "generate", wrong)
    demo.compare(model, flags, DEMO_PROMPT)
    err = capsys.readouterr().err
    assert "on, which must not happen: please report it" in err
    assert "lossy" not in err


@pytest.mark.parametrize(("tokens", "said"), [(0, "all 0 tokens"), (1, "all 1 token")])
def test_the_comparison_of_next_to_nothing(tokens, said, capsys):
    assert main([f"--max_tokens={tokens}", f"--prompt={DEMO_PROMPT}"]) == 0
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--spec_type=none", "--trace_mtp", "--spec_type=mtp"])
def test_a_flag_that_asks_for_one_run_gets_one(flag, capsys):
    assert main(["--max_tokens=4", "--prompt=And he said", flag]) == 0
    assert "MTP on:" not in capsys.readouterr().err
