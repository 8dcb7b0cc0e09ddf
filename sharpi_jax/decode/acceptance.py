"""The acceptance rule, as a pure function of the target's logits and the drafts.

What must not be got wrong: the probability is the *target's*, taken from raw float32 logits, max-shifted, which keeps a
tie at one half to an ulp; ties of the argmax go to the lowest index; a NaN probability rejects.
"""

import jax
import jax.numpy as jnp
from flax import struct


@struct.dataclass
class Judgement:
    """[B, K] each: does the rule let a draft through, the target's probability of it, is it the target's argmax."""

    accept: jax.Array
    probability: jax.Array
    is_argmax: jax.Array


def greedy_p_min(target_logits: jax.Array, drafts: jax.Array, p_min: jax.Array) -> Judgement:
    """Accepts the target's argmax, and any draft that the target gives at least p_min.

    With p_min = 1 it is exact greedy decoding. No two tokens can both exceed one half, so every p_min in (0.5, 1]
    decides alike, but for an exact tie. Below, it is lossy.

    Args:
      target_logits: [B, K, V] float32, entry j judges draft j. drafts: [B, K] int32. p_min: [B] float32, <= 0 means 1.
    """
    is_argmax = jnp.argmax(target_logits, axis=-1).astype(drafts.dtype) == drafts
    probability = token_probability(target_logits, drafts)
    threshold = jnp.where(p_min <= 0, 1.0, p_min)[:, None]
    return Judgement(jnp.where(is_argmax, True, probability >= threshold), probability, is_argmax)


def token_probability(logits: jax.Array, ids: jax.Array) -> jax.Array:
    """exp(logit - logsumexp(logits)), max-shifted: logits [..., V] and ids [...] -> [...]."""
    shifted = logits - jnp.max(logits, axis=-1, keepdims=True)
    chosen = jnp.take_along_axis(shifted, ids[..., None], axis=-1)[..., 0]
    return jnp.exp(chosen - jnp.log(jnp.sum(jnp.exp(shifted), axis=-1)))


def accepted_prefix(accept: jax.Array, proposed: jax.Array) -> jax.Array:
    """Length [B] of the longest prefix of [B, K] in which every draft passes, within the `proposed` [B] first ones."""
    offsets = jnp.arange(accept.shape[1], dtype=jnp.int32)[None, :]
    passes = accept & (offsets < proposed[:, None])
    return jnp.sum(jnp.cumprod(passes.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
