"""The acceptance rule, as a pure function of what the target says and the drafts.

What must not be got wrong: the probability is the *target's*, taken from raw float32 logits, max-shifted, which keeps a
tie at one half to an ulp; ties of the argmax go to the lowest index; a NaN probability rejects. So a target whose
`log_sum` was not asked for accepts by the argmax alone, which is the rule at p_min = 1.
"""

import jax
import jax.numpy as jnp
from flax import struct

from sharpi_jax.decode.target import Target


@struct.dataclass
class Judgement:
    """[B, K] each: does the rule let a draft through, the target's probability of it, is it the target's argmax."""

    accept: jax.Array
    probability: jax.Array
    is_argmax: jax.Array


def greedy_p_min(target: Target, drafts: jax.Array, p_min: jax.Array) -> Judgement:
    """Accepts the target's argmax, and any draft that the target gives at least p_min.

    With p_min = 1 it is exact greedy decoding. No two tokens can both exceed one half, so every p_min in (0.5, 1]
    decides alike, but for an exact tie. Below, it is lossy.

    Args:
      target: at K or more positions, of which the j-th judges draft j. drafts: [B, K] int32.
      p_min: [B] float32, <= 0 means 1.
    """
    is_argmax = target.argmax[:, : drafts.shape[1]] == drafts
    probability = target.probability(drafts)
    threshold = jnp.where(p_min <= 0, 1.0, p_min)[:, None]
    return Judgement(jnp.where(is_argmax, True, probability >= threshold), probability, is_argmax)


def accepted_prefix(accept: jax.Array, proposed: jax.Array) -> jax.Array:
    """Length [B] of the longest prefix of [B, K] in which every draft passes, within the `proposed` [B] first ones."""
    offsets = jnp.arange(accept.shape[1], dtype=jnp.int32)[None, :]
    passes = accept & (offsets < proposed[:, None])
    return jnp.sum(jnp.cumprod(passes.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
