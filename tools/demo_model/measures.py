"""What evaluate.py and the tests measure: bits per byte, the head's accuracy by depth, acceptance when decoding."""

import dataclasses
import functools
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from sharpi_jax import DecodeOptions, Generation, Model
from sharpi_jax.model.cache import KVCache, init_kv_cache, init_trunk_cache
from sharpi_jax.model.config import ModelConfig
from sharpi_jax.model.mtp import mtp_block
from sharpi_jax.model.params import ModelParams
from sharpi_jax.model.rope import rope_table
from sharpi_jax.model.trunk import head, trunk
from sharpi_jax.model.window import window_at
from tools.demo_model.loss import DEPTHS

WINDOW = 256
REPEAT = 12


def windows(stream: np.ndarray, width: int = WINDOW) -> np.ndarray:
    """The stream cut into windows [N, width + 1] that overlap by the one token which the next window starts from."""
    count = (len(stream) - 1) // width
    return np.stack([stream[i * width : (i + 1) * width + 1] for i in range(count)])


def bits_per_byte(model: Model, ids: Sequence[int], start: int = 1) -> tuple[float, int]:
    """(bits, bytes) of ids[start:] under the trunk, given what is before each."""
    logits = model.score(ids[:-1]).logits.astype(np.float64)
    logits -= logits.max(axis=-1, keepdims=True)
    log_p = logits[np.arange(len(ids) - 1), ids[1:]] - np.log(np.exp(logits).sum(axis=-1))
    text = (token for token in ids[start:] if not model.tokenizer.is_special(token))
    size = sum(len(model.tokenizer.token_bytes(token)) for token in text)
    return float(-log_p[start - 1 :].sum() / np.log(2)), size


@dataclasses.dataclass(frozen=True)
class DepthAgreement:
    """Whether the head's draft of depth j + 1 for a position is the trunk's argmax there: [DEPTHS, positions] bool."""

    hits: np.ndarray

    def rate(self, depth: int) -> float:
        return float(self.hits[depth - 1].mean())

    def standard_error(self, depth: int) -> float:
        """Of `rate`, positions taken as independent."""
        rate = self.rate(depth)
        return float(np.sqrt(rate * (1 - rate) / self.hits.shape[1]))


def depth_agreement(
    params: ModelParams, cfg: ModelConfig, texts: Iterable[np.ndarray], hidden_params: ModelParams | None = None
) -> DepthAgreement:
    """The head's accuracy by depth on given text (teacher-forced), chained exactly as decoding chains it.

    Args:
      texts: windows of ids, all of one length.
      hidden_params: where the head's hiddens come from another trunk than the targets (for controls).
    """
    found = [
        np.asarray(_agreement(params, hidden_params or params, jnp.asarray(text[None, :-1]), cfg=cfg)) for text in texts
    ]
    return DepthAgreement(np.concatenate(found, axis=1))


def without_final_norm(params: ModelParams) -> ModelParams:
    """A trunk whose hidden is, for the MTP block, the one before the final norm.

    The block norms what it is given (hnorm), and rms(rms(x) * 1) = rms(x): a unit weight is as good as no norm.
    """
    return params.replace(final_norm=jnp.ones_like(params.final_norm))


def swapped_halves(params: ModelParams) -> ModelParams:
    """The head with the halves of its input exchanged: hidden where the embedding belongs. For any block format."""
    assert params.mtp is not None
    first, second = jnp.split(params.mtp.proj.blocks, 2, axis=-1)
    swapped = params.mtp.proj.replace(blocks=jnp.concatenate([second, first], axis=-1))
    return params.replace(mtp=params.mtp.replace(proj=swapped))


@functools.partial(jax.jit, static_argnames="cfg")
def _agreement(params: ModelParams, source: ModelParams, tokens: jax.Array, *, cfg: ModelConfig) -> jax.Array:
    """[DEPTHS, T - DEPTHS + 1] bool for tokens [1, T]: whether each depth's draft for a position is the trunk's choice.

    Entries of a depth > 1 each see a cache of their own: the trunk's hiddens up to where their chain began, and the
    chain's own entries after it. So each position becomes a row of a batch, with a window of one.
    """
    assert params.mtp is not None
    T = tokens.shape[1]
    rope = rope_table(T, cfg.rope_dims, cfg.rope_base)
    window = window_at(jnp.zeros(1, jnp.int32), jnp.full(1, T, jnp.int32), T, row_exact=False)
    hidden, _ = trunk(params, cfg, tokens, init_trunk_cache(cfg, 1, rope), window)
    choice = jnp.argmax(head(params.head, cfg, hidden), axis=-1)[0]
    if source is not params:
        hidden, _ = trunk(source, cfg, tokens, init_trunk_cache(cfg, 1, rope), window)
    shifted = jnp.pad(hidden[:, :-1], ((0, 0), (1, 0), (0, 0)))
    own, cache = mtp_block(params.mtp, cfg, tokens, shifted, init_kv_cache(cfg, 1, T), window, rope)
    caches = KVCache(*(jnp.broadcast_to(a, (T, *a.shape[1:])) for a in (cache.k, cache.v)))
    row, hits, starts = own[0][:, None], [], jnp.arange(T, dtype=jnp.int32)
    for depth in range(1, DEPTHS + 1):
        predicted = jnp.argmax(head(params.mtp.head, cfg, row), axis=-1)[:, 0]
        # Row p's draft of this depth sits at position p + depth - 1. All depths are compared on the same positions.
        at = starts + depth - 1
        hit = predicted == jnp.take(choice, at, mode="clip")
        hits.append(hit[DEPTHS - depth : T - depth + 1])
        next_tokens = jnp.take(tokens[0], at + 1, mode="clip")[:, None]
        one = window_at(at + 1, jnp.ones(T, jnp.int32), 1, row_exact=False)
        row, caches = mtp_block(params.mtp, cfg, next_tokens, row, caches, one, rope)
    return jnp.stack(hits)


@dataclasses.dataclass(frozen=True)
class Counts:
    """Up to where each output first repeats itself; by_argmax: the accepted that the trunk would choose."""

    steps: int
    drafted: int
    accepted: int
    by_argmax: int
    loops: int

    @property
    def acceptance_rate(self) -> float:
        return self.accepted / self.drafted

    @property
    def mean_accepted_length(self) -> float:
        return 1 + self.accepted / self.steps


def counts_before_loops(generations: Sequence[Generation]) -> Counts:
    """Of traced runs: the steps before each first repeated 12-gram, and how many outputs have one."""
    return Counts(*np.sum([dataclasses.astuple(_counts_before_loop(g)) for g in generations], axis=0).tolist())


def _counts_before_loop(generation: Generation) -> Counts:
    ids = generation.output_ids
    cut = first_repeat(ids)
    end = len(generation.prompt_ids) + (len(ids) if cut is None else cut)
    steps = [step for step in generation.steps if step.position + step.accepted < end]
    return Counts(
        steps=len(steps),
        drafted=sum(len(step.drafts) for step in steps),
        accepted=sum(step.accepted for step in steps),
        by_argmax=sum(sum(step.argmax[: step.accepted]) for step in steps),
        loops=int(cut is not None),
    )


def first_repeat(ids: Sequence[int]) -> int | None:
    """The number of tokens at which some 12-gram has been written for the second time, None if none is."""
    seen = set()
    for end in range(REPEAT, len(ids) + 1):
        gram = tuple(ids[end - REPEAT : end])
        if gram in seen:
            return end
        seen.add(gram)
    return None


def decode(model: Model, prompts: Sequence[Sequence[int]], K: int, p_min: float, max_tokens: int) -> list[Generation]:
    """Traced greedy runs of each prompt; K = 0 decodes without drafts. An end token is masked, so that all are long."""
    options = DecodeOptions(
        max_tokens=max_tokens,
        spec_type="mtp" if K else "none",
        spec_draft_n_max=max(K, 1),
        spec_draft_p_min=p_min,
        ignore_eos=True,
    )
    return [model.generate(prompt, options, trace=True) for prompt in prompts]
