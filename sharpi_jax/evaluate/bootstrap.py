"""95% intervals by the bootstrap: prompts are drawn again, with replacement, and the figure is computed anew.

Prompts are what is independent, tokens are not: within one text acceptance comes in runs. So whole prompts are drawn.
The intervals are those of percentiles (B. Efron, 1979). They are too narrow for a handful of prompts: for n of them by
about the factor sqrt((n - 1) / n), and more where figures are skewed.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

RESAMPLES = 2000
_TAILS = (0.025, 0.975)
_AT_ONCE = 1 << 21  # indices that are drawn together: 16 MB


@dataclasses.dataclass(frozen=True)
class Interval:
    """A figure and its 95% interval.

    Attributes:
      low, high: None where one prompt, or none, leaves nothing to draw from.
    """

    value: float
    low: float | None
    high: float | None


def ratio_of_sums(
    numerators: Sequence[float], denominators: Sequence[float], *, seed: int = 0, resamples: int = RESAMPLES
) -> Interval:
    """Of sum(numerators) / sum(denominators): accepted / drafted, tokens / passes, seconds / seconds.

    A ratio whose denominators sum to 0 is 0, as an acceptance rate is where nothing was drafted; resamples in which
    they do are left out.

    Args:
      numerators, denominators: one of each per prompt, in the same order; denominators >= 0.
      seed: the same draws for the same seed and number of prompts, so that figures side by side share their draws.

    Raises:
      ValueError: the lengths differ, or a value is not finite.
    """
    above, below = np.asarray(numerators, np.float64), np.asarray(denominators, np.float64)
    if above.shape != below.shape or above.ndim != 1:
        raise ValueError(f"one numerator and one denominator per prompt: {above.shape} and {below.shape}")
    if not (np.isfinite(above).all() and np.isfinite(below).all()):
        raise ValueError("a value is not finite")
    total = below.sum()
    value = float(above.sum() / total) if total else 0.0
    if len(above) < 2:
        return Interval(value, None, None)
    sums = _resampled_sums(np.stack([above, below]), seed, resamples)
    drawn = sums[1] != 0
    if not drawn.any():
        return Interval(value, value, value)
    low, high = np.quantile(sums[0, drawn] / sums[1, drawn], _TAILS)
    return Interval(value, float(low), float(high))


def mean(values: Sequence[float], *, seed: int = 0, resamples: int = RESAMPLES) -> Interval:
    """Of the mean over prompts of one value each; 0 of no prompts.

    Raises:
      ValueError: a value is not finite.
    """
    return ratio_of_sums(values, np.ones(len(values)).tolist(), seed=seed, resamples=resamples)


def _resampled_sums(values: np.ndarray, seed: int, resamples: int) -> np.ndarray:
    """Sums [M, R] over R draws of N prompts out of N, of values [M, N]; the same prompts for all M."""
    generator = np.random.default_rng(seed)
    count = values.shape[1]
    sums = np.empty((len(values), resamples))
    step = max(1, _AT_ONCE // count)
    for begin in range(0, resamples, step):
        drawn = generator.integers(count, size=(min(step, resamples - begin), count))
        for one, out in zip(values, sums, strict=True):
            out[begin : begin + len(drawn)] = one[drawn].sum(axis=1)
    return sums
