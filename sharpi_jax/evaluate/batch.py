"""Many prompts through one batch: B rows decode together, and a row that is done takes the next prompt of the queue.

Shapes are the same from the first prompt to the last, so one program of the loop serves a whole run with one K. A
prompt is prefilled alone, in chunks of its own: so its row has the bits of that prompt alone, whatever the batch.
"""

import collections
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from sharpi_jax.decode.controls import Controls, Method, make_controls, thresholds
from sharpi_jax.decode.decoder import Decoder
from sharpi_jax.decode.generate import counted, step_record
from sharpi_jax.decode.slots import free_rows, replace_row
from sharpi_jax.decode.state import FINISH_REASONS, RUNNING, DecodeState
from sharpi_jax.decode.stats import Statistics, StepRecord
from sharpi_jax.decode.step import Drafter
from sharpi_jax.evaluate.speed import timed

SLICE = 8  # tokens of the slowest row between two looks for rows that are done
_TO_THE_END = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Job:
    """One prompt to decode.

    Attributes:
      prompt: token ids. budget: tokens to emit at most. p_min: the row's own acceptance threshold.
    """

    prompt: tuple[int, ...]
    budget: int
    p_min: float = 1.0


@dataclasses.dataclass(frozen=True)
class Finished:
    """A job that is done.

    Attributes:
      index: its place among the jobs. steps: what each step did. log_likelihood: the sum of the trunk's
        log-probabilities of output_ids, in nats. Where nothing is recorded there are none, and it is 0.
    """

    index: int
    output_ids: tuple[int, ...]
    finish_reason: str
    stats: Statistics
    steps: tuple[StepRecord, ...]
    log_likelihood: float


@dataclasses.dataclass(frozen=True)
class BatchOptions:
    """What all rows share.

    Attributes:
      K: drafts a step. rows: B. slots: S, of every row. stop_ids: tokens that end a row.
      drafter: None for the MTP head over the whole vocabulary.
      recorded: step by step, with records and log-probabilities; else in slices, as fast as it goes. The program is the
        same.
    """

    K: int
    rows: int
    slots: int
    stop_ids: tuple[int, ...]
    drafter: Drafter | None = None
    recorded: bool = True


def run_jobs(
    decoder: Decoder,
    jobs: Sequence[Job],
    options: BatchOptions,
    on_slice: Callable[[int, float], None] | None = None,
) -> Iterator[Finished]:
    """Decodes all jobs, yielding each as it finishes.

    Args:
      on_slice: called after each call of the loop with the tokens that it emitted, and the seconds that it took without
        compilation.
    """
    waiting = collections.deque(enumerate(jobs))
    batch = _Batch(decoder, options)
    while True:
        for row in batch.free():
            if waiting:
                batch.put(row, *waiting.popleft())
        yield from (done := batch.collect())
        if done and waiting:  # jobs that had ended before their first step
            continue
        if not batch.busy:
            return
        tokens, seconds = batch.advance(to_the_end=not waiting)
        if on_slice is not None:
            on_slice(tokens, seconds)
        yield from batch.collect()


class _Batch:
    """The rows, and whose they are.

    Attributes: the state is None until the first prompt was prefilled, which gives the shapes.
    """

    def __init__(self, decoder: Decoder, options: BatchOptions):
        self._decoder, self._options = decoder, options
        self._state: DecodeState | None = None
        self._jobs: list[tuple[int, Job] | None] = [None] * options.rows
        self._steps: list[list[StepRecord]] = [[] for _ in range(options.rows)]
        self._controls, self._of_one = self._controls_of(options.rows), self._controls_of(1)
        self._fresh: tuple[tuple[tuple[int, ...], int], DecodeState] | None = None

    @property
    def busy(self) -> bool:
        return any(job is not None for job in self._jobs)

    def free(self) -> list[int]:
        return [row for row, job in enumerate(self._jobs) if job is None]

    def put(self, row: int, index: int, job: Job) -> None:
        """Begins a job in a row that is free."""
        fresh = self._prefilled(job)
        if self._state is None:
            self._state = free_rows(self._decoder, fresh, self._options.rows)
        self._state = replace_row(self._decoder, self._state, row, fresh)
        self._jobs[row], self._steps[row] = (index, job), []
        p_min = thresholds([1.0 if entry is None else entry[1].p_min for entry in self._jobs])
        self._controls = self._controls.replace(rule=self._controls.rule.replace(p_min=p_min))  # type: ignore[attr-defined]

    def advance(self, *, to_the_end: bool) -> tuple[int, float]:
        """One call of the loop: a step where steps are recorded, else a slice. Tokens it emitted, and its seconds."""
        before = self._emitted()
        busy = [row for row, job in enumerate(self._jobs) if job is not None]
        least = int(before[busy].min())
        if self._options.recorded:
            until = least + 1
        elif to_the_end or self._options.rows == 1:
            until = _TO_THE_END
        else:
            until = least + SLICE
        state, options = self._state, self._options
        assert state is not None
        seconds, self._state = timed(
            self._decoder, lambda: self._decoder.advance(state, self._controls, until, options.drafter)
        )
        if options.recorded:
            last, next_token = jax.device_get((self._state.last, self._state.next_token))
            for row in busy:
                self._steps[row].append(step_record(last, int(next_token[row]), row))
        return int((self._emitted() - before)[busy].sum()), seconds

    def collect(self) -> list[Finished]:
        """Jobs that are done, whose rows are free from now on."""
        if self._state is None:
            return []
        finish = self._fetch(self._state.finish)
        ended = [row for row, job in enumerate(self._jobs) if job is not None and finish[row] != RUNNING]
        return [self._take(row, FINISH_REASONS[int(finish[row])]) for row in ended]

    def _take(self, row: int, reason: str) -> Finished:
        state, entry = self._state, self._jobs[row]
        assert state is not None
        assert entry is not None
        start, end = int(self._fetch(state.prompt_length)[row]), int(self._fetch(state.length)[row])
        likelihood = 0.0
        if self._options.recorded:
            assert state.logprobs is not None
            likelihood = math.fsum(map(float, self._fetch(state.logprobs.chosen)[row, start:end]))
        self._jobs[row] = None
        return Finished(
            index=entry[0],
            output_ids=tuple(map(int, self._fetch(state.tokens)[row, start:end])),
            finish_reason=reason,
            stats=counted(jax.device_get(state.counters), row),
            steps=tuple(self._steps[row]),
            log_likelihood=likelihood,
        )

    def _prefilled(self, job: Job) -> DecodeState:
        """A row of its own; the same prompt with one threshold after another is read once: they judge drafts alone."""
        key = (job.prompt, job.budget)
        if self._fresh is None or self._fresh[0] != key:
            slots, K = self._options.slots, self._options.K
            self._fresh = (key, self._decoder.prefill([job.prompt], [job.budget], slots, self._of_one, K=K))
        return self._fresh[1]

    def _controls_of(self, rows: int) -> Controls:
        recorded, method = self._options.recorded, Method(logprobs=0)
        return make_controls([1.0] * rows, self._options.stop_ids, traced=recorded, scored=recorded, method=method)

    def _emitted(self) -> np.ndarray:
        assert self._state is not None
        found: np.ndarray = self._fetch(self._state.length) - self._fetch(self._state.prompt_length)
        return found

    @staticmethod
    def _fetch(x: jax.Array) -> Any:
        # A copy: a view would keep the loop from taking the buffer over.
        return np.array(x)
