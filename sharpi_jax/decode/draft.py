"""Drafting with the MTP block: one window-wide pass for catch-up and the first draft, then one pass a draft.

A drafter is a pytree with `__call__(params, cfg, state, controls, wanted) -> Proposal`, so that what it needs can be
traced data (tests script theirs that way). With an exact rule no drafter can change the text.
"""

import functools

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from sharpi_jax.decode.candidates import pick
from sharpi_jax.decode.controls import Controls
from sharpi_jax.decode.rule_table import RULES
from sharpi_jax.decode.run_if import run_if
from sharpi_jax.decode.sampling import Distribution
from sharpi_jax.decode.shortlist import Shortlist
from sharpi_jax.decode.state import DecodeState
from sharpi_jax.model.cache import KVCache
from sharpi_jax.model.config import ModelConfig
from sharpi_jax.model.mtp import mtp_block
from sharpi_jax.model.params import ModelParams
from sharpi_jax.model.trunk import head
from sharpi_jax.model.window import window_at

_NARROW = (2, 4)  # windows for what waits, where there is little of it


@struct.dataclass
class Proposal:
    """What a drafter proposes.

    Attributes:
      drafts: [B, K] int32. count: [B] int32, how many of them, from the first on.
      q: [B, K, V], the distribution that each was drawn from; None where a draft is the drafter's argmax.
      mtp: the MTP cache, which it may have advanced. caught_up: bool scalar, whether it saw all that was pending.
    """

    drafts: jax.Array
    count: jax.Array
    q: Distribution | None
    mtp: KVCache | None
    caught_up: jax.Array


@struct.dataclass
class MtpDrafter:
    """The file's own MTP head, over the whole vocabulary or a shortlist of it."""

    shortlist: Shortlist | None = None

    def __call__(
        self, params: ModelParams, cfg: ModelConfig, state: DecodeState, controls: Controls, wanted: jax.Array
    ) -> Proposal:
        return draft_step(params, cfg, state, controls, wanted, self.shortlist)


def no_drafts(state: DecodeState) -> Proposal:
    """What a step without drafts has for a proposal, and without a pass of the block."""
    none = jnp.zeros_like(state.last.drafts)
    return Proposal(none, jnp.zeros_like(state.length), None, state.mtp, jnp.asarray(False))


@struct.dataclass
class _Chain:
    """The loop over depths: token [B] and hidden [B, 1, D] of the last draft, how many there are, which rows go on."""

    token: jax.Array
    hidden: jax.Array
    cache: KVCache
    depth: jax.Array
    going: jax.Array
    drafts: jax.Array
    count: jax.Array
    q: Distribution | None


def draft_step(
    params: ModelParams,
    cfg: ModelConfig,
    state: DecodeState,
    controls: Controls,
    wanted: jax.Array,
    shortlist: Shortlist | None = None,
) -> Proposal:
    """Up to `wanted` [B] drafts for the positions after `next_token`.

    A draft is the block's argmax, of all tokens or of the shortlist's, or where the rule needs the drafter's
    distribution a draw from it.

    Where no row wants any, and there is room for what waits for the block, nothing is run at all. Else the first pass
    covers the positions whose keys and values must be built from the *trunk's* hiddens, and that of next_token; its
    output there gives the first draft. Deeper drafts chain on the block's own hidden. Entries of drafts that are then
    rejected are overwritten before anything attends to them.
    """
    p, rope, K = params.mtp, state.trunk.rope, state.draft_length
    assert p is not None
    head_weight, ids = (p.head, None) if shortlist is None else (shortlist.head, shortlist.ids)

    def add(chain: _Chain) -> _Chain:
        """The draft that the chain's hidden gives, where its row goes on."""
        logits = head(head_weight, cfg, chain.hidden)
        draft = pick(logits, ids, cfg.vocab_size, state.length, chain.depth, controls)
        going = chain.going & draft.sure & (chain.depth < wanted)
        return chain.replace(  # type: ignore[attr-defined, no-any-return]
            token=draft.token,
            going=going,
            drafts=_put(chain.drafts, draft.token[:, None], chain.depth),
            count=chain.count + going.astype(jnp.int32),
            q=jax.tree.map(lambda all_, one: _put(all_, one, chain.depth), chain.q, draft.q),
            depth=chain.depth + 1,
        )

    def deeper(chain: _Chain) -> _Chain:
        window = window_at(state.length + chain.depth, state.active.astype(jnp.int32), 1, row_exact=True)
        hidden, cache = mtp_block(p, cfg, chain.token[:, None], chain.hidden, chain.cache, window, rope)
        return add(chain.replace(hidden=hidden, cache=cache))  # type: ignore[attr-defined]

    def unfinished(chain: _Chain) -> jax.Array:
        if not controls.method.variable:
            return chain.depth < K
        return jnp.any(chain.going & (chain.depth < wanted))

    needed, hidden, cache = _catch_up(params, cfg, state, wanted, variable=controls.method.variable)
    none, q = jnp.zeros_like(state.length), _no_q(cfg, state, controls)
    going = state.active & needed
    start = _Chain(none, hidden, cache, jnp.int32(0), going, jnp.zeros_like(state.last.drafts), none, q)
    first = run_if(jnp.any(going), add, start) if controls.method.variable else add(start)
    chain = lax.while_loop(unfinished, deeper, first)
    return Proposal(chain.drafts, chain.count, chain.q, chain.cache, needed)


def _catch_up(
    params: ModelParams, cfg: ModelConfig, state: DecodeState, wanted: jax.Array, *, variable: bool
) -> tuple[jax.Array, jax.Array, KVCache]:
    """The block over what waits for it and next_token: whether it was run, its hidden there [B, 1, D], its cache.

    Where steps may do without, the narrowest of a few windows is run that holds what waits, or none.
    """
    mtp, rope, P = params.mtp, state.trunk.rope, state.window_hidden.shape[1]
    assert mtp is not None
    assert state.mtp is not None
    count = jnp.where(state.active, state.behind + 1, 0)

    def run(carry: tuple[jax.Array, KVCache], width: int) -> tuple[jax.Array, KVCache]:
        window = window_at(state.length - state.behind, count, width, row_exact=True)
        tokens = jnp.take_along_axis(state.tokens, jnp.minimum(window.positions, state.slots - 1), axis=1)
        tokens = jnp.where(window.positions == state.length[:, None], state.next_token[:, None], tokens)
        hidden, cache = mtp_block(mtp, cfg, tokens, state.window_hidden[:, :width], carry[1], window, rope)
        return jnp.take_along_axis(hidden, jnp.minimum(state.behind, width - 1)[:, None, None], axis=1), cache

    carry = (jnp.zeros_like(state.window_hidden[:, :1]), state.mtp)
    if not variable:
        return jnp.asarray(True), *run(carry, P)
    full = state.behind + 2 > P
    needed = jnp.any(state.active & ((wanted > 0) | full))
    widths = (*(w for w in _NARROW if w < P), P)
    narrowest = jnp.searchsorted(jnp.asarray(widths), jnp.max(count))
    for index, width in enumerate(widths):
        carry = run_if(needed & (narrowest == index), functools.partial(run, width=width), carry)
    return needed, *carry


def _no_q(cfg: ModelConfig, state: DecodeState, controls: Controls) -> Distribution | None:
    """Room for what drafts are drawn from, where the rule needs it."""
    if not RULES[controls.method.rule].needs_q:
        return None
    rows, K = state.last.drafts.shape
    return Distribution(jnp.zeros((rows, K, cfg.vocab_size), jnp.float32), jnp.zeros((rows, K), jnp.float32))


def _put(into: jax.Array, one: jax.Array, depth: jax.Array) -> jax.Array:
    """Writes [B, 1, ...] at `depth` of [B, K, ...]."""
    return lax.dynamic_update_slice_in_dim(into, one, depth, axis=1)
