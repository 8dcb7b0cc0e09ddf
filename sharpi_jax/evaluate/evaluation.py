"""The sweep of a batch evaluation: every prompt with every setting, then how fast each setting is.

Greedy decoding comes first, since all else is compared with it. Counts, text and likelihoods come from runs that are
recorded step by step, in which rows may have thresholds of their own; speeds come from runs apart, in which all rows
share a setting and nothing is recorded.
"""

import dataclasses
import hashlib
import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from sharpi_jax.decode.decoder import Decoder
from sharpi_jax.decode.draft import MtpDrafter
from sharpi_jax.decode.loop import decode_loop
from sharpi_jax.decode.programs import Programs
from sharpi_jax.decode.shortlist import shortlist_ids
from sharpi_jax.errors import OptionError, SharpiError
from sharpi_jax.evaluate.batch import BatchOptions, Finished, Job, run_jobs
from sharpi_jax.evaluate.prompts import Prompt
from sharpi_jax.evaluate.results import RunResult, Setting, SettingTiming
from sharpi_jax.evaluate.sweep import Progress, Sweep, Task, timed_tasks
from sharpi_jax.evaluate.text_metrics import edit_distance, first_divergence, matches_reference
from sharpi_jax.model.params import ModelParams

NO_DOMAIN = "other"  # the group of prompts that name none
_SAMPLED_BYTES = 4096  # of each weight


@dataclasses.dataclass(frozen=True)
class Bench:
    """A model ready for an evaluation.

    Attributes:
      text_of: the text of a run's output ids. common: tokens among which drafts are chosen where no setting is lossy,
        beside those of the prompts; None for all.
      slots: S, of every row: it holds the longest prompt with its output.
    """

    decoder: Decoder
    stop_ids: tuple[int, ...]
    text_of: Callable[[Sequence[int]], str]
    common: np.ndarray | None
    slots: int

    def options(self, K: int, sweep: Sweep, tasks: Sequence[Task], *, recorded: bool) -> BatchOptions:
        """Of a batch with K drafts a step."""
        drafter: MtpDrafter | None = None
        if K and self.common is not None and not sweep.lossy:
            prompts = [task.ids for task in tasks]
            drafter = self.decoder.drafter(shortlist_ids(self.common, prompts, self.decoder.cfg.vocab_size))
        return BatchOptions(K, sweep.batch_size, self.slots, self.stop_ids, drafter, recorded)


def make_tasks(
    prompts: Sequence[Prompt | str],
    ids_of: Callable[[Prompt], Sequence[int]],
    sweep: Sweep,
    decoder: Decoder,
    on_fault: Callable[[str], None] | None = None,
) -> list[Task]:
    """Prompts, or texts, made token ids.

    Args:
      on_fault: called with a sentence for each that cannot be decoded; without it, the first of them is refused.

    Raises:
      OptionError: a prompt is empty, does not fit, shares its id or holds one outside the vocabulary; none is left; or
        there are drafts to sweep over and the model has no MTP head.
    """
    if any(sweep.n_max) and not decoder.cfg.has_mtp:
        raise OptionError("the file has no MTP head, so there is no sweep over drafts; set sweep_n_max to 0.")
    tasks: list[Task] = []
    for number, given in enumerate(prompts, start=1):
        prompt = Prompt(str(number), text=given) if isinstance(given, str) else given
        try:
            if any(task.id == prompt.id for task in tasks):
                raise OptionError(f"prompt {prompt.id!r}: another has this id; give each its own.")
            tasks.append(_task(prompt, ids_of, sweep, decoder))
        except OptionError as fault:
            if on_fault is None:
                raise
            on_fault(str(fault))
    if not tasks:
        raise OptionError("no prompt is left to evaluate; give at least one.")
    return tasks


def _task(prompt: Prompt, ids_of: Callable[[Prompt], Sequence[int]], sweep: Sweep, decoder: Decoder) -> Task:
    max_tokens = prompt.max_tokens or sweep.max_tokens
    try:
        ids = tuple(map(int, ids_of(prompt)))
        decoder.rows_of([ids], decoder.slots(len(ids), max_tokens))
    except SharpiError as fault:  # a CheckpointError: the chat template refuses the messages
        raise OptionError(f"prompt {prompt.id!r}: {fault}") from None
    return Task(prompt.id, prompt.domain or NO_DOMAIN, ids, max_tokens, prompt.reference)


def slots_of(decoder: Decoder, tasks: Iterable[Task]) -> int:
    """One number of slots for all prompts, so that they share programs."""
    return max(decoder.slots(len(task.ids), task.max_tokens) for task in tasks)


def run_options(bench: Bench, tasks: Sequence[Task], sweep: Sweep, model: str) -> dict[str, Any]:
    """All that the runs of a sweep depend on, by the names of the flags where there are some: for results that resume.

    How many rows decode together is not among it, nor what is timed.
    """
    cfg = bench.decoder.cfg
    own = [None if task.max_tokens == sweep.max_tokens else task.max_tokens for task in tasks]
    whole = json.dumps([(t.id, t.domain, t.ids, t.reference, most) for t, most in zip(tasks, own, strict=True)])
    return {
        "model": model,
        "weights": fingerprint(bench.decoder.params),
        "dtype": cfg.dtype,
        "cache_dtype": cfg.cache_dtype,
        "platform": jax.default_backend(),
        "prompts": hashlib.sha256(whole.encode()).hexdigest(),
        "sweep_p_min": sorted({setting.p_min for setting in sweep.settings}, reverse=True),
        "sweep_n_max": sorted({setting.K for setting in sweep.settings}),
        "max_tokens": sweep.max_tokens,
    }


def fingerprint(params: ModelParams) -> str:
    """A hash of a sample of every weight: other files and quantisations differ in it, and what multiplies by them."""
    leaves, tree = jax.tree.flatten(params)
    digest = hashlib.sha256(str(tree).encode())
    for leaf in leaves:
        data = np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)
        digest.update(f"{leaf.dtype}{leaf.shape}".encode())
        digest.update(data[:: max(1, data.size // _SAMPLED_BYTES)].tobytes())
    return digest.hexdigest()


class Compilations:
    """Programs compiled since it was made."""

    def __init__(self, programs: Programs):
        self._programs, self._before = programs, programs.count
        self._compile_s = programs.compile_s

    @property
    def count(self) -> int:
        return self._programs.count - self._before

    @property
    def loops(self) -> int:
        """Those of the decode loop."""
        return sum(name == decode_loop.__name__ for name, _ in list(self._programs.items())[self._before :])

    @property
    def seconds(self) -> float:
        return self._programs.compile_s - self._compile_s


def sweep_details(
    tasks: Sequence[Task], sweep: Sweep, bench: Bench, compiled: Compilations
) -> tuple[tuple[str, str], ...]:
    """What a report says of how it was made."""
    timed = f"{len(timed_tasks(tasks, sweep))}, {sweep.rounds} rounds, medians" if sweep.rounds else "none"
    return (
        ("max tokens", str(sweep.max_tokens)),
        ("batch size", str(sweep.batch_size)),
        ("slots of a row", str(bench.slots)),
        ("prompts timed", timed),
        ("decode loops among the programs", str(compiled.loops)),
        ("time spent compiling, not counted", f"{compiled.seconds:.1f} s"),
    )


def run_sweep(
    bench: Bench,
    tasks: Sequence[Task],
    sweep: Sweep,
    *,
    done: Iterable[RunResult] = (),
    on_result: Callable[[RunResult], None] = lambda result: None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> list[RunResult]:
    """Runs of all tasks with all settings: by K, then by task, then from the highest p_min down.

    Args:
      done: runs that are there already. on_result: called with each further one, as it finishes.
    """
    order = [
        (task, setting)
        for K in sorted({setting.K for setting in sweep.settings})
        for task in tasks
        for setting in sweep.settings
        if setting.K == K
    ]
    found = {(result.prompt_id, result.setting): result for result in done}
    meter = _Meter(on_progress, "decoding", len(order))
    meter.begin(found[key] for task, setting in order if (key := (task.id, setting)) in found)
    for K in sorted({setting.K for setting in sweep.settings}):
        missing = [(t, s) for t, s in order if s.K == K and (t.id, s) not in found]
        if not missing:
            continue
        jobs = [Job(task.ids, task.max_tokens, setting.p_min) for task, setting in missing]
        options = bench.options(K, sweep, tasks, recorded=True)
        for finished in run_jobs(bench.decoder, jobs, options, meter.slice):
            task, setting = missing[finished.index]
            result = _result(bench, task, setting, finished, found.get((task.id, Setting(0))))
            found[task.id, setting] = result
            on_result(result)
            meter.add(result)
    return [found[task.id, setting] for task, setting in order]


def time_settings(
    bench: Bench,
    tasks: Sequence[Task],
    sweep: Sweep,
    *,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> list[SettingTiming]:
    """Decodes the same prompts with each setting in turn, `rounds` times; the time is the loop's own.

    It takes TIMED_BATCHES batches of prompts, as evenly spaced among the tasks as it goes, or all where there are not
    so many.
    """
    if not sweep.rounds:
        return []
    chosen = timed_tasks(tasks, sweep)
    meter = _Meter(on_progress, "timing", len(sweep.settings) * sweep.rounds)
    meter.begin(())
    speeds: dict[Setting, list[float]] = {setting: [] for setting in sweep.settings}
    for _ in range(sweep.rounds):
        for setting in sweep.settings:
            jobs = [Job(task.ids, task.max_tokens, setting.p_min) for task in chosen]
            options = bench.options(setting.K, sweep, tasks, recorded=False)
            tokens, seconds = meter.tokens, meter.seconds
            for _ in run_jobs(bench.decoder, jobs, options, meter.slice):
                pass
            spent = meter.seconds - seconds
            speeds[setting].append((meter.tokens - tokens) / spent if spent > 0 else 0.0)
            meter.add()
    medians = {setting: statistics.median(found) for setting, found in speeds.items()}
    plain = medians[Setting(0)]
    return [
        SettingTiming(setting, speed, speed / plain if plain else 0.0, sweep.rounds, sweep.batch_size)
        for setting, speed in medians.items()
    ]


def _result(bench: Bench, task: Task, setting: Setting, run: Finished, greedy: RunResult | None) -> RunResult:
    """A finished run beside greedy decoding of the same prompt; None where it is greedy decoding itself."""
    text = bench.text_of(run.output_ids)
    greedy_ids = run.output_ids if greedy is None else greedy.output_ids
    divergence = first_divergence(run.output_ids, greedy_ids)
    return RunResult(
        prompt_id=task.id,
        domain=task.domain,
        setting=setting,
        prompt_ids=task.ids,
        output_ids=run.output_ids,
        text=text,
        finish_reason=run.finish_reason,
        stats=run.stats,
        steps=run.steps,
        log_likelihood=run.log_likelihood,
        greedy_log_likelihood=run.log_likelihood if greedy is None else greedy.log_likelihood,
        greedy_tokens=len(greedy_ids),
        first_divergence=divergence,
        edit_distance=edit_distance(run.output_ids, greedy_ids),
        identical=divergence is None,
        reference_match=None if task.reference is None else matches_reference(text, task.reference),
    )


class _Meter:
    """Adds up what a stage did, and tells."""

    def __init__(self, tell: Callable[[Progress], None], stage: str, total: int):
        self._tell, self._stage, self._total = tell, stage, total
        self._done = self._drafted = self._accepted = 0
        self.tokens, self.seconds = 0, 0.0

    def begin(self, done: Iterable[RunResult]) -> None:
        for result in done:
            self._count(result)
        self._say()

    def slice(self, tokens: int, seconds: float) -> None:
        self.tokens += tokens
        self.seconds += seconds
        self._say()

    def add(self, result: RunResult | None = None) -> None:
        self._count(result)
        self._say()

    def _count(self, result: RunResult | None) -> None:
        self._done += 1
        if result is not None:
            self._drafted += result.stats.drafted
            self._accepted += result.stats.accepted

    def _say(self) -> None:
        figures = (self._done, self._total, self.tokens, self.seconds, self._drafted, self._accepted)
        self._tell(Progress(self._stage, *figures))


def token_ids_of(results: Iterable[RunResult]) -> set[int]:
    """Every token id that a report of these results may show."""
    found: set[int] = set()
    for result in results:
        found.update(result.prompt_ids, result.output_ids)
        for step in result.steps:
            found.update((step.token, step.next_token), step.drafts, step.choices)
    return found


def results_from(records: Iterable[Mapping[str, Any]], name: str) -> list[RunResult]:
    """The runs in the records of a file of results.

    Raises:
      OptionError: a record is none.
    """
    found = []
    for number, record in enumerate(records, start=2):
        try:
            found.append(RunResult.from_dict(record))
        except (KeyError, TypeError, ValueError) as fault:
            raise OptionError(f"line {number} of {name} holds no run of ours; give another report_dir.") from fault
    return found
