"""Sampling: the target's distribution after penalties, filters and temperature, and draws from it.

What must not be got wrong: a row's bits do not depend on how many rows or positions there are, or a run with drafts
would draw other tokens than one without. So each row of a vocabulary is worked on alone, in a loop over rows. And a
draw depends on (seed, position, purpose) only, never on the step in which it is made.

The order is llama.cpp's: bias, penalties, top_k, top_p, min_p, temperature, so that the filters see probabilities at
temperature 1. Each filter keeps the tokens that lie within some distance of the largest logit. That distance is found
without sorting the vocabulary: by bisection over the bits of a float32, which for numbers >= 0 are in their order.
Tokens at the same distance stay or go together, where llama.cpp keeps some of them.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from sharpi_jax.decode.target import segments

TARGET, DRAFT, ACCEPT, RESIDUAL = range(4)  # what a random number is for: `random_keys`

_FURTHEST = np.finfo(np.float32).max  # of finite distances
_NO_MASS = np.float32(104)  # exp(-104) is 0 in float32
# Places that a window has numbers for: more than drafts, and position * _PLACES + place is another number for every
# window and place below 2^24 positions, past the sign too.
_PLACES = 256
_GROUP = 16  # segments looked at together by the search


@struct.dataclass
class Sampling:
    """How each row is sampled, all [B], traced.

    Attributes:
      temperature: float32; <= 0 is the argmax. top_k: int32, 0 is off. top_p: float32, 1 is off.
      min_p: float32, 0 is off. seed: uint32.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    seed: jax.Array


@struct.dataclass
class Distribution:
    """Probabilities that are not yet divided by their sum.

    Attributes:
      weights: [B, W, V] float32 >= 0. total: [B, W], their sum.
    """

    weights: jax.Array
    total: jax.Array

    def probability(self, ids: jax.Array) -> jax.Array:
        """Of ids [B, k] at the first k positions, [B, k]."""
        rows, k = jnp.arange(ids.shape[0])[:, None], ids.shape[1]
        return self.weights[rows, jnp.arange(k)[None, :], ids] / self.total[:, :k]

    def at(self, index: jax.Array) -> "Distribution":
        """One position of each row, index [B]: weights [B, 1, V]."""
        rows = jnp.arange(index.shape[0])
        return Distribution(self.weights[rows, index][:, None], self.total[rows, index][:, None])


def distribution(logits: jax.Array, argmax: jax.Array, sampling: Sampling) -> Distribution:
    """What is sampled from, of logits [B, W, V] after bias and penalties, with their argmax [B, W].

    top_k keeps the k most likely; top_p the fewest most likely whose probabilities, renormalised after top_k, reach
    it; min_p those at least so likely relative to the most likely one. At least one token always stays. A NaN or -inf
    has weight 0. A row at temperature <= 0, or without any logit above -inf, is its argmax with certainty.
    """
    B, W, V = logits.shape
    options = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)

    def of_row(row: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        logits, argmax, temperature, top_k, top_p, min_p = row
        peak = jnp.max(jnp.max(segments(jnp.where(jnp.isnan(logits), -jnp.inf, logits)), axis=-1))

        def sampled() -> tuple[jax.Array, jax.Array]:
            distance = segments(_distance(logits, peak), fill=jnp.inf)
            reach = _reach(distance, jnp.where(top_k < V, top_k, 0), top_p, min_p)
            weights = jnp.where(distance <= reach, jnp.exp(-distance / temperature), 0.0)
            return weights.reshape(-1)[:V], jnp.sum(jnp.sum(weights, axis=-1))

        def certain() -> tuple[jax.Array, jax.Array]:
            return (jnp.arange(V) == argmax).astype(jnp.float32), jnp.ones((), jnp.float32)

        weights: jax.Array
        total: jax.Array
        weights, total = lax.cond((temperature > 0) & (peak > -jnp.inf), sampled, certain)
        return weights, total

    rows = (logits.reshape(B * W, V), argmax.reshape(B * W), *(jnp.repeat(option, W) for option in options))
    weights, total = lax.map(of_row, rows)
    return Distribution(weights.reshape(B, W, V), total.reshape(B, W))


def _distance(logits: jax.Array, peak: jax.Array) -> jax.Array:
    """How far each logit lies below the largest; infinite where it is NaN or -inf."""
    distance = jnp.where(logits == peak, 0.0, peak - logits)  # also where both are infinite
    return jnp.where(logits > -jnp.inf, distance, jnp.inf)


def _reach(distance: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array) -> jax.Array:
    """The largest distance, of [segments, size], that passes all filters; finite."""
    is_searched = (top_k > 0) | (top_p < 1)
    searched = lax.cond(is_searched, lambda: _searched(distance, top_k, top_p), lambda: _FURTHEST)
    return jnp.where(min_p > 0, jnp.minimum(searched, jnp.maximum(-jnp.log(min_p), 0.0)), searched)


def _searched(distance: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """The largest distance that passes top_k, then top_p."""
    count, size = distance.shape
    nearest = jnp.min(distance, axis=-1)
    order = jnp.argsort(nearest)
    nearest = nearest[order]
    # Nearest segments first: those wholly beyond a distance then need not be looked at.
    order = jnp.concatenate([order, jnp.full(-count % _GROUP, count, order.dtype)])
    groups = jnp.take(distance, order, axis=0, mode="fill", fill_value=jnp.inf).reshape(-1, _GROUP, size)

    def within(reach: jax.Array, amounts: Callable[[jax.Array], jax.Array]) -> jax.Array:
        live = (jnp.sum(nearest <= reach) + _GROUP - 1) // _GROUP

        def add(i: jax.Array, totals: jax.Array) -> jax.Array:
            return totals + jnp.sum(jnp.where(groups[i] <= reach, amounts(i), 0.0), axis=0)

        return jnp.sum(lax.fori_loop(0, live, add, jnp.zeros(size, jnp.float32)))

    def fewest() -> jax.Array:
        # Where k segments are within a distance, k tokens are.
        bound = jnp.where(top_k <= count, nearest[jnp.clip(top_k, 1, count) - 1], _FURTHEST)
        enough = top_k.astype(jnp.float32)
        return _smallest(lambda reach: within(reach, lambda i: jnp.float32(1.0)) >= enough, bound)

    def likeliest(reach: jax.Array) -> jax.Array:
        masses = jnp.exp(-groups)
        enough = top_p * within(reach, lambda i: masses[i])
        return _smallest(lambda reach: within(reach, lambda i: masses[i]) >= enough, jnp.minimum(reach, _NO_MASS))

    reach = lax.cond(top_k > 0, fewest, lambda: _FURTHEST)
    both: jax.Array = lax.cond(top_p < 1, likeliest, lambda reach: reach, reach)
    return both


def _smallest(is_enough: Callable[[jax.Array], jax.Array], bound: jax.Array) -> jax.Array:
    """The smallest float32 from 0 to `bound` that is enough, where all above one are; `bound` if none below it is."""

    def halve(ends: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = ends
        middle = low + (high - low) // 2
        enough = is_enough(lax.bitcast_convert_type(middle, jnp.float32))
        return jnp.where(enough, low, middle + 1), jnp.where(enough, middle, high)

    ends = (jnp.zeros((), jnp.int32), lax.bitcast_convert_type(jnp.minimum(bound, _FURTHEST), jnp.int32))
    low, _ = lax.while_loop(lambda ends: ends[0] < ends[1], halve, ends)
    return lax.bitcast_convert_type(low, jnp.float32)


def random_keys(seed: jax.Array, position: jax.Array, purpose: int) -> jax.Array:
    """Keys [B, W] for seed [B] uint32 and absolute positions [B, W]; they depend on these and the purpose only."""

    def key(seed: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), position), purpose)

    return jax.vmap(jax.vmap(key, (None, 0)))(seed, position)


def window_keys(seed: jax.Array, position: jax.Array, first: jax.Array | int, count: int, purpose: int) -> jax.Array:
    """Keys [B, count] for the places from `first` on of the windows that begin at `position` [B]; none share one."""
    places = jnp.arange(count, dtype=jnp.int32)[None, :] + first
    return random_keys(seed, position[:, None] * _PLACES + places, purpose)


def uniform(keys: jax.Array) -> jax.Array:
    """One number in (0, 1] of each key [...]."""
    numbers = jax.vmap(lambda key: jax.random.uniform(key, dtype=jnp.float32))(keys.reshape(-1))
    return 1.0 - numbers.reshape(keys.shape)


def draw(weights: jax.Array, keys: jax.Array) -> jax.Array:
    """A token [B, W] int32 of each row of weights [B, W, V] >= 0, which need not sum to 1, by its key [B, W].

    First a segment of the vocabulary is drawn, then a token inside: float32 sums over all of a large vocabulary would
    be too coarse for rare tokens. A token of weight 0 is never drawn, unless all are 0.
    """
    B, W, V = weights.shape

    def of_row(row: tuple[jax.Array, jax.Array]) -> jax.Array:
        weights, key = row
        parts = segments(weights, fill=0.0)
        first, second = uniform(jax.random.split(key))
        segment = _pick(jnp.sum(parts, axis=-1), first)
        return jnp.minimum(segment * parts.shape[-1] + _pick(parts[segment], second), V - 1)

    ids: jax.Array = lax.map(of_row, (weights.reshape(B * W, V), keys.reshape(B * W)))
    return ids.reshape(B, W).astype(jnp.int32)


def _pick(weights: jax.Array, number: jax.Array) -> jax.Array:
    """The first place at which the running sum reaches `number` in (0, 1] of it all."""
    sums, is_possible = jnp.cumsum(weights), weights > 0
    reached = is_possible & (sums >= number * sums[-1])
    last = weights.shape[0] - 1 - jnp.argmax(is_possible[::-1])
    # XLA may add in another order for each place, so that no sum is certain to reach the last one.
    return jnp.where(jnp.any(reached), jnp.argmax(reached), last)


def penalise(logits: jax.Array, recent: jax.Array, penalty: jax.Array) -> jax.Array:
    """llama.cpp's repeat penalty: each distinct recent token's logit l becomes l * p where l <= 0, else l / p.

    Args:
      logits: [B, W, V]. recent: [B, W, n] int32 ids; NO_TOKEN, which lies outside the vocabulary, is nothing.
      penalty: [B] float32; 1 changes nothing.
    """
    B, W, _ = logits.shape
    rows, places = jnp.arange(B)[:, None, None], jnp.arange(W)[None, :, None]
    old = logits.at[rows, places, recent].get(mode="fill", fill_value=0.0)
    factor = penalty[:, None, None]
    new = jnp.where(old <= 0, old * factor, old / factor)
    return logits.at[rows, places, recent].set(new, mode="drop")  # a token that comes twice is set twice, to the same
