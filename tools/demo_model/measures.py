"""What evaluate.py and the tests measure: bits per byte, the head's accuracy by depth, acceptance when decoding."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from sharpi_jax import DecodeOptions, Generation, Model
from sharpi_jax.decode.decoder import Decoder
from sharpi_jax.evaluate import WINDOWS_AT_ONCE, score_windows
from sharpi_jax.model.params import ModelParams
from sharpi_jax.quant import Tiled

WINDOW = 256
REPEAT = 12


def windows(stream: np.ndarray, width: int = WINDOW) -> np.ndarray:
    """The stream cut into windows [N, width + 1] that overlap by the one token which the next window starts from."""
    count = (len(stream) - 1) // width
    return np.stack([stream[i * width : (i + 1) * width + 1] for i in range(count)])


def bits_per_byte(model: Model, ids: Sequence[int], start: int = 1) -> tuple[float, int]:
    """(bits, bytes) of ids[start:] under the trunk, given what is before each."""
    nll = score_windows(model.decoder, np.asarray([ids], np.int32), drafting=False).nll[0, start - 1 :]
    return float(nll.sum(dtype=np.float64) / np.log(2)), sum(map(model.byte_size, ids[start:]))


def depth_hits(decoder: Decoder, texts: Sequence[np.ndarray], drafter: Decoder | None = None) -> np.ndarray:
    """[DEPTHS, positions] bool: whether the head's draft, on given text, is the trunk's choice.

    Args:
      texts: windows of ids, all of one length, of which the last token is not read.
      drafter: whose drafts they are, where its weights are changed (for controls); the choices are `decoder`'s.
    """
    found = []
    for begin in range(0, len(texts), WINDOWS_AT_ONCE):
        batch = np.asarray(texts[begin : begin + WINDOWS_AT_ONCE], np.int32)[:, :-1]
        scores = score_windows(decoder, batch, rows=WINDOWS_AT_ONCE, drafting=drafter is None)
        if drafter is not None:
            drafts = score_windows(drafter, batch, rows=WINDOWS_AT_ONCE).drafts
            scores = dataclasses.replace(scores, drafts=drafts)
        found.append(scores.draft_hits())
    return np.concatenate(found, axis=1)


def with_params(decoder: Decoder, params: ModelParams) -> Decoder:
    """A decoder on changed weights of the same shapes, which shares the compiled programs."""
    return Decoder(params, decoder.cfg, decoder.programs)


def without_final_norm(params: ModelParams) -> ModelParams:
    """A trunk whose hidden is, for the MTP block, the one before the final norm.

    The block norms what it is given (hnorm), and rms(rms(x) * 1) = rms(x): a unit weight is as good as no norm.
    """
    return params.replace(final_norm=jnp.ones_like(params.final_norm))


def swapped_halves(params: ModelParams) -> ModelParams:
    """The head with the halves of its input exchanged: hidden where the embedding belongs. For any block format."""
    assert params.mtp is not None
    inputs = -2 if isinstance(params.mtp.proj, Tiled) else -1
    swapped = jax.tree.map(lambda a: jnp.roll(a, a.shape[inputs] // 2, axis=inputs), params.mtp.proj)
    return params.replace(mtp=params.mtp.replace(proj=swapped))


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
