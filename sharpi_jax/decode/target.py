"""What the target says at each position of a window, read off its logits in as few passes as possible.

What must not be got wrong: ties of the argmax go to the lowest id; a row's bits do not depend on how many rows there
are, since a probability is compared with p_min. A NaN counts as infinity in the argmax, and makes every probability
NaN; it must be said, since XLA's CPU maximum passes some of them over.

XLA's CPU argmax is a serial loop (1.1 ms a row at 248,320 ids). Here a vectorised maximum of each segment of the
vocabulary leaves two short argmaxes: the first segment that holds the maximum, and its first place inside.
"""

import math

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from sharpi_jax.model.norms import row_sum

SEGMENT = 512  # at most: below 4096, where XLA's CPU sums change their order, and about the root of a large vocabulary
_SHORTEST = 64  # of a segment; vocabularies of which none divides are filled up, which takes twice the time


@struct.dataclass
class Target:
    """The target's logits and what the rules need of them.

    Attributes:
      logits: [B, W, V] float32. argmax: [B, W] int32. peak: [B, W], the largest logit.
      log_sum: [B, W], log sum exp(logits - peak); NaN where it was not asked for.
    """

    logits: jax.Array
    argmax: jax.Array
    peak: jax.Array
    log_sum: jax.Array

    def probability(self, ids: jax.Array) -> jax.Array:
        """Of ids [B, K] at the first K positions: exp((logit - peak) - log_sum), [B, K]."""
        K = ids.shape[1]
        logits = self.logits[jnp.arange(ids.shape[0])[:, None], jnp.arange(K)[None, :], ids]
        return jnp.exp((logits - self.peak[:, :K]) - self.log_sum[:, :K])


def target_of(logits: jax.Array, *, with_sum: jax.Array | bool = True) -> Target:
    """Reads logits [B, W, V].

    Args:
      with_sum: scalar bool, whether log_sum is worked out: at 248,320 ids that is most of the time.
    """
    ids, peak = _argmax_and_peak(logits)
    log_sum = lax.cond(with_sum, _log_sum, lambda logits, peak: jnp.full_like(peak, jnp.nan), logits, peak)
    return Target(logits, ids, peak, log_sum)


def argmax(logits: jax.Array) -> jax.Array:
    """Ids [...] int32 of the largest of logits [..., V]."""
    return _argmax_and_peak(logits)[0]


def top_k(logits: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The k largest of logits [..., V], k <= V, descending: values [..., k] and ids [..., k] int32.

    Ties go to the lowest id, and a NaN counts as infinity, as in `argmax`. The vocabulary is not sorted: the k
    segments with the largest maxima, ties to the first, hold the k largest.
    """
    # lax.top_k puts -0.0 below 0.0.
    parts = segments(jnp.where(jnp.isnan(logits), jnp.inf, jnp.where(logits == 0, 0.0, logits)))
    count, size = parts.shape[-2:]
    chosen = jnp.sort(lax.top_k(jnp.max(parts, axis=-1), min(k, count))[1], axis=-1)  # so that ids rise
    inside = jnp.take_along_axis(parts, chosen[..., None], axis=-2)
    values, places = lax.top_k(inside.reshape(*inside.shape[:-2], -1), k)
    ids = jnp.take_along_axis(chosen, places // size, axis=-1) * size + places % size
    return values, ids.astype(jnp.int32)


def _argmax_and_peak(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    parts = segments(jnp.where(jnp.isnan(logits), jnp.inf, logits))
    peaks = jnp.max(parts, axis=-1)
    first = jnp.argmax(peaks, axis=-1, keepdims=True)
    inside = jnp.take_along_axis(parts, first[..., None], axis=-2)[..., 0, :]
    place = jnp.argmax(inside, axis=-1)
    ids = first[..., 0] * parts.shape[-1] + place
    return ids.astype(jnp.int32), jnp.take_along_axis(peaks, first, axis=-1)[..., 0]


def _log_sum(logits: jax.Array, peak: jax.Array) -> jax.Array:
    # One row at a time: how XLA orders a sum depends on how many there are. A dot then joins the segments' sums.
    parts = segments(logits)
    rows = parts.reshape(-1, *parts.shape[-2:])
    sums = lax.map(lambda row: jnp.sum(jnp.exp(row[0] - row[1]), axis=-1), (rows, peak.reshape(-1)))
    return jnp.log(row_sum(sums)).reshape(peak.shape)


def segments(logits: jax.Array, fill: float = -jnp.inf) -> jax.Array:
    """[..., V] as [..., segments, size], filled up at the end with `fill` where no size divides it."""
    V = logits.shape[-1]
    size = math.gcd(V, SEGMENT)
    if size < _SHORTEST:
        size = SEGMENT
        logits = jnp.pad(logits, [(0, 0)] * (logits.ndim - 1) + [(0, -V % size)], constant_values=fill)
    return logits.reshape(*logits.shape[:-1], -1, size)
