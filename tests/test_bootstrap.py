"""Bootstrap intervals, against those that theory gives."""

import numpy as np
import pytest

from sharpi_jax.evaluate import bootstrap
from sharpi_jax.evaluate.bootstrap import Interval, mean, ratio_of_sums

Z = 1.959964  # of a normal distribution, 2.5% lie above


def test_of_a_mean_it_is_the_normal_interval():
    x = np.random.default_rng(1).normal(3, 2, 400)
    found = mean(x.tolist())
    half = Z * x.std() / np.sqrt(len(x))
    assert found.value == pytest.approx(x.mean(), rel=1e-12)
    assert found.low == pytest.approx(x.mean() - half, abs=0.08 * half)
    assert found.high == pytest.approx(x.mean() + half, abs=0.08 * half)


def test_of_a_share_it_is_the_binomial_interval():
    x = np.arange(300) < 75
    half = Z * np.sqrt(0.25 * 0.75 / 300)
    found = mean(x)
    assert found.value == 0.25
    assert found.high - found.low == pytest.approx(2 * half, rel=0.08)


def test_of_a_ratio_it_is_that_of_the_delta_method():
    rng = np.random.default_rng(2)
    drafted = rng.integers(20, 200, 300)
    accepted = rng.binomial(drafted, rng.beta(6, 4, 300))  # prompts differ: more spread than one coin for all has
    found = ratio_of_sums(accepted, drafted)
    ratio = accepted.sum() / drafted.sum()
    error = np.sqrt(((accepted - ratio * drafted) ** 2).sum()) / drafted.sum()
    assert found.value == pytest.approx(ratio, rel=1e-12)
    assert found.low == pytest.approx(ratio - Z * error, abs=0.16 * error)
    assert found.high == pytest.approx(ratio + Z * error, abs=0.16 * error)
    tokens_independent = np.sqrt(ratio * (1 - ratio) / drafted.sum())
    assert found.high - found.low > 2 * 2 * Z * tokens_independent


def test_95_of_100_intervals_hold_the_truth():
    rng = np.random.default_rng(3)
    inside = 0
    for _ in range(300):
        drafted = rng.integers(5, 50, 60)
        found = ratio_of_sums(rng.binomial(drafted, 0.6), drafted, resamples=400)
        inside += found.low <= 0.6 <= found.high
    assert 0.90 <= inside / 300 <= 0.98  # 0.95 within 4 standard errors, less what 60 prompts cost


def test_the_same_draws_for_all_figures_of_a_seed():
    x = np.random.default_rng(4).normal(size=50)
    assert mean(x) == mean(x)
    assert mean(x) != mean(x, seed=1)
    doubled = mean(2 * x)
    assert (doubled.low, doubled.high) == pytest.approx((2 * mean(x).low, 2 * mean(x).high))
    equal = ratio_of_sums(3 * abs(x), abs(x))  # numerator and denominator of one prompt stay together
    assert (equal.value, equal.low, equal.high) == pytest.approx((3, 3, 3))


def test_the_number_drawn_at_once_changes_nothing(monkeypatch):
    x = np.random.default_rng(5).normal(size=30)
    whole = mean(x)
    monkeypatch.setattr(bootstrap, "_AT_ONCE", 70)
    assert mean(x) == whole


def test_few_prompts_and_nothing_drafted():
    assert mean([]) == Interval(0.0, None, None)
    assert mean([4]) == Interval(4.0, None, None)
    assert ratio_of_sums([0, 0], [0, 0]) == Interval(0.0, 0.0, 0.0)
    found = ratio_of_sums([0, 3], [0, 4])  # a quarter of the draws have nothing drafted
    assert found == Interval(0.75, 0.75, 0.75)
    assert mean([2, 2, 2]) == Interval(2.0, 2.0, 2.0)


def test_what_is_no_figure_is_refused():
    for above, below in (([1], [1, 2]), ([np.nan, 1], [1, 1]), ([1, 1], [np.inf, 1])):
        with pytest.raises(ValueError):
            ratio_of_sums(above, below)
