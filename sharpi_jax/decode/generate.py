"""Decoding one prompt in slices, and reading out what the loop did."""

import dataclasses
import time
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from sharpi_jax.decode.decoder import Decoder, Plan
from sharpi_jax.decode.programs import Programs
from sharpi_jax.decode.state import FINISH_REASONS, Counters, DecodeState, LastStep
from sharpi_jax.decode.stats import Statistics, StepRecord, Timing, TokenLogProb

SLICE_S = 0.1  # long enough to hide the host's share, short enough to read along


@dataclasses.dataclass(frozen=True)
class Progress:
    """What one slice of the loop added to a row, and where the row stands.

    Attributes:
      new_ids: tokens emitted by this slice. finish_reason: "" while the row runs.
      record: what the step did, when `stepwise`; None otherwise, and before the first.
      logprobs: of the new tokens, one each; none unless they are asked for.
    """

    new_ids: tuple[int, ...]
    finish_reason: str
    stats: Statistics
    timing: Timing
    record: StepRecord | None
    logprobs: tuple[TokenLogProb, ...]


def stream(decoder: Decoder, plan: Plan, stop_ids: Sequence[int], *, stepwise: bool = False) -> Iterator[Progress]:
    """Decodes one prompt in slices of the loop, yielding after each; the last has a finish reason.

    The first Progress comes right after prefill, with no tokens. A slice is a single step when `stepwise`, which is
    what the trace is made of; otherwise slices grow until each takes about SLICE_S.
    """
    options = plan.options
    controls = plan.controls(stop_ids, traced=stepwise)
    clock = _Clock(decoder.programs)
    drafter = decoder.drafter(plan.shortlist)
    state = decoder.prefill([plan.prompt], [options.max_tokens], plan.slots, controls, K=plan.K)
    jax.block_until_ready(state)
    timing = Timing(prefill_tokens=len(plan.prompt), prefill_s=clock.run_s(), compile_s=clock.compile_s())
    progress = _progress(state, 0, timing, stepped=False)
    yield progress
    slice_tokens = 1
    while not progress.finish_reason:
        out = timing.decode_tokens
        clock = _Clock(decoder.programs)
        state = jax.block_until_ready(decoder.advance(state, controls, out + slice_tokens, drafter))
        run_s = clock.run_s()
        timing = dataclasses.replace(
            timing,
            decode_tokens=int(state.emitted[0]),
            decode_s=timing.decode_s + run_s,
            compile_s=timing.compile_s + clock.compile_s(),
        )
        progress = _progress(state, out, timing, stepped=stepwise)
        yield progress
        if not stepwise and run_s < SLICE_S / 2:
            slice_tokens *= 2


def row_statistics(state: DecodeState, row: int) -> Statistics:
    """One row's counts, fetched from the device."""
    return counted(jax.device_get(state.counters), row)


def counted(counters: Counters, row: int) -> Statistics:
    """One row's counts, of counters that were fetched."""
    accepted = counters.accepted_per_position[row]
    drafted = counters.drafted_per_position[row]
    by_argmax = int(counters.accepted_argmax[row])
    return Statistics(
        steps=int(counters.steps[row]),
        drafted=int(drafted.sum()),
        accepted=int(accepted.sum()),
        accepted_argmax=by_argmax,
        accepted_p_min=int(accepted.sum()) - by_argmax,
        drafted_per_position=tuple(map(int, drafted)),
        accepted_per_position=tuple(map(int, accepted)),
    )


class _Clock:
    """Seconds since it was made, those spent compiling apart."""

    def __init__(self, programs: Programs):
        self._programs = programs
        self._compile_s = programs.compile_s
        self._began = time.perf_counter()

    def compile_s(self) -> float:
        return self._programs.compile_s - self._compile_s

    def run_s(self) -> float:
        return time.perf_counter() - self._began - self.compile_s()


def _progress(state: DecodeState, out: int, timing: Timing, *, stepped: bool) -> Progress:
    tokens, start, end, finish, next_token = (
        np.asarray(x)[0] for x in (state.tokens, state.prompt_length, state.length, state.finish, state.next_token)
    )
    return Progress(
        new_ids=tuple(map(int, tokens[start + out : end])),
        finish_reason=FINISH_REASONS[int(finish)],
        stats=row_statistics(state, 0),
        timing=timing,
        record=step_record(jax.device_get(state.last), int(next_token), 0) if stepped else None,
        logprobs=_logprobs(state, tokens, start + out, end),
    )


def _logprobs(state: DecodeState, tokens: np.ndarray, start: int, end: int) -> tuple[TokenLogProb, ...]:
    """Of the tokens at positions [start, end)."""
    if state.logprobs is None:
        return ()
    chosen, top_ids, top = (np.asarray(x[0, start:end]) for x in jax.tree.leaves(state.logprobs))
    rows = zip(tokens[start:end], chosen, top_ids, top, strict=True)
    return tuple(
        TokenLogProb(int(token), float(own), tuple(zip(map(int, ids), map(float, values), strict=True)))
        for token, own, ids, values in rows
    )


def step_record(last: LastStep, next_token: int, row: int) -> StepRecord:
    """What a row's last step did, of which `next_token` is what it left; `last` was fetched from the device."""
    k = int(last.proposed[row])
    return StepRecord(
        position=int(last.position[row]),
        token=int(last.token[row]),
        drafts=tuple(map(int, last.drafts[row, :k])),
        probabilities=tuple(map(float, last.probability[row, :k])),
        argmax=tuple(map(bool, last.is_argmax[row, :k])),
        accepted=int(last.accepted[row]),
        passed=int(last.passed[row]),
        next_token=next_token,
        choices=tuple(map(int, last.choices[row, : k + 1])),
    )
