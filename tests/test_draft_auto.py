"""Draft lengths that choose themselves, in the loop: the text is never another, and what does not pay is left."""

import dataclasses

import jax
import models
import numpy as np
import pytest
from scripted import ScriptedDrafter

from sharpi_jax.decode.controls import Method, make_controls
from sharpi_jax.decode.options import DecodeOptions

NAME = "qwen35-tiny-f32"
PROMPT = models.reference("qwen35-tiny")["prompt"].tolist()
COSTS = (10.0, 13.0, 15.0, 17.0)
BUDGET = 200


def run(step_ms=COSTS, right=None, rows=1, until=10**6):
    """The final state, with the model's own drafts, or scripted ones of which `right` [rows] are right."""
    decoder, K = models.decoder(NAME), len(step_ms) - 1
    controls = make_controls([1.0] * rows, [], step_ms=step_ms, method=Method(adaptive=True))
    state = decoder.prefill([PROMPT] * rows, [BUDGET] * rows, 256, controls, K=K)
    drafter = None
    if right is not None:
        truth = np.repeat(plain().tokens, rows, axis=0)
        drafter = ScriptedDrafter(truth, np.broadcast_to(np.array(right)[:, None], truth.shape), (truth + 1) % 470)
    return jax.device_get(decoder.advance(state, controls, until, drafter))


def plain():
    controls = make_controls([1.0], [])
    state = models.decoder(NAME).prefill([PROMPT], [BUDGET], 256, controls, K=0)
    return jax.device_get(models.decoder(NAME).advance(state, controls, 10**6))


def test_the_text_and_the_caches_are_those_of_plain_decoding():
    found, expected = run(), plain()
    assert found.tokens[0].tolist() == expected.tokens[0].tolist()
    pairs = zip(models.committed(found, 0), models.committed(expected, 0), strict=True)
    assert all(models.same_bits(a, b) for a, b in pairs)
    drafted = found.counters.drafted_per_position[0]
    assert 0 < drafted[0] < found.counters.steps[0], "some steps drafted, some did not"
    again = run()
    assert drafted.tolist() == again.counters.drafted_per_position[0].tolist()


def test_a_head_that_is_always_wrong_is_left_and_one_that_is_right_is_used():
    wrong, right = run(right=[0]), run(right=[3])
    assert wrong.tokens[0].tolist() == right.tokens[0].tolist() == plain().tokens[0].tolist()
    spent = (wrong.counters.drafted_per_position[0] * np.diff(COSTS)).sum()
    assert 0 < spent < 0.03 * COSTS[0] * BUDGET, "probes, and few"
    assert right.counters.steps[0] < 1.1 * BUDGET / 4
    dear = run(step_ms=(10.0, 50.0, 60.0, 70.0), right=[3])
    assert dear.counters.drafted_per_position[0].sum() <= 3


def test_rows_decide_for_themselves():
    rows = run(right=[0, 3, 1], rows=3)
    alone = [run(right=[count]) for count in (0, 3, 1)]
    for row, single in enumerate(alone):
        assert rows.tokens[row].tolist() == single.tokens[0].tolist()
        assert rows.counters.steps[row] == single.counters.steps[0]
        assert rows.counters.drafted_per_position[row].tolist() == single.counters.drafted_per_position[0].tolist()


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "seed": 2}, {"spec_draft_stop_p": 0.4, "logprobs": 2}])
def test_the_library_measures_once_and_keeps_the_text(tmp_path, monkeypatch, options):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = models.model(NAME)
    chosen = DecodeOptions(max_tokens=60, spec_draft_n_max="auto", **options)
    found = model.generate(PROMPT, chosen)
    stored = sorted((tmp_path / "sharpi_jax" / "costs").iterdir())
    assert stored
    assert found.output_ids == model.generate(PROMPT, dataclasses.replace(chosen, spec_type="none")).output_ids
    times = [path.stat().st_mtime_ns for path in stored]
    assert model.generate(PROMPT, chosen).stats == found.stats
    assert [path.stat().st_mtime_ns for path in stored] == times
