"""How fast a model decodes on this machine, by draft length, and what the parts of a step cost.

All sides are run in turn, round after round, so that a machine that slows down slows all of them; figures are medians.
Compilation is apart. The parts are measured on the loop as it is: with drafts that cost nothing a step at K takes what
verifying K + 1 positions takes, and what it takes longer with the model's own drafts is the cost of drafting.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from sharpi_jax.decode.controls import Controls, make_controls
from sharpi_jax.decode.decoder import Decoder
from sharpi_jax.decode.draft import MtpDrafter, Proposal, no_drafts
from sharpi_jax.decode.generate import row_statistics
from sharpi_jax.decode.shortlist import Shortlist, shortlist_ids
from sharpi_jax.decode.state import DecodeState
from sharpi_jax.decode.stats import Statistics
from sharpi_jax.decode.step import Drafter
from sharpi_jax.errors import OptionError
from sharpi_jax.evaluate.bandwidth import Bandwidth
from sharpi_jax.model.config import ModelConfig
from sharpi_jax.model.params import ExpertsParams, LayerParams, ModelParams


@dataclasses.dataclass(frozen=True)
class Costs:
    """What the parts of a step take, in milliseconds.

    Attributes:
      verify_ms: entry K: a pass over a window of K + 1 positions, with all else that a step does but drafting.
      draft_ms: entry K: proposing K drafts; a difference of two timings, 0 where it drowns in their noise.
    """

    verify_ms: tuple[float, ...]
    draft_ms: tuple[float, ...]

    def step_ms(self, K: int) -> float:
        """A whole step with K drafts."""
        return self.verify_ms[K] + self.draft_ms[K]


@dataclasses.dataclass(frozen=True)
class DepthSpeed:
    """Decoding with K drafts a step.

    Attributes:
      tokens_per_s, step_ms: medians. stats: of one run; all are alike.
      same_ids: whether the tokens are those of K = 0.
      step_bytes: of weights that a step reads; caches come on top.
    """

    K: int
    tokens_per_s: float
    step_ms: float
    stats: Statistics
    same_ids: bool
    step_bytes: int

    @property
    def gb_per_s(self) -> float:
        """At which the weights were read."""
        return self.step_bytes / self.step_ms / 1e6


@dataclasses.dataclass(frozen=True)
class Speed:
    """The measurement.

    Attributes:
      prompt_tokens, max_tokens: of each run. slots: of its context. rounds: behind each median.
      prefill_tokens_per_s: of the prompt, without drafting.
      depths: K = 0 and up; K = 0 alone where the model has no head.
      bandwidth_gb_per_s: at which the machine reads memory: the best of the same rounds, since it is a limit.
      compile_s: spent compiling, which nothing else includes.
    """

    prompt_tokens: int
    max_tokens: int
    slots: int
    rounds: int
    prefill_tokens_per_s: float
    depths: tuple[DepthSpeed, ...]
    costs: Costs
    bandwidth_gb_per_s: float
    compile_s: float

    @property
    def best(self) -> DepthSpeed:
        """The fastest draft length."""
        return max(self.depths, key=lambda d: d.tokens_per_s)

    def bandwidth_share(self, K: int) -> float:
        """Of the machine's read bandwidth, what reading the weights used."""
        return self.depths[K].gb_per_s / self.bandwidth_gb_per_s

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the fields, and what is computed from them."""
        found = dataclasses.asdict(self)
        for entry, depth in zip(found["depths"], self.depths, strict=True):
            entry |= {"stats": depth.stats.as_dict(), "gb_per_s": depth.gb_per_s}
            entry["bandwidth_share"] = self.bandwidth_share(depth.K)
        return found | {"best_K": self.best.K}


@struct.dataclass
class IdleDrafter:
    """Proposes token 0 and does nothing else: a step with it costs what verifying costs."""

    def __call__(
        self, params: ModelParams, cfg: ModelConfig, state: DecodeState, controls: Controls, wanted: jax.Array
    ) -> Proposal:
        return no_drafts(state).replace(count=wanted, caught_up=jnp.asarray(True))  # type: ignore[attr-defined, no-any-return]


def measure_speed(
    decoder: Decoder,
    prompt: Sequence[int],
    stop_ids: Sequence[int],
    *,
    max_tokens: int,
    depth: int,
    rounds: int,
    threads: int,
    ctx_size: int | None = None,
    common: np.ndarray | None = None,
    on_round: Callable[[int, int], None] | None = None,
) -> Speed:
    """Measures K = 0 to `depth`; stop tokens do not stop.

    Args:
      common: the tokens among which it drafts, beside those of the prompt; None for all.
      threads: that read memory at once when its bandwidth is measured.
      on_round: called before the first round and after each, with rounds done and rounds in all (one more than are
        counted, which compiles).

    Raises:
      OptionError: the prompt is empty, does not fit, or holds an id outside the vocabulary.
    """
    slots = decoder.slots(len(prompt), max_tokens, ctx_size)
    decoder.rows_of([prompt], slots)  # refuses what is wrong with the prompt
    max_tokens = min(max_tokens, slots - len(prompt))
    if max_tokens < 1:
        raise OptionError(f"the prompt fills its context of {slots} tokens; shorten it or raise ctx_size.")
    shortlist = None if common is None else shortlist_ids(common, [prompt], decoder.cfg.vocab_size)
    drafter = decoder.drafter(shortlist) if decoder.cfg.has_mtp and depth else MtpDrafter()
    bench = _Bench(decoder, tuple(prompt), max_tokens, slots, make_controls([1.0], stop_ids, ignore_eos=True))
    show = on_round or (lambda done, total: None)
    depths = range(depth + 1 if decoder.cfg.has_mtp else 1)
    bandwidth = Bandwidth(threads)
    compiled = decoder.programs.compile_s
    kept: list[tuple[float, float, list[_Run], list[float]]] = []
    for done in range(rounds + 1):
        show(done, rounds + 1)
        prefill_s = bench.prefill_s()
        runs = [bench.run(K, drafter) for K in depths]
        idle_ms = [bench.run(K, IdleDrafter()).step_ms if K else runs[0].step_ms for K in depths]
        kept.append((bandwidth.measure(), prefill_s, runs, idle_ms))
    show(rounds + 1, rounds + 1)
    best_read = max(entry[0] for entry in kept)
    kept = kept[1:]
    verify_ms = tuple(statistics.median(entry[3][K] for entry in kept) for K in depths)
    draft_ms = tuple(statistics.median(entry[2][K].step_ms - entry[3][K] for entry in kept) for K in depths)
    return Speed(
        prompt_tokens=len(prompt),
        max_tokens=max_tokens,
        slots=slots,
        rounds=rounds,
        prefill_tokens_per_s=len(prompt) / statistics.median(entry[1] for entry in kept),
        depths=tuple(_summary(decoder, drafter, [entry[2][K] for entry in kept], kept[0][2][0].ids) for K in depths),
        costs=Costs(verify_ms, tuple(max(ms, 0.0) for ms in draft_ms)),
        bandwidth_gb_per_s=best_read,
        compile_s=decoder.programs.compile_s - compiled,
    )


@dataclasses.dataclass(frozen=True)
class _Run:
    """One run of the loop to the end of its budget."""

    K: int
    seconds: float
    stats: Statistics
    ids: tuple[int, ...]

    @property
    def step_ms(self) -> float:
        return 1e3 * self.seconds / self.stats.steps


class _Bench:
    """Runs of one prompt: read once for each K, and decoded from a copy of what that left."""

    def __init__(
        self, decoder: Decoder, prompt: tuple[int, ...], max_tokens: int, slots: int, controls: Controls
    ) -> None:
        self._decoder, self._prompt, self._controls = decoder, prompt, controls
        self._max_tokens, self._slots = max_tokens, slots
        self._states: dict[int, DecodeState] = {}

    def prefill_s(self) -> float:
        return self._timed(lambda: self._prefill(0))[0]

    def run(self, K: int, drafter: Drafter) -> _Run:
        if K not in self._states:
            self._states[K] = self._prefill(K)
        state = copied(self._states[K])
        seconds, state = self._timed(lambda: self._decoder.advance(state, self._controls, self._max_tokens, drafter))
        begin = len(self._prompt)
        ids = tuple(map(int, jax.device_get(state.tokens)[0, begin : int(state.length[0])]))
        return _Run(K, seconds, row_statistics(state, 0), ids)

    def _prefill(self, K: int) -> DecodeState:
        return self._decoder.prefill([self._prompt], [self._max_tokens], self._slots, self._controls, K=K)

    def _timed(self, call: Callable[[], DecodeState]) -> tuple[float, DecodeState]:
        return timed(self._decoder, call)


def timed(decoder: Decoder, call: Callable[[], DecodeState]) -> tuple[float, DecodeState]:
    """Seconds without compilation, and the state."""
    compiled, began = decoder.programs.compile_s, time.perf_counter()
    state = jax.block_until_ready(call())
    return time.perf_counter() - began - (decoder.programs.compile_s - compiled), state


def copied(state: DecodeState) -> DecodeState:
    """For the loop, which takes a state's buffers over."""
    found: DecodeState = jax.block_until_ready(jax.tree.map(jnp.copy, state))
    return found


def _summary(decoder: Decoder, drafter: MtpDrafter, runs: Sequence[_Run], plain: tuple[int, ...]) -> DepthSpeed:
    first = runs[0]
    return DepthSpeed(
        K=first.K,
        tokens_per_s=statistics.median(len(run.ids) / run.seconds for run in runs),
        step_ms=statistics.median(run.step_ms for run in runs),
        stats=first.stats,
        same_ids=all(run.ids == plain for run in runs),
        step_bytes=step_bytes(decoder.params, decoder.cfg, first.K, drafter.shortlist),
    )


def step_bytes(params: ModelParams, cfg: ModelConfig, K: int, shortlist: Shortlist | None = None) -> int:
    """Bytes of weights that a step with K drafts reads: the trunk and its head once, block and head for each draft.

    Of the embeddings it reads single rows, which do not count. Of experts, at most those that its positions choose.
    """
    trunk = sum(_layer_bytes(layer, cfg, K + 1) for layer in params.layers) + _nbytes(params.head)
    if K == 0 or params.mtp is None:
        return trunk
    ends = _nbytes(params.mtp.proj) + _nbytes(params.mtp.head if shortlist is None else shortlist.head)
    return trunk + sum(ends + _layer_bytes(params.mtp.layer, cfg, K + 1 if i == 0 else 1) for i in range(K))


def _layer_bytes(layer: LayerParams, cfg: ModelConfig, positions: int) -> int:
    total = _nbytes(layer)
    if isinstance(layer.ffn, ExpertsParams):
        experts = _nbytes((layer.ffn.gate, layer.ffn.up, layer.ffn.down))
        total -= experts - experts * min(positions * cfg.experts_used, cfg.experts) // cfg.experts
    return total


def _nbytes(tree: Any) -> int:
    return sum(int(leaf.nbytes) for leaf in jax.tree.leaves(tree))
