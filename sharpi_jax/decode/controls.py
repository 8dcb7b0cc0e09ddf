"""What steers a run: `Controls`, traced, and `Method`, the part of it that decides which program is compiled."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from sharpi_jax.decode.acceptance import DEFAULTS, RuleParams, rule_params
from sharpi_jax.decode.options import DecodeOptions
from sharpi_jax.decode.rule_table import RULES
from sharpi_jax.decode.sampling import Sampling

NO_TOKEN = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Method:
    """Static: another value is another program. The default is greedy decoding with K drafts at every step.

    Attributes:
      rule: a key of acceptance RULES. sampled: whether any row has a temperature above 0.
      penalty_window: recent tokens that are penalised, 0 for none.
      logprobs: top log-probabilities to keep for each token, None for not even its own.
      draft_stop: None where every draft is proposed; else of how many candidates a draft's probability is taken
        (llama.cpp: 10), 0 for the whole vocabulary.
      adaptive: whether rows choose the length of their drafts from what was accepted.
      mixed: whether rows have draft lengths of their own below K.
    """

    rule: str = "greedy_p_min"
    sampled: bool = False
    penalty_window: int = 0
    logprobs: int | None = None
    draft_stop: int | None = None
    adaptive: bool = False
    mixed: bool = False

    @property
    def variable(self) -> bool:
        """Whether a row may propose fewer than K drafts for other reasons than its budget and context."""
        return self.draft_stop is not None or self.adaptive or self.mixed


@struct.dataclass
class Thinking:
    """A budget for thinking: open_id, close_id: int32 scalars, the tokens around it; most: [B], tokens between them."""

    open_id: jax.Array
    close_id: jax.Array
    most: jax.Array


@struct.dataclass
class Controls:
    """What steers a run without recompiling it; `method` alone is static.

    Attributes:
      rule: parameters of the acceptance rules. sampling: of the target's distribution.
      penalty: [B], repeat_penalty. bias_ids, bias: [M], added to logits.
      stop_ids: [M] int32, tokens that end a row; unused places hold NO_TOKEN.
      min_tokens: [B] int32: before as many tokens are out, the target's logits of stop tokens are -inf.
      n_max, n_min: [B] int32, most drafts of a step, and fewest: of fewer, none is proposed.
      stop_p: [B], a draft of less probability to the drafter ends the chain before it.
      step_ms: [K+1], what a step with so many drafts takes; zeros unless method.adaptive.
      thinking: None where there is no budget for it.
      traced: bool scalar, whether probabilities of drafts are asked for where no rule needs them.
      scored: bool scalar; where method.logprobs asks for log-probabilities, False leaves them out (NaN) for speed.
    """

    rule: RuleParams
    sampling: Sampling
    penalty: jax.Array
    bias_ids: jax.Array
    bias: jax.Array
    stop_ids: jax.Array
    min_tokens: jax.Array
    n_max: jax.Array
    n_min: jax.Array
    stop_p: jax.Array
    step_ms: jax.Array
    thinking: Thinking | None
    traced: jax.Array
    scored: jax.Array
    method: Method = struct.field(pytree_node=False, default=Method())

    @property
    def p_min(self) -> jax.Array:
        """[B] float32, acceptance threshold of greedy_p_min; values <= 0 mean 1."""
        return self.rule.p_min

    @property
    def wants_probabilities(self) -> jax.Array:
        """Bool scalar: without them a step saves a pass of exp over its logits, and LastStep has NaN."""
        lossy = jnp.any((self.p_min > 0) & (self.p_min < 1))
        return self.traced | lossy | RULES[self.method.rule].needs_log_sum


def make_controls(
    p_min: Sequence[float],
    stop_ids: Sequence[int],
    *,
    ignore_eos: bool = False,
    traced: bool = True,
    scored: bool = True,
    n_max: Sequence[int] | None = None,
    options: DecodeOptions | None = None,
    step_ms: Sequence[float] = (),
    think_ids: tuple[int, int] | None = None,
    method: Method | None = None,
) -> Controls:
    """Controls for rows of the given p_min. With `ignore_eos` the stop ids cannot be chosen.

    Args:
      traced: may be false where nobody reads the last step's probabilities. scored: where nobody reads those of
        LogProbs.
      n_max: most drafts of each row's steps; None leaves it at K.
      options: all else, for all rows alike.
      step_ms: what steps cost, by their drafts: for adaptive draft lengths. think_ids: the tokens around thinking.
      method: what is compiled in, as `method_of` has it; None for what the options come to with drafts.
    """
    options = options or DecodeOptions()
    rows = len(p_min)

    def each(value: float, dtype: type = np.float32) -> jax.Array:
        return jnp.asarray(np.full(rows, value, dtype))

    method = method or method_of(options, mixed=n_max is not None)
    return Controls(
        rule=_rule_params(p_min, options),
        sampling=Sampling(
            temperature=each(options.temperature),
            top_k=each(options.top_k, np.int32),
            top_p=each(options.top_p),
            min_p=each(options.min_p),
            seed=each(options.seed, np.uint32),
        ),
        penalty=each(options.repeat_penalty),
        bias_ids=jnp.asarray(np.asarray([i for i, _ in options.logit_bias], np.int32)),
        bias=jnp.asarray(np.asarray([b for _, b in options.logit_bias], np.float32)),
        stop_ids=jnp.asarray(np.asarray(list(stop_ids) or [NO_TOKEN], np.int32)),
        min_tokens=each(2**31 - 1 if ignore_eos or options.ignore_eos else options.min_tokens, np.int32),
        n_max=each(2**31 - 1, np.int32) if n_max is None else jnp.asarray(np.asarray(n_max, np.int32)),
        n_min=each(options.spec_draft_n_min, np.int32),
        stop_p=each(options.spec_draft_stop_p),
        step_ms=jnp.asarray(np.asarray(step_ms or [0], np.float32)),
        thinking=_thinking(think_ids, options, rows),
        traced=jnp.asarray(traced),
        scored=jnp.asarray(scored),
        method=method,
    )


def method_of(options: DecodeOptions, *, drafting: bool = True, mixed: bool = False, slots: int = 0) -> Method:
    """What of the options is compiled in.

    Args:
      drafting: without it, what is about drafts is left out, so that runs share a program.
      mixed: whether rows have an n_max of their own. slots: S, where the whole context may be penalised.
    """
    window = 0 if options.repeat_penalty == 1 else options.repeat_last_n
    shared = Method(
        sampled=options.temperature > 0,
        penalty_window=slots if window == -1 else window,
        logprobs=options.logprobs,
        rule="sample_match" if options.temperature > 0 else "greedy_p_min",
    )
    if not drafting:
        return shared
    return dataclasses.replace(
        shared,
        rule=options.rule,
        draft_stop=options.spec_draft_stop_top_k if options.spec_draft_stop_p > 0 else None,
        adaptive=options.spec_draft_n_max == "auto",
        mixed=mixed or options.spec_draft_n_min > 0,
    )


def thresholds(p_min: Sequence[float]) -> jax.Array:
    """[B] float32, as RuleParams.p_min has them."""
    # A float32 program flushes smaller numbers to 0, which means "not set".
    smallest = float(np.finfo(np.float32).tiny)
    return jnp.asarray(np.asarray([max(p, smallest) if p > 0 else p for p in p_min], np.float32))


def _rule_params(p_min: Sequence[float], options: DecodeOptions) -> RuleParams:
    others = {name: getattr(options, name) for name in DEFAULTS if name != "p_min"}
    return rule_params(len(p_min), p_min=thresholds(p_min), **others)


def _thinking(think_ids: tuple[int, int] | None, options: DecodeOptions, rows: int) -> Thinking | None:
    if think_ids is None or options.max_thinking_tokens is None:
        return None
    opening, closing = think_ids
    most = np.full(rows, options.max_thinking_tokens, np.int32)
    return Thinking(jnp.int32(opening), jnp.int32(closing), jnp.asarray(most))
