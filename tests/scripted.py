"""Drafters that follow a script, so that every accepted count can be forced. Not part of the package."""

import jax
import jax.numpy as jnp
from flax import struct

from sharpi_jax.decode.draft import Proposal, draft_step


@struct.dataclass
class ScriptedDrafter:
    """Proposes the known continuation, right up to a scripted number of drafts and wrong from there on.

    Attributes:
      truth: [B, S] int32, the token at each position of plain decoding.
      right: [B, S] int32, how many drafts are right in the step whose certain token stands at a position.
      wrong: [B, S] int32, what is proposed at a position instead of the truth.
    """

    truth: jax.Array
    right: jax.Array
    wrong: jax.Array

    def __call__(self, params, cfg, state, controls, wanted):
        K = state.draft_length
        offsets = jnp.arange(K, dtype=jnp.int32)[None, :]
        slots = jnp.minimum(state.length[:, None] + 1 + offsets, state.slots - 1)
        right = jnp.take_along_axis(self.right, jnp.minimum(state.length, state.slots - 1)[:, None], axis=1)
        true = jnp.take_along_axis(self.truth, slots, axis=1)
        wrong = jnp.take_along_axis(self.wrong, slots, axis=1)
        return Proposal(jnp.where(offsets < right, true, wrong), wanted, None, state.mtp, jnp.asarray(True))


@struct.dataclass
class ShiftedDrafter:
    """A control: the MTP head's drafts, each proposed one position too early, the first last."""

    def __call__(self, params, cfg, state, controls, wanted):
        proposal = draft_step(params, cfg, state, controls, wanted)
        return proposal.replace(drafts=jnp.roll(proposal.drafts, -1, axis=1))
