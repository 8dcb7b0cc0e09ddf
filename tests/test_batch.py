"""Rows that take one prompt after another: each is that prompt alone, in the bits of ids, records and likelihoods."""

import dataclasses
import math

import jax
import models
import numpy as np
import pytest

from sharpi_jax.decode.controls import Method, make_controls
from sharpi_jax.decode.options import DecodeOptions
from sharpi_jax.decode.slots import free_rows, replace_row
from sharpi_jax.evaluate.batch import SLICE, BatchOptions, Finished, Job, run_jobs

TINY = "qwen35-tiny-f32"
SLOTS = 128


def tiny_jobs() -> list[Job]:
    """Prompts of 1 to 64 tokens (chunks of two widths), budgets of 0 to 24, thresholds from exact to anything."""
    rng = np.random.default_rng(4)
    lengths = [1, 60, 5, 17, 33, 2, 64, 40, 3, 16, 50]
    budgets = [24, 9, 0, 1, 20, 24, 2, 24, 13, 24, 7]
    p_min = [1.0, 1e-3, 1.0, 5e-4, 1.0, 2e-3, 1e-3, 1.0, 1e-30, 1e-3, 1.0]
    jobs = [
        Job(tuple(map(int, rng.integers(0, 470, n))), budget, p)
        for n, budget, p in zip(lengths, budgets, p_min, strict=True)
    ]
    last = jobs[7].prompt  # a prompt that comes again is not read again; one that begins alike is
    return [*jobs, Job(last, 7, 1e-3), Job(last, 12, 1e-3), Job(last[:9], 12, 1e-3)]


def together(decoder, jobs, rows: int, K: int, stop_ids=(), *, recorded: bool = True, slots: int = SLOTS):
    """Every job's result in the order of the jobs."""
    found = list(run_jobs(decoder, jobs, BatchOptions(K, rows, slots, tuple(stop_ids), recorded=recorded)))
    assert sorted(f.index for f in found) == list(range(len(jobs)))
    return sorted(found, key=lambda f: f.index)


def alone(model, job: Job, K: int, stop_ids, slots: int) -> Finished:
    """The facade's way with one prompt: no batch, no queue."""
    options = DecodeOptions(
        job.budget,
        spec_type="mtp" if K else "none",
        spec_draft_n_max=max(K, 1),
        spec_draft_p_min=job.p_min,
        spec_draft_vocab="full",
        ctx_size=slots,
        logprobs=0,
    )
    before, model.tokenizer.stop_ids = model.tokenizer.stop_ids, list(stop_ids)
    try:
        run = model.generate(job.prompt, options, trace=True)
    finally:
        model.tokenizer.stop_ids = before
    likelihood = math.fsum(entry.logprob for entry in run.logprobs)
    return Finished(0, run.output_ids, run.finish_reason, run.stats, run.steps, likelihood)


@pytest.fixture(scope="module")
def stops() -> list[int]:
    """Tokens that end some of the tiny jobs early: some that greedy decoding puts out late."""
    plain = together(models.decoder(TINY), tiny_jobs(), 1, 0)
    late = [f.output_ids[len(f.output_ids) // 2] for f in plain if len(f.output_ids) > 10]
    return sorted(set(late[:3]))


@pytest.fixture(scope="module")
def alone_tiny(stops):
    """Each job by itself, for each K."""
    model = models.model(TINY)
    return {K: [alone(model, job, K, stops, SLOTS) for job in tiny_jobs()] for K in (0, 3)}


@pytest.mark.parametrize(("K", "rows"), [(0, 1), (0, 16), (3, 1), (3, 2), (3, 3), (3, 5), (3, 8)])
def test_a_row_is_that_prompt_alone(K: int, rows: int, stops, alone_tiny) -> None:
    found = together(models.decoder(TINY), tiny_jobs(), rows, K, stops)
    expected = alone_tiny[K]
    assert {f.finish_reason for f in expected} == {"stop", "length"}
    assert [dataclasses.replace(f, index=0) for f in found] == expected
    if K:  # the thresholds do something: the rule lets drafts through that are no argmax
        assert sum(f.stats.accepted_p_min for f in expected) > 5


@pytest.mark.parametrize(("K", "rows"), [(0, 1), (3, 3)])  # compiled by the recorded runs above
def test_unrecorded_slices_give_the_same_tokens_and_counts(K: int, rows: int, stops, alone_tiny) -> None:
    slices: list[tuple[int, float]] = []
    options = BatchOptions(K, rows, SLOTS, tuple(stops), recorded=False)
    done = run_jobs(models.decoder(TINY), tiny_jobs(), options, lambda *x: slices.append(x))
    found = sorted(done, key=lambda f: f.index)
    for f, g in zip(found, alone_tiny[K], strict=True):
        assert (f.output_ids, f.finish_reason, f.stats) == (g.output_ids, g.finish_reason, g.stats)
        assert (f.steps, f.log_likelihood) == ((), 0.0)
    assert sum(tokens for tokens, _ in slices) == sum(len(f.output_ids) for f in found)
    assert all(seconds > 0 for _, seconds in slices)
    assert max(tokens for tokens, _ in slices) > (SLICE if rows == 1 else 1)


def test_records_hold_the_output_and_the_counts(alone_tiny, stops) -> None:
    """Field case 4: the counts are those of the records, and nothing else was put out."""
    for f in together(models.decoder(TINY), tiny_jobs(), 3, 3, stops):
        ids = [token for s in f.steps for token in (s.token, *s.drafts[: s.accepted])]
        assert tuple(ids) == f.output_ids
        assert len(f.steps) == f.stats.steps
        assert sum(len(s.drafts) for s in f.steps) == f.stats.drafted
        assert sum(s.accepted for s in f.steps) == f.stats.accepted
        assert f.stats.drafted_per_position == tuple(sum(len(s.drafts) > j for s in f.steps) for j in range(3))
        assert f.stats.accepted_per_position == tuple(sum(s.accepted > j for s in f.steps) for j in range(3))


def test_further_prompts_compile_nothing(stops) -> None:
    """Field case 21: 20 prompts of lengths 1 to 58, after some of each chunk width that prefill has."""
    decoder = models.decoder(TINY)
    together(decoder, tiny_jobs(), 3, 3, stops)
    rng, before = np.random.default_rng(0), decoder.programs.count
    jobs = [
        Job(tuple(map(int, rng.integers(0, 470, n))), int(rng.integers(0, 9)), float(rng.choice([1.0, 1e-3])))
        for n in range(1, 61, 3)
    ]
    together(decoder, jobs, 3, 3, stops)
    together(decoder, jobs, 3, 3, stops, recorded=False)
    assert decoder.programs.count == before


def test_a_row_takes_all_of_its_state_and_touches_no_other() -> None:
    K = 3
    decoder, method = models.decoder(TINY), Method(logprobs=0)

    def controls(rows: int):
        return make_controls([1e-3] * rows, [], method=method)

    def row_of(tree, row: int):
        trunk = tree.trunk.replace(rope=None)
        return jax.tree.map(lambda x: np.array(x[row]), jax.device_get(tree.replace(trunk=trunk)))

    def same(a, b) -> bool:
        pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
        return all(models.same_bits(*map(np.asarray, pair)) for pair in pairs)

    jobs = tiny_jobs()
    prefilled = [decoder.prefill([job.prompt], [20], SLOTS, controls(1), K=K) for job in jobs[:4]]
    state = free_rows(decoder, prefilled[0], 3)
    for row in range(3):
        state = replace_row(decoder, state, row, prefilled[row])
    state = decoder.advance(state, controls(3), 5)
    before = [row_of(state, row) for row in range(3)]
    state = replace_row(decoder, state, 1, prefilled[3])
    after = [row_of(state, row) for row in range(3)]
    assert same(after[0], before[0])
    assert same(after[1], row_of(prefilled[3], 0))
    assert same(after[2], before[2])
    assert not same(after[1], before[1])


def test_free_rows_never_change() -> None:
    decoder, method = models.decoder(TINY), Method(logprobs=0)
    controls = make_controls([1e-3] * 3, [0, 5], method=method)  # 0 is also what a free row holds
    fresh = decoder.prefill([tiny_jobs()[0].prompt], [20], SLOTS, make_controls([1.0], [0, 5], method=method), K=3)
    state = replace_row(decoder, free_rows(decoder, fresh, 3), 1, fresh)
    state = jax.device_get(decoder.advance(state, controls, 20))
    per_row = state.replace(trunk=state.trunk.replace(rope=None), last=None, finish=None)
    for leaf in jax.tree.leaves(per_row):
        assert not leaf[[0, 2]].any()
        assert leaf.size == 0 or leaf.shape[0] == 3
    assert state.finish.tolist()[0] == state.finish.tolist()[2] == 2
    assert state.length[1] > len(tiny_jobs()[0].prompt)
