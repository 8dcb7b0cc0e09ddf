"""Prefill: a prompt through the trunk, and through the MTP block, in chunks of a few fixed widths.

The trunk's and the block's chunks are separate programs, so that the trunk's caches have the same bits whether or not
there is drafting.
"""

import jax
import jax.numpy as jnp

from sharpi_jax.decode.adaptive import init_acceptance
from sharpi_jax.decode.choices import choices_of
from sharpi_jax.decode.controls import Controls
from sharpi_jax.decode.logprobs import LogProbs, init_logprobs, write_logprobs
from sharpi_jax.decode.shaping import Context
from sharpi_jax.decode.state import DecodeState, finish_code, init_counters, init_last_step, pending_width
from sharpi_jax.decode.target import Target
from sharpi_jax.model.cache import KVCache, TrunkCache
from sharpi_jax.model.config import ModelConfig
from sharpi_jax.model.mtp import mtp_block
from sharpi_jax.model.params import ModelParams
from sharpi_jax.model.rope import RopeTable
from sharpi_jax.model.trunk import head, trunk
from sharpi_jax.model.window import window_at

CHUNKS = (16, 64, 256)


def chunk_plan(length: int) -> list[tuple[int, int]]:
    """(start, width) of the chunks that cover `length` positions: the largest width, then one that fits the rest."""
    plan, start = [], 0
    while start < length:
        width = next((w for w in CHUNKS if w >= length - start), CHUNKS[-1])
        plan.append((start, width))
        start += width
    return plan


def prefill_trunk(
    params: ModelParams,
    cache: TrunkCache,
    last: jax.Array,
    tokens: jax.Array,
    start: jax.Array,
    count: jax.Array,
    *,
    cfg: ModelConfig,
) -> tuple[TrunkCache, jax.Array, jax.Array]:
    """One chunk through the trunk.

    Args:
      last: [B, D], hidden of the position before the chunk (zeros at the start).
      tokens: [B, T], of which the first `count` [B] are valid, at positions from `start` [B].

    Returns:
      the caches, hidden [B, T, D], and `last` after the chunk.
    """
    window = window_at(start, count, tokens.shape[1], row_exact=False)
    hidden, cache = trunk(params, cfg, tokens, cache, window)
    newest = jnp.take_along_axis(hidden, jnp.maximum(count - 1, 0)[:, None, None], axis=1)[:, 0]
    return cache, hidden, jnp.where((count > 0)[:, None], newest, last)


def prefill_mtp(
    params: ModelParams,
    cache: KVCache,
    rope: RopeTable,
    before: jax.Array,
    hidden: jax.Array,
    tokens: jax.Array,
    start: jax.Array,
    count: jax.Array,
    *,
    cfg: ModelConfig,
) -> tuple[KVCache, jax.Array]:
    """One chunk through the MTP block: `hidden` [B, T, D] is the trunk's of this chunk, `before` [B, D] the one before.

    Returns the cache and the block's hidden [B, T, D].
    """
    assert params.mtp is not None
    shifted = jnp.concatenate([before[:, None], hidden[:, :-1]], axis=1)
    window = window_at(start, count, tokens.shape[1], row_exact=False)
    out, cache = mtp_block(params.mtp, cfg, tokens, shifted, cache, window, rope)
    return cache, out


def begin(
    params: ModelParams,
    trunk_cache: TrunkCache,
    mtp_cache: KVCache | None,
    last: jax.Array,
    tokens: jax.Array,
    length: jax.Array,
    budget: jax.Array,
    controls: Controls,
    *,
    cfg: ModelConfig,
    K: int,
) -> DecodeState:
    """The loop's first state, from the caches after the prompt.

    Args:
      last: [B, D], the hidden of each prompt's last position. tokens: [B, S]; length: [B], prompt lengths, >= 1.
      budget: [B], tokens to emit at most.
    """
    B, S = tokens.shape
    method = controls.method
    context = Context(tokens, length, length, jnp.zeros((B, 1), jnp.int32), first=True)
    choices = choices_of(head(params.head, cfg, last[:, None]), context, controls)
    next_token = choices.choice[:, 0]
    pending = pending_width(K, variable=method.variable)
    return DecodeState(
        tokens=tokens,
        prompt_length=length,
        length=length,
        budget=budget,
        next_token=next_token,
        window_hidden=jnp.pad(last[:, None], ((0, 0), (0, pending - 1), (0, 0))),
        behind=jnp.zeros(B, jnp.int32),
        finish=finish_code(next_token, length, budget, S, controls),
        trunk=trunk_cache,
        mtp=mtp_cache,
        counters=init_counters(B, K),
        last=init_last_step(B, K),
        acceptance=init_acceptance(B, K) if method.adaptive and K > 0 else None,
        logprobs=_first_logprobs(choices.raw, next_token, length, S, method.logprobs),
    )


def _first_logprobs(
    raw: Target | None, token: jax.Array, length: jax.Array, slots: int, N: int | None
) -> LogProbs | None:
    """Those of the first token [B], which comes at `length` [B]."""
    if raw is None or N is None:
        return None
    return write_logprobs(init_logprobs(len(token), slots, N), raw, token[:, None], length[:, None])
