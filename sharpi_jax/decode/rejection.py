"""The acceptance rules that draw random numbers of their own: threshold, rejection and block.

What must not be got wrong: which numbers a decision sees. Besides the target's (TARGET, by absolute position) there are
three kinds, and all of them are keyed by (seed, the window's own position, the draft's place in it): ACCEPT, one for
each draft; RESIDUAL, one for the token at a rejection; DRAFT, with which the drafter drew each draft. Keys by absolute
position alone would give two windows that overlap the same numbers, after `block` has looked at all of the first
window's to decide where to stop; what it then emits would not follow the target. `window_keys` gives them.

Rows whose temperature is 0 may share a batch with sampled ones: there p is one-hot at the argmax, and `rejection` and
`block` are greedy decoding, whatever q is.
"""

import jax
import jax.numpy as jnp

from sharpi_jax.decode.acceptance import (
    Evidence,
    Judgement,
    RuleParams,
    accepted_prefix,
    judgement,
    sum_over_vocabulary,
)
from sharpi_jax.decode.sampling import ACCEPT, RESIDUAL, Distribution, draw, uniform, window_keys


def threshold(evidence: Evidence, params: RuleParams) -> Judgement:
    """Passes a draft when u <= p(d) / t_acc or p(d) >= t_single; else draws from p without the draft.

    In sampled rows p is the target's distribution, u uniform. Both thresholds 1, the default, is rejection sampling
    with all of q at the draft: lossless in distribution, however the draft was chosen. Below 1 either is lossy.
    In greedy rows nothing is drawn: a draft passes when it is the target's choice or the softmax of the logits gives it
    at least t_single, and the choice follows.

    Source: SGLang, speculative_accept_threshold_single and _acc, both 1.0 by default there, for a chain of drafts. Its
    greedy batches ignore both thresholds, as ours do at 1.
    """
    p, u = evidence.probability, _acceptance_numbers(evidence)
    single, acc = params.threshold_single[:, None], params.threshold_acc[:, None]
    greedy = (evidence.temperature <= 0)[:, None]
    likely = (p > 0) & ((p >= single) | (~greedy & (u * acc <= p)))
    passed = accepted_prefix((greedy & evidence.own) | likely, evidence.proposed)
    if not evidence.sampled:
        return judgement(evidence, passed)
    assert evidence.p is not None
    at, draft = _place_of_rejection(evidence, passed)
    weights = evidence.p.at(at).weights
    ids = jnp.arange(weights.shape[-1], dtype=jnp.int32)[None, None, :]
    others = jnp.where(ids == draft[:, None, None], 0.0, weights)
    chosen = judgement(evidence, passed)
    corrected = (passed < evidence.proposed) & ~greedy[:, 0]
    return chosen.replace(  # type: ignore[attr-defined, no-any-return]
        next_token=jnp.where(corrected, _draw_residual(evidence, others, weights), chosen.next_token)
    )


def rejection(evidence: Evidence, params: RuleParams) -> Judgement:
    """Passes a draft when u <= p(d) / q(d); else draws from the positive part of p - q, normalised.

    Lossless in distribution, with drafts drawn from q. When all drafts pass, the target's own draw follows. Sampled
    runs only. No parameters. Source: Leviathan et al. 2023, Chen et al. 2023 (speculative sampling).
    """
    p, q = _both(evidence)
    p_draft = p.probability(evidence.drafts)
    accept = (_acceptance_numbers(evidence) * q.probability(evidence.drafts) <= p_draft) & (p_draft > 0)
    passed = accepted_prefix(accept, evidence.proposed)
    return judgement(evidence, passed, _correction(evidence, passed, jnp.ones_like(p_draft[:, 0])))


def block(evidence: Evidence, params: RuleParams) -> Judgement:
    """Judges the drafts of a window together: never fewer of them in expectation than `rejection`, and as lossless.

    With p_0 = 1 and p_i = min(p_{i-1} p(d_i) / q(d_i), 1), the drafts up to tau pass, the largest i with u_i <= h_i:
      h_i = S_i / (S_i + 1 - p_i) with S_i = sum over x of max(p_i p(x) - q(x), 0), p and q after i drafts;
      h_k = p_k at the last of the k drafts.
    Then a token of max(p_tau p - q, 0), normalised, follows if tau < k, else the target's own draw. So a likely draft
    makes up for an unlikely one before it. Sampled runs only. No parameters.

    Source: block verification, Sun et al., ICLR 2025 (arXiv 2403.10444), which proves it the best of its kind.
    """
    p, q = _both(evidence)
    K = evidence.drafts.shape[1]
    p_drafts, q_drafts = p.probability(evidence.drafts), q.probability(evidence.drafts)
    ratio = jnp.where(p_drafts > 0, p_drafts / q_drafts, 0.0)
    joint = [jnp.ones_like(ratio[:, 0])]
    for i in range(K):
        joint.append(jnp.where(joint[-1] > 0, jnp.minimum(joint[-1] * ratio[:, i], 1.0), 0.0))
    reached = jnp.stack(joint, axis=1)  # p_0 to p_k, [B, K + 1]
    p_i = reached[:, 1:]
    accept_within = jnp.zeros_like(p_i)
    if K > 1:
        left = sum_over_vocabulary(
            lambda p, p_total, q, q_total, p_i: jnp.maximum(p_i * (p / p_total) - q / q_total, 0.0),
            *(p.weights[:, 1:K], p.total[:, 1:K], q.weights[:, 1:], q.total[:, 1:], p_i[:, :-1]),
        )
        within = p_i[:, :-1]
        accept_within = accept_within.at[:, :-1].set(
            jnp.where(within < 1, left / (left + 1 - within), 1.0), mode="drop"
        )
    places = jnp.arange(1, K + 1, dtype=jnp.int32)[None, :]
    last = places == evidence.proposed[:, None]
    accept = (_acceptance_numbers(evidence) <= jnp.where(last, p_i, accept_within)) & (p_i > 0)
    exists = places <= evidence.proposed[:, None]
    passed = jnp.max(jnp.where(accept & exists, places, 0), axis=1)
    p_tau = jnp.take_along_axis(reached, passed[:, None], axis=1)[:, 0]
    return judgement(evidence, passed, _correction(evidence, passed, p_tau))


def _both(evidence: Evidence) -> tuple[Distribution, Distribution]:
    assert evidence.p is not None
    assert evidence.q is not None
    return evidence.p, evidence.q


def _acceptance_numbers(evidence: Evidence) -> jax.Array:
    """[B, K] uniform numbers in (0, 1]."""
    return uniform(window_keys(evidence.seed, evidence.position, 0, evidence.drafts.shape[1], ACCEPT))


def _place_of_rejection(evidence: Evidence, passed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[B] each: index and id of the first draft that did not pass; of the last one where all did."""
    at = jnp.minimum(passed, evidence.drafts.shape[1] - 1)
    return at, jnp.take_along_axis(evidence.drafts, at[:, None], axis=1)[:, 0]


def _correction(evidence: Evidence, passed: jax.Array, scale: jax.Array) -> jax.Array:
    """[B]: drawn from max(scale p - q, 0) after `passed` drafts, or where all passed the target's own; scale: [B]."""
    p, q = _both(evidence)
    at, _ = _place_of_rejection(evidence, passed)
    p_there, q_there = p.at(at), q.at(at)
    target = p_there.weights / p_there.total[..., None]
    left = jnp.maximum(scale[:, None, None] * target - q_there.weights / q_there.total[..., None], 0.0)
    own = jnp.take_along_axis(evidence.choice, passed[:, None], axis=1)[:, 0]
    return jnp.where(passed < evidence.proposed, _draw_residual(evidence, left, target), own)


def _draw_residual(evidence: Evidence, left: jax.Array, target: jax.Array) -> jax.Array:
    """A draw [B] of the weights left [B, 1, V], or of the target's where rounding left none."""
    some = jnp.any(left > 0, axis=-1, keepdims=True)
    keys = window_keys(evidence.seed, evidence.position, 0, 1, RESIDUAL)
    return draw(jnp.where(some, left, target), keys)[:, 0]
