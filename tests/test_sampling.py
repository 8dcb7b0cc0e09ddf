"""Sampling against a sorting float64 reference; draws against exact probabilities; bits across windows and batches."""

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import numpy_sampling
from scipy import stats

from sharpi_jax.decode import sampling
from sharpi_jax.decode.controls import NO_TOKEN
from sharpi_jax.decode.target import argmax, top_k

DRAWS = 200_000
OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
ALL = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.02}


def options(*rows):
    """Sampling of rows given as dicts of what differs from OFF."""
    rows = [{**OFF, "seed": 0, **row} for row in rows]
    types = {"temperature": np.float32, "top_k": np.int32, "top_p": np.float32, "min_p": np.float32, "seed": np.uint32}
    return sampling.Sampling(**{k: jnp.asarray([row[k] for row in rows], t) for k, t in types.items()})


distribution = jax.jit(sampling.distribution)
draw = jax.jit(sampling.draw)


def probabilities(logits, **changed):
    """Ours, of one row of logits [V]."""
    logits = jnp.asarray(logits, jnp.float32)[None, None]
    found = distribution(logits, argmax(logits), options(changed))
    weights = np.asarray(found.weights[0, 0], np.float64)
    np.testing.assert_allclose(np.asarray(found.total)[0, 0], weights.sum(), rtol=3e-6)
    assert (weights >= 0).all()
    return weights / weights.sum()


def check(logits, **changed):
    """Ours against the reference: the tokens kept, where roundings do not decide, and their probabilities."""
    logits = np.asarray(logits, np.float32)
    wanted = {**OFF, **changed}
    ours = probabilities(logits, **changed)
    best = int(np.where(np.isnan(logits), np.inf, logits).argmax())

    exact, _ = numpy_sampling.probabilities(logits, best, **wanted)
    fewer = numpy_sampling.probabilities(logits, best, **nudged(wanted, -1e-5))[1]
    more = numpy_sampling.probabilities(logits, best, **nudged(wanted, 1e-5))[1]
    assert not (ours[~more] > 0).any()
    assert (ours[fewer & (exact > 1e-30)] > 0).all()
    if (fewer == more).all():
        np.testing.assert_allclose(ours, exact, rtol=1e-4, atol=1e-30)
    return ours


def nudged(wanted, by):
    """The options with both thresholds a little more (by > 0) or less generous."""
    top_p = wanted["top_p"] if wanted["top_p"] >= 1 else min(max(wanted["top_p"] + by, 0.0), 1.0)
    return {**wanted, "top_p": top_p, "min_p": wanted["min_p"] * (1 - by)}


FILTERS = (
    {},
    {"top_k": 3},
    {"top_p": 0.7},
    {"min_p": 0.1},
    {"top_k": 5, "top_p": 0.8},
    {"top_p": 0.95, "min_p": 0.2},
    {**ALL, "top_k": 7},
)


@pytest.mark.parametrize("V", [1, 2, 5, 64, 100, 512, 1500, 4160])
@pytest.mark.parametrize("spread", [0.1, 4.0])
def test_probabilities_are_the_references(V, spread):
    rng = np.random.default_rng(V)
    for filters in FILTERS:
        for temperature in (0.3, 1.0, 2.5):
            check(spread * rng.standard_normal(V), **{**filters, "temperature": temperature})


def test_each_filter_at_hand_reckoned_values():
    logits = np.log([0.4, 0.3, 0.2, 0.07, 0.03])
    keeps = lambda **changed: (probabilities(logits, **changed) > 0).sum()  # noqa: E731
    assert [keeps(top_k=k) for k in (1, 2, 5, 6, 10**6)] == [1, 2, 5, 5, 5]
    # The token that crosses stays.
    assert [keeps(top_p=p) for p in (0.0, 0.39, 0.41, 0.69, 0.71, 0.89, 0.91, 0.98, 1.0)] == [1, 1, 2, 2, 3, 3, 4, 5, 5]
    assert [keeps(min_p=p) for p in (0.0, 0.07, 0.08, 0.17, 0.18, 0.49, 0.51, 1.0, 2.0)] == [5, 5, 4, 4, 3, 3, 2, 1, 1]
    # Renormalised after the filter before: of the first three, two make up 7/9.
    assert [keeps(top_k=3, top_p=p) for p in (0.77, 0.78)] == [2, 3]
    # Filters see probabilities at temperature 1, whatever it is.
    for temperature in (0.1, 10.0):
        assert [keeps(temperature=temperature, **f) for f in ({"top_p": 0.65}, {"min_p": 0.3})] == [2, 3]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_random_logits_and_options(data):
    V = data.draw(st.sampled_from([1, 5, 600]))  # few shapes, since each is compiled
    values = st.one_of(st.floats(-30, 30, width=32), st.sampled_from([0.0, -0.0, 1.0, -np.inf]))
    if V > 5:
        rng = np.random.default_rng(data.draw(st.integers(0, 10**6)))
        logits = rng.standard_normal(V) * data.draw(st.sampled_from([0.01, 1, 5, 30]))
        if data.draw(st.booleans()):
            logits = np.round(logits)  # many ties
    else:
        logits = data.draw(st.lists(values, min_size=V, max_size=V))
    check(
        logits,
        temperature=data.draw(st.sampled_from([0.0, 0.1, 0.8, 1.0, 3.0])),
        top_k=data.draw(st.sampled_from([0, 1, 2, 4, 40, 599, 600, 10**6])),
        top_p=data.draw(st.one_of(st.just(1.0), st.floats(0.0, 1.0, width=32))),
        min_p=data.draw(st.one_of(st.just(0.0), st.floats(0.0, 1.0, width=32))),
    )


def test_ties_stay_together():
    logits = np.array([1.0, 2.0, 2.0, 2.0, 0.0, -1.0])
    for changed in ({"top_k": 1}, {"top_k": 2}, {"top_p": 0.1}, {"top_p": 0.5}, {"min_p": 1.0}):
        assert check(logits, **changed).tolist() == [0, 1 / 3, 1 / 3, 1 / 3, 0, 0]
    assert (check(np.zeros(1000), top_k=3, top_p=0.5, min_p=0.5) > 0).all()
    assert (check(np.where(np.arange(1000) % 2, 0.0, -0.0), top_k=3) > 0).all()


def test_logits_that_are_not_numbers():
    inf, nan = np.inf, np.nan
    for filters in FILTERS:
        ours = check([nan, 1.0, -inf, 2.0, nan], **filters)
        assert ours[[0, 2, 4]].tolist() == [0, 0, 0]
        assert check([1.0, inf, 2.0, inf, -inf], **filters).tolist() == [0, 0.5, 0, 0.5, 0]
        assert check([-inf, -inf, -inf], **filters).tolist() == [1, 0, 0]
        assert check([-inf, nan, nan], **filters).tolist() == [0, 1, 0]
        assert check([3e38, -3e38, -inf], **filters).tolist() == [1, 0, 0]


def test_temperatures_at_the_ends():
    logits = 4 * np.random.default_rng(0).standard_normal(1500)
    best = int(logits.argmax())
    for temperature in (0.0, -1.0, np.nan, 1e-6, 1e-38):
        for filters in FILTERS:
            ours = probabilities(logits, **{**filters, "temperature": temperature})
            assert ours[best] == 1, (temperature, filters)
    assert check([1.0, 1.0 + 1e-6, 0.0], temperature=1e-6)[0] > 0.1
    assert set(check([5.0, -5.0, -np.inf], temperature=1e30)) == {0.5, 0.0}
    assert set(probabilities([5.0, -5.0, -np.inf], temperature=np.inf)) == {0.5, 0.0}
    kept = probabilities(logits, temperature=1e30, top_p=0.9) > 0
    assert kept.sum() == (probabilities(logits, top_p=0.9) > 0).sum()


def test_a_vocabulary_of_a_real_size():
    rng = np.random.default_rng(1)
    logits = 2 * rng.standard_normal(151_936)
    logits[rng.integers(0, len(logits), 40)] += np.linspace(12, 4, 40)
    for filters in (*FILTERS, {"top_k": 2000}, {"top_k": 150_000}, {"top_p": 0.999}):
        check(logits, **filters)


def test_a_distributions_own_methods():
    logits = np.random.default_rng(2).standard_normal((2, 4, 10)).astype(np.float32)
    found = distribution(logits, argmax(logits), options({"top_k": 4}, {"temperature": 0.0}))
    exact = np.asarray(found.weights) / np.asarray(found.total)[..., None]
    ids = np.array([[1, 9, 3], [0, 2, 2]])
    wanted = [[exact[b, t, ids[b, t]] for t in range(3)] for b in range(2)]
    np.testing.assert_allclose(np.asarray(found.probability(ids)), wanted, rtol=1e-6)
    one = found.at(jnp.array([3, 1]))
    assert one.weights.shape == (2, 1, 10)
    assert one.total.shape == (2, 1)
    for b, t in ((0, 3), (1, 1)):
        np.testing.assert_allclose(np.asarray(one.weights[b, 0]) / np.asarray(one.total[b, 0]), exact[b, t], rtol=1e-6)


# Draws


def fits(counts, exact):
    """p of a chi-square test of counts against probabilities; expectations below 5 are pooled."""
    expected = exact * counts.sum()
    small = expected < 5
    assert counts[exact == 0].sum() == 0
    pooled = [*counts[~small]], [*expected[~small]]
    if expected[small].sum() > 0:
        pooled[0].append(counts[small].sum())
        pooled[1].append(expected[small].sum())
    return stats.chisquare(*pooled).pvalue


def drawn(weights, seed, purpose=sampling.TARGET, n=DRAWS):
    """Draws [n] at positions 0 to n - 1."""
    weights = jnp.asarray(weights, jnp.float32)

    @jax.jit
    def some(positions):
        keys = sampling.random_keys(jnp.array([seed], jnp.uint32), positions[None], purpose)
        return sampling.draw(jnp.broadcast_to(weights, (1, *positions.shape, *weights.shape)), keys)[0]

    return np.concatenate([some(part) for part in jnp.arange(n, dtype=jnp.int32).reshape(-1, n // 50)])


@pytest.mark.parametrize("V", [5, 1500])
def test_draws_follow_the_weights(V):
    rng = np.random.default_rng(V)
    weights = np.array([3.0, 0.0, 1.0, 0.001, 5.0]) if V == 5 else np.exp(2 * rng.standard_normal(V))
    if V > 5:
        weights[rng.random(V) < 0.3] = 0
        weights[512:600] = weights[-50:] = 0
    ids = drawn(weights, seed=V)
    assert fits(np.bincount(ids, minlength=V), weights / weights.sum()) > 1e-3


@pytest.mark.parametrize("V", [1, 5, 700, 1536, 5000])
def test_a_token_of_weight_0_is_never_drawn(V):
    rng = np.random.default_rng(V)
    weights = np.zeros((1, 500, V), np.float32)
    alive = rng.integers(0, V, (500, 3))
    np.put_along_axis(weights[0], alive, rng.choice([1e-30, 1.0, 1e30], (500, 3)).astype(np.float32), -1)
    for seed in range(4):
        keys = sampling.random_keys(jnp.array([seed], jnp.uint32), jnp.arange(500)[None], sampling.DRAFT)
        ids = np.asarray(draw(weights, keys))
        assert (np.take_along_axis(weights[0], ids[0][:, None], -1) > 0).all()


@pytest.mark.parametrize("number", [2.0**-24, 0.25, 0.5, 0.999, 1.0])
def test_a_pick_at_the_ends_has_weight(number):
    rng = np.random.default_rng(0)
    for _ in range(50):
        weights = np.where(rng.random(485) < 0.5, rng.random(485), 0).astype(np.float32)
        weights[:40] = weights[-40:] = 0
        place = int(sampling._pick(jnp.asarray(weights), jnp.float32(number)))
        sums = np.cumsum(weights.astype(np.float64))
        assert weights[place] > 0
        assert abs(sums[place] - number * sums[-1]) <= weights[place] + 1e-4


def test_keys_depend_on_seed_position_and_purpose_only():
    seeds = np.array([0, 1, 7, 2**32 - 1], np.uint32)
    data = {}
    for purpose in range(4):
        keys = sampling.random_keys(jnp.asarray(seeds), jnp.tile(jnp.arange(50, dtype=jnp.int32), (4, 1)), purpose)
        for b, seed in enumerate(seeds):
            for position in range(50):
                data[int(seed), position, purpose] = tuple(np.asarray(jax.random.key_data(keys[b, position])).tolist())
    assert len(set(data.values())) == len(data)
    with jax.default_prng_impl("rbg"):
        keys = jax.jit(sampling.random_keys, static_argnums=2)(
            jnp.array([7, 1], jnp.uint32), jnp.array([[3], [49]], jnp.int32), sampling.ACCEPT
        )
    again = np.asarray(jax.random.key_data(keys))[:, 0]
    assert [tuple(k) for k in again.tolist()] == [data[7, 3, sampling.ACCEPT], data[1, 49, sampling.ACCEPT]]


def test_numbers_are_even_and_independent_across_purposes_positions_and_seeds():
    positions = jnp.arange(40_000, dtype=jnp.int32)[None]
    numbers = jax.jit(
        lambda seed, purpose: sampling.uniform(sampling.random_keys(seed, positions, purpose)), static_argnums=1
    )
    at = lambda seed, purpose: np.asarray(numbers(jnp.array([seed], jnp.uint32), purpose))[0]  # noqa: E731
    found = {purpose: at(3, purpose) for purpose in range(4)}
    assert all((u > 0).all() and (u <= 1).all() and u.dtype == np.float32 for u in found.values())
    pairs = [(found[a], found[b]) for a in range(4) for b in range(a)]
    pairs += [(found[0][1:], found[0][:-1]), (found[0], at(4, sampling.TARGET))]
    for a, b in pairs:
        table = np.histogram2d(a, b, bins=8, range=[[0, 1], [0, 1]])[0]
        assert stats.chisquare(table.reshape(-1)).pvalue > 1e-3


def test_draws_for_two_purposes_are_independent():
    weights = [0.2, 0.3, 0.1, 0.4]
    first, second = (drawn(weights, 5, purpose, 50_000) for purpose in (sampling.TARGET, sampling.RESIDUAL))
    table = np.histogram2d(first, second, bins=4)[0]
    assert fits(table.reshape(-1), np.outer(weights, weights).reshape(-1)) > 1e-3


# Bits


def read(logits, chosen, position):
    found = sampling.distribution(logits, argmax(logits), chosen)
    keys = sampling.random_keys(chosen.seed, position, sampling.TARGET)
    return found.weights, found.total, sampling.draw(found.weights, keys)


def read_in_a_loop(logits, chosen, position):
    """Twice, the second time with logits of which the first decides nothing, as in a decode loop."""
    first = jax.tree.map(jnp.zeros_like, jax.eval_shape(read, logits, chosen, position))

    def again(carry):
        n, _ = carry
        return n + 1, read(logits * jnp.where(n == 1, 1.0, 0.5), chosen, position)

    return jax.lax.while_loop(lambda carry: carry[0] < 2, again, (0, first))[1]


@pytest.mark.parametrize(
    ("V", "shapes", "function"),
    [
        (1500, [(2, 1), (1, 2), (3, 3), (1, 4), (2, 5)], read),
        (151_936, [(1, 5), (2, 2)], read),
        (4160, [(1, 1), (1, 2), (3, 4)], read_in_a_loop),
    ],
)
def test_bits_do_not_depend_on_the_window_or_the_batch(V, shapes, function):
    rng = np.random.default_rng(V)
    table = (3 * rng.standard_normal((5, V))).astype(np.float32)
    sets = [{"temperature": 1.5, "seed": 5}, {"top_p": 0.97, "temperature": 1.3, "seed": 4}, {**ALL, "seed": 3}]
    positions = np.arange(100, 105, dtype=np.int32)
    alone_in = jax.jit(read)
    alone = [
        [jax.device_get(alone_in(table[t, None, None], options(chosen), positions[t, None, None])) for t in range(5)]
        for chosen in sets
    ]
    for B, W in shapes:
        window = np.broadcast_to(table[:W], (B, W, V))
        found = jax.device_get(jax.jit(function)(window, options(*sets[:B]), np.broadcast_to(positions[:W], (B, W))))
        for b in range(B):
            for t in range(W):
                for ours, wanted in zip(found, alone[b][t], strict=True):
                    assert models.same_bits(ours[b, t], wanted[0, 0]), (B, W, b, t)


# Penalties and the largest


def test_penalties_are_the_references_and_count_a_token_once():
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((3, 4, 50)).astype(np.float32)
    logits[0, 0, :4] = 0.0, -0.0, -np.inf, np.inf
    recent = rng.integers(0, 50, (3, 4, 20)).astype(np.int32)
    recent[0, 0, :8] = 0, 1, 2, 3, 3, 3, 49, 49
    recent[:, :, 15:] = NO_TOKEN
    recent[1, 2] = NO_TOKEN
    penalty = np.array([1.3, 0.5, 1.0], np.float32)
    found = np.asarray(jax.jit(sampling.penalise)(logits, recent, penalty))
    for b in range(3):
        for t in range(4):
            np.testing.assert_allclose(
                found[b, t], numpy_sampling.penalised(logits[b, t], recent[b, t], float(penalty[b])), rtol=1e-6
            )
    assert models.same_bits(found[2], logits[2])
    assert models.same_bits(found[1, 2], logits[1, 2])


@pytest.mark.parametrize("V", [1, 5, 63, 512, 1500, 50257])
def test_the_k_largest_are_those_of_a_stable_sort(V):
    rng = np.random.default_rng(V)
    logits = (4 * rng.standard_normal((2, 3, V))).astype(np.float32)
    logits[0, 1] = np.round(logits[0, 1])
    logits[0, 2] = np.where(rng.random(V) < 0.5, 0.0, -0.0)
    logits[1, 0] = -np.inf
    logits[1, 1, rng.integers(0, V, 3)] = np.nan
    logits[1, 2, rng.integers(0, V, 3)] = np.inf
    clean = np.where(np.isnan(logits), np.inf, logits)
    for k in {min(k, V) for k in (1, 2, 10, 300, 1500)}:
        values, ids = jax.jit(top_k, static_argnums=1)(logits, k)
        wanted = np.argsort(-clean, axis=-1, kind="stable")[..., :k]
        assert np.asarray(ids).tolist() == wanted.tolist()
        assert ids.dtype == np.int32
        assert (np.asarray(values) == np.take_along_axis(clean, wanted, -1)).all()
