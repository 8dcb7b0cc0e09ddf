"""From runs to figures: pure functions over what `results` holds."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence

from sharpi_jax.decode.stats import StepRecord
from sharpi_jax.evaluate.bootstrap import RESAMPLES, Interval, ratio_of_sums
from sharpi_jax.evaluate.results import (
    CostModel,
    Decile,
    Figures,
    PositionFigures,
    RunResult,
    Setting,
    SettingTiming,
    Summary,
)

DECILES = 10


def summarise(
    results: Iterable[RunResult],
    timings: Iterable[SettingTiming] = (),
    *,
    cost: CostModel | None = None,
    resamples: int = RESAMPLES,
) -> tuple[Summary, ...]:
    """One summary per setting that occurs in `results`: by K, then from the highest p_min down.

    Args:
      results: in any order. timings: of none, some or all of the settings.
      cost: the hardware to predict a speed-up for. resamples: of the bootstrap; the same prompts give the same bits.
    """
    by_setting: dict[Setting, list[RunResult]] = {}
    for result in results:
        by_setting.setdefault(result.setting, []).append(result)
    timed = {timing.setting: timing for timing in timings}
    summaries = []
    for setting in sorted(by_setting, key=lambda s: (s.K, -s.p_min)):
        runs = by_setting[setting]
        domains = sorted({run.domain for run in runs})
        options = (cost or CostModel(), resamples)
        summaries.append(
            Summary(
                setting=setting,
                timing=timed.get(setting),
                overall=_figures(None, runs, *options),
                domains=tuple(_figures(name, [r for r in runs if r.domain == name], *options) for name in domains),
            )
        )
    return tuple(summaries)


def ruled_on(step: StepRecord) -> int:
    """How many drafts of a step decided something: those up to the first that was not emitted, itself included."""
    return min(step.accepted + 1, len(step.drafts))


def comparable(summaries: Sequence[Summary]) -> tuple[Summary, ...]:
    """The settings whose `gain` is of one kind: those that were timed, or all where none with drafts was."""
    timed = tuple(summary for summary in summaries if summary.timing)
    return timed if any(summary.setting.K for summary in timed) else tuple(summaries)


def gain(summary: Summary, among: Sequence[Summary]) -> float:
    """Its measured speed-up over plain decoding; tokens per verify pass where no setting of `among` is timed."""
    if summary.timing and any(other.timing and other.setting.K for other in among):
        return summary.timing.ratio
    passes = summary.overall.passes_per_token.value
    return 1 / passes if passes else 0.0


def best_lossless(summaries: Sequence[Summary]) -> Summary | None:
    """The fastest setting with drafts whose text is greedy's by construction; None where there is none."""
    found = [s for s in comparable(summaries) if s.setting.lossless and s.setting.K]
    return max(found, key=lambda s: gain(s, summaries), default=None)


def best_lossy(summaries: Sequence[Summary]) -> Summary | None:
    """The fastest setting that may leave greedy's path; None where there is none."""
    found = [s for s in comparable(summaries) if not s.setting.lossless]
    return max(found, key=lambda s: gain(s, summaries), default=None)


@dataclasses.dataclass(frozen=True)
class _Sample:
    """Runs of one setting, and how often the bootstrap draws from them."""

    runs: Sequence[RunResult]
    resamples: int

    def share(self, numerator: Callable[[RunResult], float], denominator: Callable[[RunResult], float]) -> Interval:
        """The ratio of two sums over the runs; 0 where there is nothing to divide by."""
        return ratio_of_sums([*map(numerator, self.runs)], [*map(denominator, self.runs)], resamples=self.resamples)

    def ratio(
        self, numerator: Callable[[RunResult], float], denominator: Callable[[RunResult], float]
    ) -> Interval | None:
        """The same; None where there is nothing to divide by."""
        return self.share(numerator, denominator) if any(map(denominator, self.runs)) else None


def _figures(domain: str | None, runs: Sequence[RunResult], cost: CostModel, resamples: int) -> Figures:
    sample = _Sample(runs, resamples)
    K = runs[0].setting.K

    def steps(run: RunResult) -> float:
        return run.stats.steps

    def drafted(run: RunResult) -> float:
        return run.stats.drafted

    def emitted(run: RunResult) -> float:
        return run.stats.steps + run.stats.accepted

    return Figures(
        domain=domain,
        prompts=len(runs),
        tokens=sum(map(_tokens, runs)),
        steps=sum(run.stats.steps for run in runs),
        drafted=sum(run.stats.drafted for run in runs),
        acceptance_rate=sample.share(lambda run: run.stats.accepted, drafted),
        by_argmax=sample.share(lambda run: run.stats.accepted_argmax, drafted),
        by_p_min=sample.share(lambda run: run.stats.accepted_p_min, drafted),
        by_position=tuple(_position(sample, index) for index in range(K)),
        mean_accepted_length=sample.share(emitted, steps),
        passes_per_token=sample.share(steps, _tokens),
        identical=sample.share(lambda run: run.identical, lambda run: 1),
        first_divergence=sample.ratio(
            lambda run: run.first_divergence or 0, lambda run: run.first_divergence is not None
        ),
        off_path=sample.share(_off_path, _tokens),
        edits_per_token=sample.share(lambda run: run.edit_distance, _tokens),
        bits_lost=sample.ratio(_bits_lost, _has_tokens),
        reference_match=sample.ratio(
            lambda run: run.reference_match is True, lambda run: run.reference_match is not None
        ),
        predicted_speedup=sample.share(emitted, lambda run: run.stats.steps * cost.step(K)),
        calibration=_calibration(runs),
    )


def _tokens(run: RunResult) -> int:
    return len(run.output_ids)


def _off_path(run: RunResult) -> int:
    return 0 if run.first_divergence is None else max(0, len(run.output_ids) - run.first_divergence)


def _has_tokens(run: RunResult) -> bool:
    return bool(run.output_ids) and run.greedy_tokens > 0


def _bits_lost(run: RunResult) -> float:
    if not _has_tokens(run):
        return 0.0
    greedy, own = run.greedy_log_likelihood / run.greedy_tokens, run.log_likelihood / len(run.output_ids)
    return (greedy - own) / math.log(2)


def _position(sample: _Sample, index: int) -> PositionFigures:
    """Of draft index + 1. Argmax and p_min apart stand in the steps alone."""

    def drafted(run: RunResult) -> int:
        return sum(index < len(step.drafts) for step in run.steps)

    def accepted(run: RunResult, *argmax: bool) -> int:
        return sum(index < step.accepted and step.argmax[index] in argmax for step in run.steps)

    return PositionFigures(
        position=index + 1,
        drafted=sum(map(drafted, sample.runs)),
        rate=sample.share(lambda run: accepted(run, True, False), drafted),
        by_argmax=sample.share(lambda run: accepted(run, True), drafted),
        by_p_min=sample.share(lambda run: accepted(run, False), drafted),
    )


def _calibration(runs: Sequence[RunResult]) -> tuple[Decile, ...]:
    drafts, argmax = [0] * DECILES, [0] * DECILES
    for run in runs:
        for step in run.steps:
            for index in range(ruled_on(step)):
                decile = min(int(step.probabilities[index] * DECILES), DECILES - 1)
                drafts[decile] += 1
                argmax[decile] += step.argmax[index]
    return tuple(Decile(i / DECILES, (i + 1) / DECILES, drafts[i], argmax[i]) for i in range(DECILES))
