"""From the drafter's logits to one draft: which token, out of which distribution, and whether it is sure enough."""

import jax
import jax.numpy as jnp
from flax import struct

from sharpi_jax.decode.controls import Controls
from sharpi_jax.decode.rule_table import RULES
from sharpi_jax.decode.sampling import DRAFT, Distribution, distribution, draw, window_keys
from sharpi_jax.decode.target import argmax, target_of, top_k


@struct.dataclass
class Draft:
    """One draft of each row.

    Attributes:
      token: [B] int32. sure: [B] bool, whether it is proposed at all, or ends the chain.
      q: [B, 1, V], what it was drawn from; None where it is the likeliest one.
    """

    token: jax.Array
    sure: jax.Array
    q: Distribution | None


def pick(
    logits: jax.Array, ids: jax.Array | None, vocab_size: int, position: jax.Array, depth: jax.Array, controls: Controls
) -> Draft:
    """The draft that logits [B, 1, n] give at a depth of the window that begins at `position` [B].

    Args:
      ids: [n], the tokens that the logits are of; None for all.
    """
    method = controls.method
    if ids is not None:
        logits = _once(logits, ids)
    place, q = argmax(logits), None
    if RULES[method.rule].needs_q:
        q = distribution(logits, place, controls.sampling)
        place = draw(q.weights, window_keys(controls.sampling.seed, position, depth, 1, DRAFT))
        if ids is not None:
            spread = jnp.zeros((*q.weights.shape[:-1], vocab_size), jnp.float32)
            q = q.replace(weights=spread.at[..., ids].add(q.weights))  # type: ignore[attr-defined]
    sure = _sure(logits, place, method.draft_stop, controls.stop_p)
    token = place if ids is None else ids[place]
    return Draft(token[:, 0], sure, q)


def _once(logits: jax.Array, ids: jax.Array) -> jax.Array:
    """A shortlist is filled up with its last id: of equal ids all but the first are as good as not there."""
    again = jnp.concatenate([jnp.zeros(1, bool), ids[1:] == ids[:-1]])
    return jnp.where(again, -jnp.inf, logits)


def _sure(logits: jax.Array, place: jax.Array, candidates: int | None, stop_p: jax.Array) -> jax.Array:
    """[B], whether the drafter gives the token at `place` [B, 1] at least stop_p [B].

    llama.cpp's --spec-draft-p-min looks at its 10 likeliest candidates alone, so that they sum up to 1.
    """
    if candidates is None:
        return jnp.ones(logits.shape[0], bool)
    own = jnp.take_along_axis(logits, place[..., None], axis=-1)[:, 0, 0]
    if candidates == 0:
        target = target_of(logits)
        return jnp.exp((own - target.peak[:, 0]) - target.log_sum[:, 0]) >= stop_p
    best = top_k(logits, min(candidates, logits.shape[-1]))[0][:, 0]
    shares = jnp.exp(best - best[:, :1])
    return jnp.exp(own - best[:, 0]) / jnp.sum(shares, axis=-1) >= stop_p
