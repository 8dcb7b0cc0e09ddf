"""One step of the decode loop. Plain decoding is the same step at K = 0."""

from typing import Protocol

import jax
import jax.numpy as jnp

from sharpi_jax.decode.acceptance import Evidence
from sharpi_jax.decode.adaptive import choose_draft_length
from sharpi_jax.decode.commit import commit
from sharpi_jax.decode.controls import Controls
from sharpi_jax.decode.draft import Proposal, no_drafts
from sharpi_jax.decode.rules import judge
from sharpi_jax.decode.state import DecodeState
from sharpi_jax.decode.verify import Verified, verify_step
from sharpi_jax.model.config import ModelConfig
from sharpi_jax.model.params import ModelParams


class Drafter(Protocol):
    """A pytree that proposes up to `wanted` [B] tokens per row."""

    def __call__(
        self, params: ModelParams, cfg: ModelConfig, state: DecodeState, controls: Controls, wanted: jax.Array
    ) -> Proposal: ...


def decode_step(
    params: ModelParams, cfg: ModelConfig, state: DecodeState, controls: Controls, drafter: Drafter
) -> DecodeState:
    """Draft, verify, accept, commit: emits 1 to K+1 tokens of every unfinished row."""
    with jax.named_scope("draft"):
        wanted = _wanted(state, controls)
        proposal = drafter(params, cfg, state, controls, wanted) if state.draft_length else no_drafts(state)
        proposed = _proposed(state, controls, proposal)
    with jax.named_scope("verify"):
        verified = verify_step(params, cfg, state, proposal.drafts, proposed, controls)
    with jax.named_scope("accept"):
        evidence = _evidence(state, controls, proposal, proposed, verified)
        judgement = judge(controls.method.rule, evidence, controls.rule)
    with jax.named_scope("commit"):
        return commit(cfg, state, wanted, proposal, proposed, judgement, verified, controls)


def _wanted(state: DecodeState, controls: Controls) -> jax.Array:
    """[B], drafts that a step of an unfinished row is to have, be there room for them or not."""
    most = jnp.clip(controls.n_max, 0, state.draft_length)
    if state.acceptance is not None:
        most = choose_draft_length(state.acceptance, controls.step_ms, most)
    return jnp.where(state.active, most, 0)


def _proposed(state: DecodeState, controls: Controls, proposal: Proposal) -> jax.Array:
    """[B], drafts to verify: as many as budget and context have room for, of a proposal that is long enough.

    In llama.cpp's order: whether it is long enough does not depend on the room.
    """
    room = jnp.minimum(state.budget, state.slots - state.length) - 1
    enough = state.active & (proposal.count >= controls.n_min)
    return jnp.where(enough, jnp.clip(room, 0, proposal.count), 0)


def _evidence(
    state: DecodeState, controls: Controls, proposal: Proposal, proposed: jax.Array, verified: Verified
) -> Evidence:
    return Evidence(
        target=verified.choices.target,
        choice=verified.choices.choice,
        drafts=proposal.drafts,
        proposed=proposed,
        p=verified.choices.p,
        q=proposal.q,
        sampled=controls.method.sampled,
        temperature=controls.sampling.temperature,
        seed=controls.sampling.seed,
        position=state.length,
    )
