"""The adaptive draft length in simulated texts: against every fixed length, and decision by decision against NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from reference.numpy_adaptive import Controller

from sharpi_jax.decode.adaptive import PROBE_EVERY, Acceptance, choose_draft_length, init_acceptance, observe

K = 7
COSTS = {
    "demo": [1.0, 1.45, 1.6, 1.75, 1.9, 2.05, 2.2, 2.35],
    "0.8B on a CPU": [29.0, 34, 37, 40, 43, 46, 50, 54],
    "no head-room": [10.0, 19, 28, 37, 46, 55, 64, 73],
}
SEEDS = 64


def texts(length: int, seeds: int) -> dict[str, np.ndarray]:
    """By name, texts as bools [seeds, length, K]: whether the draft of a depth would be right, made at that place."""
    rng = np.random.default_rng(length)
    shape = (seeds, length, K)

    def chance(rate) -> np.ndarray:
        return rng.random(shape) < rate

    found = {"always right": np.ones(shape, bool), "always wrong": np.zeros(shape, bool)}
    for rate in (0.2, 0.4, 0.6, 0.8, 0.9):
        for decay in (1.0, 0.9, 0.7):
            found[f"{rate}, x {decay} by depth"] = chance(rate * decay ** np.arange(K))
    first = np.arange(length)[None, :, None] < length // 2
    for one, other in ((0.0, 1.0), (1.0, 0.0), (0.8, 0.2), (0.2, 0.8)):
        found[f"{one}, then {other}"] = chance(np.where(first, one, other))
    for low, high, run in ((0.2, 0.9, 32), (0.1, 0.95, 8), (0.4, 0.8, 16), (0.0, 1.0, 16)):
        flips = rng.random((seeds, length)) < 1 / run
        flips[:, 0] = rng.random(seeds) < 0.5
        easy = np.cumsum(flips, axis=1) % 2 == 1
        found[f"{low} and {high} in runs of {run}"] = chance(np.where(easy, high, low)[..., None])
    return found


@functools.partial(jax.jit, static_argnames="steps")
def decode(lead: jax.Array, step_ms: jax.Array, steps: int | None = None):
    """Every row of `lead` [B, length], drafts right in a row at each place, decoded to its end.

    Returns milliseconds [B], and of the first `steps` steps k and what was accepted, [steps, B], and what
    is known then.
    """
    rows, length = lead.shape

    def step(carry):
        acceptance, place, ms = carry
        active = place < length
        most = jnp.where(active, length - place - 1, 0)
        k = choose_draft_length(acceptance, step_ms, most)
        right = jnp.take_along_axis(lead, jnp.minimum(place, length - 1)[:, None], axis=1)[:, 0]
        accepted = jnp.minimum(right, k)
        after = observe(acceptance, k, accepted, active)
        ms = ms + jnp.where(active, step_ms[k], 0)
        return (after, jnp.where(active, place + 1 + accepted, place), ms), (k, accepted)

    start = (init_acceptance(rows, step_ms.shape[0] - 1), jnp.zeros(rows, jnp.int32), jnp.zeros(rows))
    if steps is None:
        carry = lax.while_loop(lambda c: jnp.any(c[1] < length), lambda c: step(c)[0], start)
        return carry[2]
    carry, (lengths, accepted) = lax.scan(lambda c, _: step(c), start, length=steps)
    return lengths, accepted, carry[0]


def fixed_ms(lead: np.ndarray, step_ms: np.ndarray, k: int) -> np.ndarray:
    """Milliseconds [B] with k drafts at every step that has room for them."""
    rows, length = lead.shape
    place, ms = np.zeros(rows, int), np.zeros(rows)
    while np.any(active := place < length):
        most = np.where(active, np.minimum(k, length - place - 1), 0)
        ms += np.where(active, step_ms[most], 0)
        place += np.where(active, 1 + np.minimum(lead[np.arange(rows), np.minimum(place, length - 1)], most), 0)
    return ms


def in_a_row(right: np.ndarray) -> np.ndarray:
    """[..., K] bools to how many of the first are true, int32."""
    return np.cumprod(right, axis=-1).sum(axis=-1).astype(np.int32)


@functools.cache
def speeds(length: int, costs: str) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Names of texts, tokens/ms of each [n] as decided, and with each fixed length [n, K + 1]: means over seeds."""
    all_texts = texts(length, SEEDS)
    lead = np.concatenate([in_a_row(right) for right in all_texts.values()])
    step_ms = np.asarray(COSTS[costs], np.float32)

    def mean(ms) -> np.ndarray:
        return (length / np.asarray(ms)).reshape(-1, SEEDS).mean(axis=1)

    fixed = np.stack([mean(fixed_ms(lead, step_ms, k)) for k in range(K + 1)], axis=1)
    return list(all_texts), mean(decode(lead, step_ms)), fixed


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize(("length", "most_lost"), [(64, 0.10), (256, 0.03), (1024, 0.03)])
def test_as_fast_as_the_best_fixed_length(length: int, most_lost: float, costs: str) -> None:
    names, found, fixed = speeds(length, costs)
    lost = dict(zip(names, 1 - found / fixed.max(axis=1), strict=True))
    assert {name: by for name, by in lost.items() if by > most_lost} == {}
    wrong = names.index("always wrong")
    assert fixed[wrong].argmax() == 0


def test_follows_a_change_that_no_fixed_length_can() -> None:
    names, found, fixed = speeds(256, "demo")
    gain = dict(zip(names, found / fixed.max(axis=1), strict=True))
    assert gain["0.0, then 1.0"] > 1.2
    assert gain["1.0, then 0.0"] > 1.2
    assert gain["0.8, then 0.2"] > 1.05
    assert gain["0.2, then 0.8"] > 1.05


@pytest.mark.parametrize("costs", COSTS)
def test_decisions_are_those_of_the_reference(costs: str) -> None:
    step_ms = np.asarray(COSTS[costs], np.float32)
    lead = np.concatenate([in_a_row(right) for right in texts(160, 1).values()])
    lengths, accepted, known = jax.device_get(decode(lead, step_ms, steps=160))
    seen = set()
    for row in range(len(lead)):
        controller, place = Controller(K), 0
        for k, a in zip(lengths[:, row], accepted[:, row], strict=True):
            if place >= lead.shape[1]:
                assert k == 0
                continue
            assert k == controller.choose(step_ms, lead.shape[1] - place - 1), (row, place)
            controller.observe(k, a)
            place += 1 + a
            seen.add(int(k))
        assert place == lead.shape[1]
        for name in ("hits", "tries", "idle"):
            assert list(getattr(known, name)[row]) == getattr(controller, name)
    assert seen >= {0, 1, 2, 3, K}


def test_a_row_decides_as_it_does_alone() -> None:
    step_ms = np.asarray(COSTS["demo"], np.float32)
    lead = in_a_row(texts(128, 1)["0.4 and 0.8 in runs of 16"])
    lead = np.concatenate([lead, in_a_row(texts(128, 1)["0.6, x 0.9 by depth"]), lead[:, ::-1]])
    together = np.asarray(decode(lead, step_ms, steps=128)[0])
    for rows in ([0], [1], [2], [2, 0], [1, 2]):
        np.testing.assert_array_equal(np.asarray(decode(lead[rows], step_ms, steps=128)[0]), together[:, rows])


def test_probes_that_fail_are_rare_and_one_that_does_not_is_followed() -> None:
    step_ms = np.asarray(COSTS["demo"], np.float32)
    lead = np.zeros((1, 1200), np.int32)
    lead[:, 1000:] = K
    lengths, accepted = (np.asarray(x)[:, 0] for x in decode(lead, step_ms, steps=1200)[:2])
    place = np.cumsum(1 + accepted) - (1 + accepted)
    tried = place[(lengths > 0) & (place < 1000)]
    gaps = np.diff(tried[tried > 64])
    assert (np.diff(gaps) >= 0).all()
    assert gaps[-5:].min() >= 0.45 * PROBE_EVERY - 1  # steps of 1 ms; a failed probe loses 0.45
    first_hit = place[(accepted > 0)][0]
    assert first_hit < 1000 + 64
    assert place[lengths == K][-1] > 1000
    assert (lengths[(place > first_hit + 40) & (place < 1200 - K)] == K).all()


def test_there_is_room_for_what_is_chosen() -> None:
    acceptance = init_acceptance(4, K)
    for _ in range(3):
        acceptance = observe(acceptance, jnp.full(4, K), jnp.full(4, K), jnp.ones(4, bool))
    k = choose_draft_length(acceptance, jnp.asarray(COSTS["demo"]), jnp.asarray([-1, 0, 3, 99], jnp.int32))
    np.testing.assert_array_equal(k, [0, 0, 3, K])
    assert k.dtype == jnp.int32


def test_only_active_rows_and_depths_that_were_reached_learn() -> None:
    before = init_acceptance(2, 4)
    proposed, accepted = jnp.asarray([3, 3], jnp.int32), jnp.asarray([1, 1], jnp.int32)
    after = observe(before, proposed, accepted, jnp.asarray([True, False]))
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(old[1], new[1])
        assert old.dtype == new.dtype
    assert list(after.tries[0] > before.tries[0]) == [True, True, False, False]
    assert list(after.hits[0] > before.hits[0]) == [True, False, False, False]
    np.testing.assert_array_equal(after.idle[0], [0, 0, 0, 1])


def test_without_drafts_there_is_nothing_to_choose() -> None:
    none = init_acceptance(2, 0)
    assert none.rate.shape == (2, 0)
    step_ms, zero = jnp.ones(1), jnp.zeros(2, jnp.int32)
    np.testing.assert_array_equal(choose_draft_length(none, step_ms, zero + 5), [0, 0])
    assert isinstance(observe(none, zero, zero, zero == 0), Acceptance)
