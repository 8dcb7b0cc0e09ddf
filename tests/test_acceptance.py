"""The acceptance rule greedy_p_min against the plain NumPy one, and its properties."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.numpy_decode import judge

from sharpi_jax.decode.acceptance import Evidence, accepted_prefix, rule_params
from sharpi_jax.decode.decoder import make_controls
from sharpi_jax.decode.rules import judge as judge_by
from sharpi_jax.decode.target import target_of

B, K, V = 4, 3, 16
# XLA flushes subnormal numbers to 0, which means 1; make_controls keeps callers from such a threshold.
P_MIN = st.floats(0, 1, width=32, allow_subnormal=False)


@jax.jit
def RULE(logits, drafts, p_min):  # noqa: N802
    """Each draft [B, K] alone, as the only one of a window: logits [B, K, V], p_min [B]."""
    rows = B * K
    evidence = Evidence(
        target=target_of(jnp.broadcast_to(logits.reshape(rows, 1, V), (rows, 2, V))),
        choice=jnp.broadcast_to(target_of(logits).argmax.reshape(rows, 1), (rows, 2)),
        drafts=drafts.reshape(rows, 1),
        proposed=jnp.ones(rows, jnp.int32),
        p=None,
        q=None,
        temperature=jnp.zeros(rows),
        seed=jnp.zeros(rows, jnp.uint32),
        position=jnp.zeros(rows, jnp.int32),
        sampled=False,
    )
    found = judge_by("greedy_p_min", evidence, rule_params(rows, p_min=jnp.repeat(p_min, K)))
    return found.passed.reshape(B, K) == 1, found.probability.reshape(B, K), found.is_argmax.reshape(B, K)


def judged(logits, drafts, p_min):
    """The rule on each draft of B windows, the same shapes every time."""
    p_min = np.broadcast_to(np.asarray(p_min, np.float32), (B,))
    found = RULE(jnp.asarray(logits, jnp.float32), jnp.asarray(drafts, jnp.int32), jnp.asarray(p_min))
    return SimpleNamespace(**dict(zip(("accept", "probability", "is_argmax"), found, strict=True)))


def random_windows(seed, scale=3.0):
    rng = np.random.default_rng(seed)
    logits = (scale * rng.standard_normal((B, K, V))).astype(np.float32)
    likely = np.argsort(-logits, axis=-1)[..., :3]
    pick = rng.integers(0, 3, (B, K, 1))
    return logits, np.take_along_axis(likely, pick, -1)[..., 0].astype(np.int32)


def test_the_rule_equals_the_plain_one():
    seen = set()
    for seed in range(200):
        logits, drafts = random_windows(seed)
        p_min = np.random.default_rng(seed).choice([1.0, 0.3, 0.07, 0.01, 0.0, -2.0], B)
        ours = judged(logits, drafts, p_min)
        for b in range(B):
            for k in range(K):
                accept, is_argmax, probability = judge(logits[b, k].astype(np.float64), int(drafts[b, k]), p_min[b])
                if abs(probability - p_min[b]) > 1e-5:
                    assert bool(ours.accept[b, k]) == accept
                assert bool(ours.is_argmax[b, k]) == is_argmax
                np.testing.assert_allclose(float(ours.probability[b, k]), probability, rtol=2e-6)
                seen.add((accept, is_argmax))
    assert seen == {(True, True), (True, False), (False, False)}


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), scale=st.floats(0.01, 40), p_min=st.floats(0.501, 1))
def test_every_p_min_above_one_half_decides_like_one(seed, scale, p_min):
    """Two tokens cannot both exceed one half."""
    logits, drafts = random_windows(seed, scale)
    exact = np.asarray(judged(logits, drafts, 1.0).accept)
    assert (np.asarray(judged(logits, drafts, p_min).accept) == exact).all()
    assert (exact == (logits.argmax(-1) == drafts)).all()


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), pair=st.tuples(P_MIN, P_MIN))
def test_a_lower_p_min_never_rejects_what_a_higher_one_accepts(seed, pair):
    low, high = sorted(p if p > 0 else 1.0 for p in pair)  # 0 means 1
    logits, drafts = random_windows(seed)
    strict = np.asarray(judged(logits, drafts, high).accept)
    loose = np.asarray(judged(logits, drafts, low).accept)
    assert (loose | ~strict).all()


def test_p_min_is_per_row():
    logits, _ = random_windows(1)
    second = np.argsort(-logits, axis=-1)[..., 1].astype(np.int32)
    probability = np.asarray(judged(logits, second, 1.0).probability)
    p_min = np.array([1.0, probability[1].min(), 1.0, probability[3].min()], np.float32)
    assert np.asarray(judged(logits, second, p_min).accept).all(axis=1).tolist() == [False, True, False, True]


@pytest.mark.parametrize("p_min", [0.0, -1.0, -np.inf])
def test_values_at_or_below_zero_mean_one(p_min):
    for seed in range(20):
        logits, drafts = random_windows(seed)
        assert (np.asarray(judged(logits, drafts, p_min).accept) == (logits.argmax(-1) == drafts)).all()


def test_a_tie_at_one_half_is_one_half():
    logits = np.full((B, K, V), -1e9, np.float32)
    logits[..., 3] = logits[..., 7] = 11.25
    upper = judged(logits, np.full((B, K), 7), 0.5)
    assert not np.asarray(upper.is_argmax).any(), "ties of the argmax go to the lowest index"
    np.testing.assert_array_max_ulp(np.asarray(upper.probability), np.full((B, K), 0.5, np.float32), 1)
    assert np.asarray(upper.accept).all()
    assert not np.asarray(judged(logits, np.full((B, K), 7), 0.501).accept).any()
    assert np.asarray(judged(logits, np.full((B, K), 3), 1.0).accept).all()


def test_a_nan_probability_rejects():
    logits, drafts = random_windows(2)
    logits[0, 0, 5] = np.nan
    drafts[0, 0] = 4
    assert not bool(judged(logits, drafts, 0.001).accept[0, 0])
    everything = np.full((B, K, V), -np.inf, np.float32)
    assert not np.asarray(judged(everything, np.full((B, K), 9), 0.001).accept).any()


def test_a_nan_p_min_is_exact():
    logits, drafts = random_windows(3)
    assert (np.asarray(judged(logits, drafts, np.nan).accept) == (logits.argmax(-1) == drafts)).all()


def test_probabilities_are_max_shifted():
    logits = np.zeros((B, K, V), np.float32) + 1e4
    found = target_of(jnp.asarray(logits)).probability(jnp.zeros((B, K), jnp.int32))
    np.testing.assert_allclose(np.asarray(found), 1 / V, rtol=1e-6)


def test_changing_p_min_never_recompiles():
    logits, drafts = random_windows(4)
    judged(logits, drafts, 1.0)
    before = RULE._cache_size()
    for p_min in (0.9, 0.5, 0.1, 0.0, np.nan):
        judged(logits, drafts, p_min)
    assert RULE._cache_size() == before


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.booleans(), min_size=K, max_size=K), min_size=B, max_size=B), st.data())
def test_accepted_is_a_prefix_and_not_a_count_of_hits(hits, data):
    proposed = data.draw(st.lists(st.integers(0, K), min_size=B, max_size=B))
    found = accepted_prefix(jnp.asarray(hits), jnp.asarray(proposed, jnp.int32))
    for row, k, n in zip(hits, proposed, np.asarray(found), strict=True):
        expected = 0
        while expected < k and row[expected]:
            expected += 1
        assert n == expected


def test_a_tiny_p_min_is_not_taken_for_zero():
    smallest = np.finfo(np.float32).tiny
    given_p = [1e-300, 1e-40, smallest, 0.5, 0.0, -1.0]
    assert np.asarray(make_controls(given_p, []).p_min).tolist() == [smallest] * 3 + [0.5, 0.0, -1.0]
