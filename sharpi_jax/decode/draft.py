"""Drafting with the MTP block: one window-wide pass for catch-up and the first draft, then one pass a draft.

A drafter is a pytree with `__call__(params, cfg, state, K) -> (drafts [B, K], mtp cache)`, so that what it needs can be
traced data (tests script theirs that way). With an exact rule no drafter can change the text.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from sharpi_jax.decode.shortlist import Shortlist
from sharpi_jax.decode.state import DecodeState
from sharpi_jax.decode.target import argmax
from sharpi_jax.model.cache import KVCache
from sharpi_jax.model.config import ModelConfig
from sharpi_jax.model.mtp import mtp_block
from sharpi_jax.model.params import ModelParams
from sharpi_jax.model.trunk import head
from sharpi_jax.model.window import window_at


@struct.dataclass
class MtpDrafter:
    """The file's own MTP head, over the whole vocabulary or a shortlist of it."""

    shortlist: Shortlist | None = None

    def __call__(
        self, params: ModelParams, cfg: ModelConfig, state: DecodeState, K: int
    ) -> tuple[jax.Array, KVCache | None]:
        return draft_step(params, cfg, state, K, self.shortlist)


def draft_step(
    params: ModelParams, cfg: ModelConfig, state: DecodeState, K: int, shortlist: Shortlist | None = None
) -> tuple[jax.Array, KVCache]:
    """K drafts [B, K] int32 for the positions after `next_token`, and the block's cache.

    A draft is always the block's argmax, of all tokens or of the shortlist's.

    The first pass covers the positions of the drafts that the last step emitted, whose keys and values it rebuilds from
    the *trunk's* hiddens, and that of next_token; its output there gives the first draft. Deeper drafts chain on the
    block's own hidden. Entries of drafts that are then rejected are overwritten before anything attends to them.
    """
    p = params.mtp
    assert p is not None
    assert state.mtp is not None
    rope = state.trunk.rope

    def choose(hidden: jax.Array) -> jax.Array:
        return argmax(head(p.head, cfg, hidden)) if shortlist is None else shortlist.choose(cfg, hidden)

    start = state.length - state.accepted
    window = window_at(start, jnp.where(state.active, state.accepted + 1, 0), K + 1, row_exact=True)
    tokens = jnp.take_along_axis(state.tokens, jnp.minimum(window.positions, state.slots - 1), axis=1)
    tokens = jnp.where(window.positions == state.length[:, None], state.next_token[:, None], tokens)
    hidden, cache = mtp_block(p, cfg, tokens, state.window_hidden, state.mtp, window, rope)
    hidden = jnp.take_along_axis(hidden, state.accepted[:, None, None], axis=1)
    first = choose(hidden)

    def deeper(carry: tuple[jax.Array, jax.Array, KVCache], depth: jax.Array):  # type: ignore[no-untyped-def]
        token, hidden, cache = carry
        window = window_at(state.length + depth, state.active.astype(jnp.int32), 1, row_exact=True)
        hidden, cache = mtp_block(p, cfg, token, hidden, cache, window, rope)
        token = choose(hidden)
        return (token, hidden, cache), token[:, 0]

    (_, _, cache), rest = lax.scan(deeper, (first, hidden, cache), jnp.arange(1, K, dtype=jnp.int32))
    return jnp.concatenate([first, rest.T], axis=1), cache
