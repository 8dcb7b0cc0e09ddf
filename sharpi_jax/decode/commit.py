"""Commit: emit the certain token and the accepted drafts, and roll every state to the last of them.

What must not be got wrong: the caches end up bit for bit as if the emitted tokens had been decoded one at a time. The
attention caches roll back by length; a recurrent layer's state is taken from before the window through the emitted
tokens once more, by what each of them wrote.
"""

import jax
import jax.numpy as jnp

from sharpi_jax.decode.acceptance import Judgement
from sharpi_jax.decode.adaptive import observe
from sharpi_jax.decode.controls import Controls
from sharpi_jax.decode.draft import Proposal
from sharpi_jax.decode.logprobs import LogProbs, write_logprobs
from sharpi_jax.decode.state import Counters, DecodeState, LastStep, finish_code
from sharpi_jax.decode.verify import Verified
from sharpi_jax.model.cache import DeltaState, DeltaWindow, LayerState, TrunkCache
from sharpi_jax.model.config import ModelConfig
from sharpi_jax.model.delta import state_after


def commit(
    cfg: ModelConfig,
    state: DecodeState,
    wanted: jax.Array,
    proposal: Proposal,
    proposed: jax.Array,
    judgement: Judgement,
    verified: Verified,
    controls: Controls,
) -> DecodeState:
    """The state after the step.

    Args:
      wanted: [B], drafts that were asked for.
      proposed: [B], drafts that were verified, of which the rule let `judgement.passed` through; both 0 for a finished
        row.
    """
    active, drafts = state.active, proposal.drafts
    accepted, next_token = _clamp_at_stop(drafts, judgement.passed, judgement.next_token, controls)
    emitted = jnp.where(active, accepted + 1, 0)
    length, budget = state.length + emitted, state.budget - emitted
    next_token = jnp.where(active, next_token, state.next_token)
    window_hidden, behind = _pend(state, proposal.caught_up, verified.hidden, accepted)
    acceptance = state.acceptance
    return state.replace(  # type: ignore[attr-defined, no-any-return]
        tokens=_append(state, drafts, emitted),
        length=length,
        budget=budget,
        next_token=next_token,
        window_hidden=jnp.where(active[:, None, None], window_hidden, state.window_hidden),
        behind=jnp.where(active, behind, state.behind),
        finish=finish_code(next_token, length, budget, state.slots, controls),
        trunk=_roll_trunk(cfg, state.trunk, verified.trunk, emitted),
        mtp=proposal.mtp,
        counters=_count(state.counters, active, proposed, accepted, judgement.is_argmax),
        last=LastStep(
            position=state.length,
            token=state.next_token,
            proposed=proposed,
            passed=judgement.passed,
            accepted=accepted,
            drafts=drafts,
            probability=judgement.probability,
            is_argmax=judgement.is_argmax,
            choices=verified.choices.choice,
        ),
        acceptance=None if acceptance is None else observe(acceptance, wanted, judgement.passed, active),
        logprobs=_keep_logprobs(state, verified, drafts, accepted, next_token),
    )


def _clamp_at_stop(
    drafts: jax.Array, passed: jax.Array, own: jax.Array, controls: Controls
) -> tuple[jax.Array, jax.Array]:
    """Drafts to emit [B], and the certain token [B] after them: the first accepted stop token ends the prefix.

    own: [B], the token after the drafts that passed.
    """
    K = drafts.shape[1]
    offsets = jnp.arange(K, dtype=jnp.int32)[None, :]
    is_stop = jnp.any(drafts[:, :, None] == controls.stop_ids[None, None, :], axis=-1)
    first_stop = jnp.min(jnp.where(is_stop, offsets, K), axis=1, initial=K).astype(jnp.int32)
    accepted = jnp.minimum(passed, first_stop)
    padded = jnp.concatenate([drafts, own[:, None]], axis=1)  # index K is never a stop
    stopper = jnp.take_along_axis(padded, accepted[:, None], axis=1)[:, 0]
    return accepted, jnp.where(first_stop < passed, stopper, own)


def _pend(
    state: DecodeState, caught_up: jax.Array, hidden: jax.Array, accepted: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """window_hidden and behind after a window of `hidden` [B, K+1, D], of which accepted + 1 positions were emitted.

    Where the MTP block did not run there were no drafts: the one position joins those that wait.
    """
    extra = state.window_hidden.shape[1] - hidden.shape[1]
    fresh = jnp.pad(hidden, ((0, 0), (0, extra), (0, 0)))
    if extra == 0:
        return fresh, accepted
    place = jnp.arange(fresh.shape[1], dtype=jnp.int32)[None, :] == state.behind[:, None] + 1
    joined = jnp.where(place[..., None], hidden[:, :1], state.window_hidden)
    return jnp.where(caught_up, fresh, joined), jnp.where(caught_up, accepted, state.behind + 1)


def _keep_logprobs(
    state: DecodeState, verified: Verified, drafts: jax.Array, accepted: jax.Array, next_token: jax.Array
) -> LogProbs | None:
    """With those of the accepted drafts, and of the token that is certain after them."""
    if state.logprobs is None:
        return None
    assert verified.choices.raw is not None
    offsets = jnp.arange(drafts.shape[1] + 1, dtype=jnp.int32)[None, :]
    tokens = jnp.pad(drafts, ((0, 0), (0, 1)))
    tokens = jnp.where(offsets == accepted[:, None], next_token[:, None], tokens)
    known = state.active[:, None] & (offsets <= accepted[:, None])
    positions = jnp.where(known, state.length[:, None] + 1 + offsets, state.slots)
    return write_logprobs(state.logprobs, verified.choices.raw, tokens, positions)


def _append(state: DecodeState, drafts: jax.Array, emitted: jax.Array) -> jax.Array:
    """The tokens [B, S] with [next_token, drafts] written at `length`, as many as were emitted."""
    window = jnp.concatenate([state.next_token[:, None], drafts], axis=1)
    offsets = jnp.arange(window.shape[1], dtype=jnp.int32)[None, :]
    slots = jnp.where(offsets < emitted[:, None], state.length[:, None] + offsets, state.slots)
    rows = jnp.arange(window.shape[0])[:, None]
    return state.tokens.at[rows, slots].set(window, mode="drop")


def _roll_trunk(cfg: ModelConfig, before: TrunkCache, after: TrunkCache, emitted: jax.Array) -> TrunkCache:
    """Each layer's state after `emitted` [B] tokens of the window; rows that emitted none keep what they had."""

    def roll(old: LayerState, new: LayerState) -> LayerState:
        if not isinstance(new, DeltaWindow):
            return new
        assert isinstance(old, DeltaState)
        return state_after(old, new, emitted, cfg.conv_taps)

    return TrunkCache(tuple(map(roll, before.layers, after.layers)), before.rope)


def _count(
    counters: Counters, active: jax.Array, proposed: jax.Array, accepted: jax.Array, is_argmax: jax.Array
) -> Counters:
    offsets = jnp.arange(is_argmax.shape[1], dtype=jnp.int32)[None, :]
    was_proposed = offsets < proposed[:, None]
    was_emitted = offsets < accepted[:, None]
    return Counters(
        steps=counters.steps + active.astype(jnp.int32),
        accepted_argmax=counters.accepted_argmax + jnp.sum(was_emitted & is_argmax, axis=1, dtype=jnp.int32),
        drafted_per_position=counters.drafted_per_position + was_proposed.astype(jnp.int32),
        accepted_per_position=counters.accepted_per_position + was_emitted.astype(jnp.int32),
    )
