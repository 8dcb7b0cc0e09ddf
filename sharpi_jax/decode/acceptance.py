"""What an acceptance rule is given and says, and the rules that draw no numbers.

A rule is a pure function (Evidence, RuleParams) -> Judgement; rules.py lists them all.

What must not be got wrong: probabilities are the *target's*, taken from raw float32 logits, max-shifted, which keeps a
tie at one half to an ulp; ties of the argmax go to the lowest index; a NaN rejects. Every rule here passes the token
that the target itself emits at a position (its choice: its argmax, or its draw in sampled runs), whatever else it
passes. So none can reject the argmax at temperature 0, and where its own condition never holds it is the lossless rule,
token for token. A token of probability 0 passes by no condition.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from sharpi_jax.decode.options import RuleOptions
from sharpi_jax.decode.sampling import Distribution
from sharpi_jax.decode.target import Target, segments
from sharpi_jax.model.norms import row_sum


@struct.dataclass
class RuleParams:
    """The rules' parameters, per row and traced: [B] float32, relaxed_top_k [B] int32. Each rule says what it reads."""

    p_min: jax.Array
    typical_epsilon: jax.Array
    typical_alpha: jax.Array
    relaxed_delta: jax.Array
    threshold_single: jax.Array
    threshold_acc: jax.Array
    relaxed_top_k: jax.Array


DEFAULTS = {"p_min": 1.0} | {f.name: f.default for f in dataclasses.fields(RuleOptions) if f.name != "accept_rule"}


def rule_params(rows: int, **values: object) -> RuleParams:
    """RuleParams of `rows` rows: values by name, a scalar or one a row, DEFAULTS for those not named."""
    filled = {
        name: jnp.broadcast_to(jnp.asarray(value, jnp.int32 if name == "relaxed_top_k" else jnp.float32), (rows,))
        for name, value in (DEFAULTS | values).items()
    }
    return RuleParams(**filled)


@struct.dataclass
class Evidence:
    """What a rule may look at: B rows, K drafts, W = K + 1 positions of the window, of which the j-th judges draft j.

    Attributes:
      target: at the W positions, after bias and penalties, before temperature and filters.
      choice: [B, W] int32, what the target itself emits at each position: its argmax, or in sampled runs its draw, with
        numbers keyed by (seed, absolute position).
      drafts: [B, K] int32. proposed: [B] int32, how many of them exist.
      p: the target's distribution at the W positions; None unless the rule needs it (Rule.needs_p).
      q: the distributions that the drafts were drawn from, at K positions; None unless Rule.needs_q.
      temperature: [B] float32. seed: [B] uint32. position: [B] int32, of the certain token that begins the window: it
        never repeats within a run.
      sampled: whether any temperature is above 0.
    """

    target: Target
    choice: jax.Array
    drafts: jax.Array
    proposed: jax.Array
    p: Distribution | None
    q: Distribution | None
    temperature: jax.Array
    seed: jax.Array
    position: jax.Array
    sampled: bool = struct.field(pytree_node=False)

    @property
    def own(self) -> jax.Array:
        """[B, K] bool: is a draft what the target itself emits there?"""
        return self.choice[:, : self.drafts.shape[1]] == self.drafts

    @property
    def probability(self) -> jax.Array:
        """[B, K]: the target's, of each draft: of p where a row is sampled and p is there, else of its logits."""
        greedy = self.target.probability(self.drafts)
        if not self.sampled or self.p is None:
            return greedy
        return jnp.where(self.temperature[:, None] > 0, self.p.probability(self.drafts), greedy)


@struct.dataclass
class Judgement:
    """What a rule says.

    Attributes:
      passed: [B] int32, how many drafts it lets through, from the first on.
      next_token: [B] int32, what follows if exactly `passed` drafts are emitted.
      probability: [B, K] float32, the target's of each draft; NaN where it was not worked out.
      is_argmax: [B, K] bool, is a draft the target's argmax?
    """

    passed: jax.Array
    next_token: jax.Array
    probability: jax.Array
    is_argmax: jax.Array


def accepted_prefix(accept: jax.Array, proposed: jax.Array) -> jax.Array:
    """Length [B] of the longest prefix of [B, K] in which every draft passes, within the `proposed` [B] first ones."""
    offsets = jnp.arange(accept.shape[1], dtype=jnp.int32)[None, :]
    passes = accept & (offsets < proposed[:, None])
    return jnp.sum(jnp.cumprod(passes.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)


def judgement(evidence: Evidence, passed: jax.Array, next_token: jax.Array | None = None) -> Judgement:
    """Of `passed` [B] drafts; what follows is the target's choice there unless `next_token` [B] is given."""
    if next_token is None:
        next_token = jnp.take_along_axis(evidence.choice, passed[:, None], axis=1)[:, 0]
    is_argmax = evidence.target.argmax[:, : evidence.drafts.shape[1]] == evidence.drafts
    return Judgement(passed, next_token, evidence.probability, is_argmax)


def greedy_p_min(evidence: Evidence, params: RuleParams) -> Judgement:
    """Passes the target's argmax, and any draft that the target gives at least p_min; greedy only.

    With p_min = 1, the default, it is exact greedy decoding. No two tokens can both exceed one half, so every p_min in
    (0.5, 1] decides alike, but for an exact tie. Below, it is lossy. Values <= 0 mean 1. A target whose `log_sum` was
    not asked for has NaN probabilities, and so passes the argmax alone. Source: this project.
    """
    p_min = jnp.where(params.p_min <= 0, 1.0, params.p_min)[:, None]
    accept = evidence.own | (evidence.probability >= p_min)
    return judgement(evidence, accepted_prefix(accept, evidence.proposed))


def sample_match(evidence: Evidence, params: RuleParams) -> Judgement:
    """Passes a draft while it equals what the target emits there, its draw or its argmax.

    Lossless: with the same seed the tokens are those of decoding without drafts, one by one, whatever the drafts.
    No parameters. Source: the rule of engines that sample from the target and compare, llama.cpp's for one.
    """
    return judgement(evidence, accepted_prefix(evidence.own, evidence.proposed))


def typical(evidence: Evidence, params: RuleParams) -> Judgement:
    """Passes a draft that is typical of the target: p(d) > min(epsilon, alpha * exp(-H(p))). Lossy.

    p is the target's distribution in sampled rows, the softmax of its logits in greedy ones, and H its entropy: where
    the target is unsure, less is asked of a draft. exp(-H) never exceeds the largest probability, so that with
    alpha < 1 the argmax always passes; with larger ones only the choice is sure to. Exact limit: epsilon >= 1 with
    alpha = inf (or at least V), where the condition never holds.

    Source: Medusa (Cai et al. 2024), typical acceptance; defaults in its code: epsilon 0.09, alpha 0.3.
    """
    limit = jnp.minimum(params.typical_epsilon[:, None], params.typical_alpha[:, None] * jnp.exp(-_entropy(evidence)))
    p = evidence.probability
    accept = evidence.own | ((p > limit) & (p > 0))
    return judgement(evidence, accepted_prefix(accept, evidence.proposed))


def relaxed(evidence: Evidence, params: RuleParams) -> Judgement:
    """Passes a draft among the target's top_k tokens whose log-probability is within delta of the best.

    Lossy; greedy only. The log-probabilities' difference is that of the logits, so no sum over the vocabulary is taken.
    Among equal logits the lower id ranks first. Exact limit: top_k = 1; delta = 0 passes exact ties of the maximum
    besides.

    Source: TensorRT-LLM's relaxed acceptance (use_relaxed_acceptance_for_thinking), there during a reasoning model's
    thinking only; defaults of its API: top_k 1, delta 0 (exact); its documents' example: 10 and 0.6, the defaults here.
    There delta is a difference of *probabilities* (a softmax, although its variable is called logprobs): a draft of
    probability 0.1 passes beside a best one of 0.7 at 0.6, where here the ratio 1/7 would need delta = 1.95.
    """
    target, K = evidence.target, evidence.drafts.shape[1]
    logits = target.logits[:, :K]
    own = jnp.take_along_axis(logits, evidence.drafts[..., None], axis=-1)
    ids = jnp.arange(logits.shape[-1], dtype=jnp.int32)[None, None, :]
    before = (logits > own) | ((logits == own) & (ids < evidence.drafts[..., None]))
    rank = jnp.sum(before, axis=-1, dtype=jnp.int32)
    behind = own[..., 0] - target.peak[:, :K]
    near = (behind >= -params.relaxed_delta[:, None]) & (behind > -jnp.inf)
    accept = evidence.own | ((rank < params.relaxed_top_k[:, None]) & near)
    return judgement(evidence, accepted_prefix(accept, evidence.proposed))


def _entropy(evidence: Evidence) -> jax.Array:
    """[B, K]: of p in sampled rows, of the softmax of the logits in greedy ones, where it is NaN if log_sum is."""
    target, (B, K) = evidence.target, evidence.drafts.shape
    logits, peak, log_total = target.logits[:, :K], target.peak[:, :K], target.log_sum[:, :K]

    def of_logits(logits: jax.Array, peak: jax.Array) -> jax.Array:
        shifted = logits - peak
        return jnp.where(shifted == -jnp.inf, 0.0, jnp.exp(shifted) * shifted)

    if not evidence.sampled:
        return log_total - sum_over_vocabulary(of_logits, logits, peak) / jnp.exp(log_total)
    assert evidence.p is not None
    weights, total = evidence.p.weights[:, :K], evidence.p.total[:, :K]
    drawn = jnp.broadcast_to(evidence.temperature[:, None] > 0, (B, K))

    def of_either(drawn: jax.Array, logits: jax.Array, peak: jax.Array, weights: jax.Array) -> jax.Array:
        terms: jax.Array = lax.cond(
            drawn,
            lambda: jnp.where(weights > 0, weights * jnp.log(weights), 0.0),
            lambda: of_logits(logits, peak),
        )
        return terms

    total = jnp.where(drawn, total, jnp.exp(log_total))
    mean = sum_over_vocabulary(of_either, drawn, logits, peak, weights) / total
    return jnp.where(drawn, jnp.log(total), log_total) - mean


def sum_over_vocabulary(function: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
    """Sums [B, n] of function(*rows) [V] over each row of the arrays, [B, n, V] or [B, n].

    One row at a time, as in target.py, so that a row's bits do not depend on how many there are.
    """
    B, n = arrays[0].shape[:2]
    rows = tuple(x.reshape(B * n, *x.shape[2:]) for x in arrays)
    sums = lax.map(lambda row: jnp.sum(segments(function(*row), fill=0.0), axis=-1), rows)
    return row_sum(sums).reshape(B, n)
