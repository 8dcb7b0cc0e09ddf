"""One step of the decode loop. Plain decoding is the same step at K = 0."""

from typing import Protocol

import jax
import jax.numpy as jnp

from sharpi_jax.decode.acceptance import accepted_prefix, greedy_p_min
from sharpi_jax.decode.commit import commit
from sharpi_jax.decode.state import Controls, DecodeState
from sharpi_jax.decode.verify import verify_step
from sharpi_jax.model.cache import KVCache
from sharpi_jax.model.config import ModelConfig
from sharpi_jax.model.params import ModelParams


class Drafter(Protocol):
    """A pytree that proposes K tokens per row and returns the MTP cache it may have advanced."""

    def __call__(
        self, params: ModelParams, cfg: ModelConfig, state: DecodeState, K: int
    ) -> tuple[jax.Array, KVCache | None]: ...


def decode_step(
    params: ModelParams, cfg: ModelConfig, state: DecodeState, controls: Controls, drafter: Drafter
) -> DecodeState:
    """Draft, verify, accept, commit: emits 1 to K+1 tokens of every unfinished row."""
    K = state.draft_length
    room = jnp.minimum(state.budget, state.slots - state.length) - 1
    proposed = jnp.where(state.active, jnp.clip(room, 0, K), 0)

    with jax.named_scope("draft"):
        drafts, mtp = _no_drafts(state) if K == 0 else drafter(params, cfg, state, K)
    with jax.named_scope("verify"):
        verified = verify_step(params, cfg, state, drafts, proposed, controls)
    with jax.named_scope("accept"):
        judgement = greedy_p_min(verified.target, drafts, controls.p_min)
        passed = accepted_prefix(judgement.accept, proposed)
    with jax.named_scope("commit"):
        return commit(cfg, state, drafts, proposed, passed, judgement, verified, mtp, controls)


def _no_drafts(state: DecodeState) -> tuple[jax.Array, KVCache | None]:
    return jnp.zeros((state.length.shape[0], 0), jnp.int32), state.mtp
