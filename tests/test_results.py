"""The records of an evaluation and the figures made of them."""

import dataclasses
import json
import math

import evaluation_data
import numpy as np
import pytest

from sharpi_jax.errors import OptionError
from sharpi_jax.evaluate import summary
from sharpi_jax.evaluate.results import CostModel, RunResult, Setting, SettingTiming, Summary


def recomputed(runs: list[RunResult]) -> dict[str, float]:
    """The figures of one setting from the steps, the ids and the likelihoods alone, by counting token after token."""
    counts = dict.fromkeys(("drafted", "argmax", "p_min", "passes", "tokens", "off", "same", "diverged", "at"), 0)
    positions: dict[tuple[int, str], int] = {}
    deciles: dict[tuple[int, bool], int] = {}
    bits = []
    for run in runs:
        greedy, _, _ = evaluation_data.decode(run.prompt_ids, Setting(0))
        produced: list[int] = []
        for step in run.steps:
            counts["passes"] += 1
            produced.append(step.token)
            for j, (draft, choice) in enumerate(zip(step.drafts, step.choices, strict=False)):
                counts["drafted"] += 1
                if j < step.accepted:
                    produced.append(draft)
                    kind = "argmax" if draft == choice else "p_min"
                    counts[kind] += 1
                    positions[j + 1, kind] = positions.get((j + 1, kind), 0) + 1
                if j <= step.accepted:
                    key = (math.floor(step.probabilities[j] * 10), draft == choice)
                    deciles[key] = deciles.get(key, 0) + 1
        assert tuple(produced) == run.output_ids
        counts["tokens"] += len(produced)
        differing = [
            i for i in range(max(len(produced), len(greedy))) if [*produced[i : i + 1]] != [*greedy[i : i + 1]]
        ]
        counts["same"] += not differing
        counts["diverged"] += bool(differing)
        counts["at"] += differing[0] if differing else 0
        counts["off"] += len(produced[differing[0] :]) if differing else 0
        if produced:
            bits.append((run.greedy_log_likelihood / len(greedy) - run.log_likelihood / len(produced)) / math.log(2))
    return {**counts, "bits": sum(bits) / len(bits), "positions": positions, "deciles": deciles}


@pytest.mark.parametrize("found", evaluation_data.evaluation().summaries, ids=lambda s: str(s.setting))
def test_figures_are_those_of_the_steps(found: Summary) -> None:
    everything = evaluation_data.evaluation()
    for figures in (found.overall, *found.domains):
        runs = [r for r in everything.results if r.setting == found.setting and figures.domain in (None, r.domain)]
        own = recomputed(runs)
        drafted = max(own["drafted"], 1)
        near = pytest.approx
        assert (figures.prompts, figures.tokens, figures.steps) == (len(runs), own["tokens"], own["passes"])
        assert figures.drafted == own["drafted"]
        assert figures.by_argmax.value == near(own["argmax"] / drafted)
        assert figures.by_p_min.value == near(own["p_min"] / drafted)
        assert figures.acceptance_rate.value == near((own["argmax"] + own["p_min"]) / drafted)
        assert figures.passes_per_token.value == near(own["passes"] / own["tokens"])
        assert figures.mean_accepted_length.value == near(own["tokens"] / own["passes"])
        K = found.setting.K
        assert figures.predicted_speedup.value == near(own["tokens"] / own["passes"] / (1 + K * 0.06 + K * 0.01))
        assert figures.identical.value == near(own["same"] / len(runs))
        assert figures.off_path.value == near(own["off"] / own["tokens"])
        assert figures.bits_lost.value == near(own["bits"])
        if own["diverged"]:
            assert figures.first_divergence.value == near(own["at"] / own["diverged"])
        else:
            assert figures.first_divergence is None
        for position in figures.by_position:
            for kind, share in (("argmax", position.by_argmax), ("p_min", position.by_p_min)):
                counted = own["positions"].get((position.position, kind), 0)
                assert share.value * position.drafted == near(counted)
        for index, decile in enumerate(figures.calibration):
            hits, misses = (own["deciles"].get((index, hit), 0) for hit in (True, False))
            assert (decile.drafts, decile.argmax) == (hits + misses, hits)
        for interval in (figures.acceptance_rate, figures.off_path, figures.bits_lost):
            assert interval.low <= interval.value <= interval.high


def test_a_setting_without_loss_loses_nothing() -> None:
    for found in evaluation_data.evaluation().summaries:
        if found.setting.lossless:
            assert (found.overall.identical.value, found.overall.off_path.value) == (1, 0)
            assert (found.overall.by_p_min.value, found.overall.edits_per_token.value) == (0, 0)
            assert found.overall.bits_lost.value == pytest.approx(0)
    assert any(
        s.overall.by_p_min.value > 0.02 and s.overall.off_path.value > 0.1
        for s in evaluation_data.evaluation().summaries
    )


def test_order_and_timings() -> None:
    shuffled = [*evaluation_data.evaluation().results]
    np.random.default_rng(0).shuffle(shuffled)
    timing = SettingTiming(Setting(2, 0.5), 100.0, 1.25, 3, 8)
    found = summary.summarise(shuffled, [timing], resamples=10)
    assert [s.setting for s in found] == [s.setting for s in evaluation_data.evaluation().summaries]
    assert [s.timing for s in found if s.timing] == [timing]
    assert [s.setting for s in found if s.timing] == [timing.setting]


def test_round_trips_are_exact() -> None:
    evaluation = evaluation_data.evaluation()
    for result in evaluation.results[:45]:
        assert RunResult.from_dict(json.loads(json.dumps(result.as_dict(), allow_nan=False))) == result
    for found in evaluation.summaries:
        assert Summary.from_dict(json.loads(json.dumps(found.as_dict(), allow_nan=False))) == found
    for timing in (s.timing for s in evaluation.summaries):
        assert SettingTiming.from_dict(json.loads(json.dumps(timing.as_dict()))) == timing
    assert CostModel.from_dict(evaluation.cost.as_dict()) == evaluation.cost


def test_no_prompts_and_empty_outputs() -> None:
    assert summary.summarise([]) == ()
    run = evaluation_data.run(0, Setting(2, 0.3))
    empty = dataclasses.replace(
        run, output_ids=(), steps=(), stats=type(run.stats)(), text="", greedy_tokens=0, first_divergence=None,
        edit_distance=0, identical=True, log_likelihood=0.0, greedy_log_likelihood=0.0, reference_match=None,
    )  # fmt: skip
    (alone,) = summary.summarise([empty])
    assert alone.overall.acceptance_rate.value == alone.overall.mean_accepted_length.value == 0
    assert (alone.overall.bits_lost, alone.overall.reference_match) == (None, None)
    json.dumps(alone.as_dict(), allow_nan=False)
    (both,) = summary.summarise([empty, run], resamples=50)
    assert both.overall.prompts == 2
    assert both.overall.bits_lost.value == summary.summarise([run])[0].overall.bits_lost.value


def test_pandas_or_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(OptionError, match="pip install pandas"):
        evaluation_data.evaluation().to_pandas()
