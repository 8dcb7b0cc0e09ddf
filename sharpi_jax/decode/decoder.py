"""A model on a device, ready to decode: allocates, prefills in chunks and runs the loop, each a compiled program."""

import collections
import dataclasses
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from sharpi_jax.decode.controls import Controls, make_controls, method_of
from sharpi_jax.decode.draft import MtpDrafter
from sharpi_jax.decode.loop import decode_loop
from sharpi_jax.decode.options import DecodeOptions
from sharpi_jax.decode.prefill import begin, chunk_plan, prefill_mtp, prefill_trunk
from sharpi_jax.decode.programs import Programs
from sharpi_jax.decode.shortlist import Shortlist, shortlist_ids
from sharpi_jax.decode.state import DecodeState
from sharpi_jax.decode.step import Drafter
from sharpi_jax.errors import OptionError
from sharpi_jax.model.cache import KVCache, TrunkCache, init_kv_cache, init_trunk_cache
from sharpi_jax.model.config import ModelConfig
from sharpi_jax.model.params import ModelParams
from sharpi_jax.model.rope import RopeTable, rope_of
from sharpi_jax.quant import select_rows

MIN_SLOTS = 128


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Where prefill stands after a chunk of T positions from `start`.

    Attributes:
      hidden: [B, T, D] of the trunk; mtp_hidden: [B, T, D] of the MTP block, None when it does not run.
      trunk, mtp: the caches so far, which the next chunk takes over. last: [B, D], each row's newest hidden.
    """

    start: int
    hidden: jax.Array
    mtp_hidden: jax.Array | None
    trunk: TrunkCache
    mtp: KVCache | None
    last: jax.Array


@dataclasses.dataclass(frozen=True)
class Plan:
    """A run that was checked: prompt and options, the K they come to, and the cache slots it takes.

    Attributes:
      shortlist: [n], the tokens among which it drafts, as `shortlist_ids` has them; None for all.
      think_ids: the tokens around thinking, where there is a budget for it.
      step_ms: what steps cost by their drafts, [K+1], where their number is adaptive.
    """

    prompt: tuple[int, ...]
    options: DecodeOptions
    K: int
    slots: int
    shortlist: np.ndarray | None
    think_ids: tuple[int, int] | None = None
    step_ms: tuple[float, ...] = ()

    def controls(self, stop_ids: Sequence[int], *, traced: bool) -> Controls:
        """Of the one row."""
        options = self.options
        method = method_of(options, drafting=self.K > 0, slots=self.slots)
        more = {"options": options, "step_ms": self.step_ms, "think_ids": self.think_ids, "method": method}
        return make_controls([options.spec_draft_p_min], stop_ids, traced=traced, **more)  # type: ignore[arg-type]


@dataclasses.dataclass
class Decoder:
    """Params, config, and the programs compiled so far."""

    params: ModelParams
    cfg: ModelConfig
    programs: Programs = dataclasses.field(default_factory=Programs)

    def plan(
        self,
        prompt: Sequence[int],
        options: DecodeOptions,
        common: np.ndarray | None = None,
        think_ids: tuple[int, int] | None = None,
    ) -> Plan:
        """Checks one run, before anything is compiled.

        Args:
          common: the tokens among which it drafts, beside those of the prompt; None for all.
          think_ids: the tokens around thinking.

        Raises:
          OptionError: drafting is insisted on and the model has no head; the prompt is empty, does not fit, or holds an
            id outside the vocabulary, as may logit_bias; or the context asked for is larger than the model's.
        """
        if options.spec_type == "mtp" and not self.cfg.has_mtp:
            raise OptionError("spec_type is mtp, but the file has no MTP head; use spec_type auto or none.")
        K = 0 if options.spec_type == "none" or not self.cfg.has_mtp else options.draft_length
        wrong = next((i for i, _ in options.logit_bias if i >= self.cfg.vocab_size), None)
        if wrong is not None:
            raise OptionError(f"logit_bias: token id {wrong} is outside the vocabulary of {self.cfg.vocab_size}.")
        slots = self.slots(len(prompt), options.max_tokens, options.ctx_size)
        self.rows_of([prompt], slots)
        ids = shortlist_ids(common, [prompt], self.cfg.vocab_size) if K > 0 and common is not None else None
        return Plan(tuple(map(int, prompt)), options, K, slots, ids, think_ids)

    def drafter(self, shortlist: np.ndarray | None = None) -> MtpDrafter:
        """The MTP head over the tokens of a plan's shortlist, whose rows are gathered here."""
        if shortlist is None:
            return MtpDrafter()
        assert self.params.mtp is not None
        head = self.programs.run(select_rows, self.params.mtp.head, shortlist)
        return MtpDrafter(Shortlist(head, jnp.asarray(shortlist)))

    def slots(self, prompt_tokens: int, max_tokens: int, ctx_size: int | None = None) -> int:
        """S: the context asked for, or prompt + max_tokens rounded up to a power of two and capped by the model's.

        Raises:
          OptionError: the prompt does not fit, or the context asked for is larger than the model's.
        """
        most = self.cfg.context_length
        if ctx_size is not None and ctx_size > most:
            raise OptionError(f"ctx_size is {ctx_size}, but the model was made for at most {most} tokens.")
        wanted = max(prompt_tokens + max_tokens, MIN_SLOTS)
        slots = ctx_size or min(1 << (wanted - 1).bit_length(), most)
        if prompt_tokens > slots:
            fix = "shorten it" if slots == most else f"shorten it or raise ctx_size (the model's most is {most})"
            raise OptionError(f"the prompt has {prompt_tokens} tokens, but the context holds {slots}; {fix}.")
        return slots

    def prefill(
        self, prompts: Sequence[Sequence[int]], budgets: Sequence[int], slots: int, controls: Controls, *, K: int
    ) -> DecodeState:
        """Rows of prompts (unequal lengths are fine), each of at least one token, to the loop's first state."""
        tokens, lengths = self.rows_of(prompts, slots)
        done = collections.deque(self.chunks(tokens, lengths, drafting=K > 0), maxlen=1).pop()
        budget = np.asarray(budgets, np.int32)
        args = (self.params, done.trunk, done.mtp, done.last, tokens, lengths, budget, controls)
        state: DecodeState = self.programs.run(begin, *args, cfg=self.cfg, K=K)
        return state

    def chunks(self, tokens: np.ndarray, lengths: np.ndarray, *, drafting: bool) -> Iterator[Chunk]:
        """Runs prompts [B, S] of `lengths` [B] chunk by chunk, through the MTP block too when `drafting`."""
        B, S = tokens.shape
        rope = rope_of(self.cfg, S)
        trunk, mtp, last = self.programs.run(_init, rope, cfg=self.cfg, rows=B, drafting=drafting)
        for start, width in chunk_plan(int(lengths.max())):
            piece = tokens[:, start : start + width]
            piece = np.pad(piece, ((0, 0), (0, width - piece.shape[1])))
            where = (piece, np.full(B, start, np.int32), np.clip(lengths - start, 0, width).astype(np.int32))
            before, mtp_hidden = last, None
            trunk, hidden, last = self.programs.run(
                prefill_trunk, self.params, trunk, last, *where, cfg=self.cfg, donate=(1,)
            )
            if mtp is not None:
                args = (self.params, mtp, trunk.rope, before, hidden, *where)
                mtp, mtp_hidden = self.programs.run(prefill_mtp, *args, cfg=self.cfg, donate=(1,))
            yield Chunk(start, hidden, mtp_hidden, trunk, mtp, last)

    def advance(
        self, state: DecodeState, controls: Controls, until: int, drafter: Drafter | None = None
    ) -> DecodeState:
        """Runs the loop until every unfinished row has emitted `until` tokens in all. Takes over `state`'s buffers."""
        args = (self.params, state, controls, drafter or MtpDrafter(), np.int32(until))
        after: DecodeState = self.programs.run(decode_loop, *args, cfg=self.cfg, donate=(1,))
        return after

    def rows_of(self, prompts: Sequence[Sequence[int]], slots: int) -> tuple[np.ndarray, np.ndarray]:
        """Prompts as tokens [B, S] and lengths [B].

        Raises:
          OptionError: a prompt is empty or holds an id outside the vocabulary.
        """
        tokens = np.zeros((len(prompts), slots), np.int32)
        for row, prompt in zip(tokens, prompts, strict=True):
            if len(prompt) == 0:
                raise OptionError("the prompt is empty; give at least one token.")
            wrong = next((i for i in prompt if not 0 <= i < self.cfg.vocab_size), None)
            if wrong is not None:
                raise OptionError(f"token id {wrong} is outside the vocabulary of {self.cfg.vocab_size}.")
            row[: len(prompt)] = prompt
        return tokens, np.asarray([len(p) for p in prompts], np.int32)


def _init(
    rope: RopeTable, *, cfg: ModelConfig, rows: int, drafting: bool
) -> tuple[TrunkCache, KVCache | None, jax.Array]:
    mtp = init_kv_cache(cfg, rows, rope.cos.shape[0]) if drafting else None
    return init_trunk_cache(cfg, rows, rope), mtp, jnp.zeros((rows, cfg.width), jnp.float32)
