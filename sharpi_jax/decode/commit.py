"""Commit: emit the certain token and the accepted drafts, and roll every state to the last of them.

What must not be got wrong: the caches end up bit for bit as if the emitted tokens had been decoded one at a time. The
attention caches roll back by length; a recurrent layer's state is taken from before the window through the emitted
tokens once more, by what each of them wrote.
"""

import jax
import jax.numpy as jnp

from sharpi_jax.decode.acceptance import Judgement
from sharpi_jax.decode.state import Controls, Counters, DecodeState, LastStep, finish_code
from sharpi_jax.decode.verify import Verified
from sharpi_jax.model.cache import DeltaState, DeltaWindow, KVCache, LayerState, TrunkCache
from sharpi_jax.model.config import ModelConfig
from sharpi_jax.model.delta import state_after


def commit(
    cfg: ModelConfig,
    state: DecodeState,
    drafts: jax.Array,
    proposed: jax.Array,
    passed: jax.Array,
    judgement: Judgement,
    verified: Verified,
    mtp: KVCache | None,
    controls: Controls,
) -> DecodeState:
    """The state after the step.

    Args:
      drafts: [B, K]. proposed, passed: [B], drafts proposed and drafts that the rule let through, from the first on;
        both 0 for a finished row.
      mtp: the MTP cache after drafting.
    """
    active = state.active
    accepted, next_token = _clamp_at_stop(drafts, passed, verified.target.argmax, controls)
    emitted = jnp.where(active, accepted + 1, 0)
    length, budget = state.length + emitted, state.budget - emitted
    next_token = jnp.where(active, next_token, state.next_token)
    return state.replace(  # type: ignore[attr-defined, no-any-return]
        tokens=_append(state, drafts, emitted),
        length=length,
        budget=budget,
        next_token=next_token,
        window_hidden=jnp.where(active[:, None, None], verified.hidden, state.window_hidden),
        accepted=jnp.where(active, accepted, state.accepted),
        finish=finish_code(next_token, length, budget, state.slots, controls),
        trunk=_roll_trunk(cfg, state.trunk, verified.trunk, emitted),
        mtp=mtp,
        counters=_count(state.counters, active, proposed, accepted, judgement.is_argmax),
        last=LastStep(
            position=state.length,
            token=state.next_token,
            proposed=proposed,
            passed=passed,
            accepted=accepted,
            drafts=drafts,
            probability=judgement.probability,
            is_argmax=judgement.is_argmax,
        ),
    )


def _clamp_at_stop(
    drafts: jax.Array, passed: jax.Array, choice: jax.Array, controls: Controls
) -> tuple[jax.Array, jax.Array]:
    """Drafts to emit [B], and the certain token [B] after them: the first accepted stop token ends the prefix.

    choice: [B, K+1], the target's argmax at each position of the window.
    """
    K = drafts.shape[1]
    offsets = jnp.arange(K, dtype=jnp.int32)[None, :]
    is_stop = jnp.any(drafts[:, :, None] == controls.stop_ids[None, None, :], axis=-1)
    first_stop = jnp.min(jnp.where(is_stop, offsets, K), axis=1, initial=K).astype(jnp.int32)
    accepted = jnp.minimum(passed, first_stop)
    own = jnp.take_along_axis(choice, accepted[:, None], axis=1)[:, 0]
    padded = jnp.concatenate([drafts, own[:, None]], axis=1)  # index K is never a stop
    stopper = jnp.take_along_axis(padded, accepted[:, None], axis=1)[:, 0]
    return accepted, jnp.where(first_stop < passed, stopper, own)


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
