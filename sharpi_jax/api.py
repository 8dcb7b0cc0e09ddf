"""The facade that joins checkpoint and decode: `load`, then `Model.generate`, `.score`, `.perplexity` and `.speed`."""

import bisect
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from sharpi_jax import checkpoint, kernel
from sharpi_jax.assets import DEMO_MODEL
from sharpi_jax.checkpoint.detokenizer import StreamingDetokenizer
from sharpi_jax.decode.decoder import Decoder, Plan
from sharpi_jax.decode.generate import stream
from sharpi_jax.decode.options import MAX_DRAFT, DecodeOptions
from sharpi_jax.decode.score import Scores, score
from sharpi_jax.decode.stats import Statistics, StepRecord, Timing
from sharpi_jax.errors import OptionError
from sharpi_jax.evaluate import Perplexity, Speed, measure_speed, perplexities, text_windows
from sharpi_jax.quant import choose_engine

DTYPES = ("float32", "bfloat16")
ACT_QUANTS = ("none", "q8")
CACHE_DTYPES = ("float32", "float16", "bfloat16")
PERPLEXITY_WINDOW = 512  # tokens: llama.cpp's default, with which published figures are made


@dataclasses.dataclass(frozen=True)
class Generation:
    """The result of one run.

    Attributes:
      output_ids: what was emitted, never a stop token. text: its text, without a stop string and what follows it.
      finish_reason: "stop" (a stop token or stop string), "length" (max_tokens) or "context" (no room left).
      drafting: whether the MTP head drafted; draft_vocab: among how many tokens, None without.
      steps: one record per step, only when traced.
      ctx_size: cache slots that were allocated.
    """

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    text: str
    finish_reason: str
    drafting: bool
    draft_vocab: int | None
    stats: Statistics
    timing: Timing
    steps: tuple[StepRecord, ...]
    ctx_size: int


class Model:
    """A model file on a device.

    Attributes:
      path: the file. config: its shape. tokenizer, chat_template: its text side; the template may be None.
      notes: one-line remarks for the user about what the file promises and does not hold.
      decoder: the compiled side, for callers who want batches, scripted drafters or the state itself.
    """

    def __init__(
        self,
        read: checkpoint.Checkpoint,
        dtype: str,
        cache_dtype: str,
        act_quant: str = "none",
        notes: tuple[str, ...] = (),
    ):
        self.path = read.file.path
        self.config = dataclasses.replace(read.config, dtype=dtype, cache_dtype=cache_dtype)
        self.tokenizer = read.tokenizer
        self.chat_template = read.chat_template
        self.notes = read.notes + notes
        fast = dataclasses.replace(self.config, dtype="int8") if act_quant == "q8" else self.config
        self.decoder = Decoder(read.params, fast)
        self._unrounded = Decoder(read.params, self.config)

    @property
    def has_mtp(self) -> bool:
        """Whether the file has an MTP head that can draft."""
        return self.config.has_mtp

    def generate(
        self,
        prompt: str | Sequence[int],
        options: DecodeOptions | None = None,
        *,
        stop: Sequence[str] = (),
        trace: bool = False,
        on_start: Callable[[], None] | None = None,
        on_text: Callable[[str], None] | None = None,
        on_step: Callable[[StepRecord], None] | None = None,
    ) -> Generation:
        """Continues a prompt.

        Args:
          prompt: text (encoded with the file's tokenizer, BOS first where it wants one), or token ids as they are.
          stop: strings that end the text before them.
          trace: keep a record of every step. on_step: called with each record as it is made.
          on_start: called once prompt and options are accepted, before anything is compiled.
          on_text: called with each piece of text as soon as it is certain.

        Raises:
          OptionError: the prompt or an option cannot be used; one sentence says why.
        """
        options = options or DecodeOptions()
        if any(not s for s in stop):
            raise OptionError("a stop string is empty; give at least one character.")
        prompt_ids = self.tokenizer.encode_prompt(prompt) if isinstance(prompt, str) else [int(i) for i in prompt]
        plan = self.decoder.plan(prompt_ids, options, self._common(options))
        if on_start is not None:
            on_start()
        stepwise = trace or on_step is not None
        text = _Text(self.tokenizer, stop, on_text)
        steps: list[StepRecord] = []
        for progress in stream(self.decoder, plan, self.tokenizer.stop_ids, stepwise=stepwise):
            if progress.record is not None:
                steps.append(progress.record)
                if on_step is not None:
                    on_step(progress.record)
            text.push(progress.new_ids)
            if text.stopped:
                break
        text.finish()
        return Generation(
            prompt_ids=tuple(prompt_ids),
            output_ids=tuple(text.ids),
            text=text.text,
            finish_reason="stop" if text.stopped else progress.finish_reason,
            drafting=plan.K > 0,
            draft_vocab=self._draft_vocab(plan),
            stats=progress.stats,
            timing=progress.timing,
            steps=tuple(steps) if trace else (),
            ctx_size=plan.slots,
        )

    def score(self, token_ids: Sequence[int]) -> Scores:
        """Logits [T, V], hidden [T, D] and MTP logits [T, V] of T given tokens, float32.

        Raises:
          OptionError: no tokens, more than the model's context, or an id outside the vocabulary.
        """
        return score(self._exact, token_ids)

    def perplexity(
        self,
        text: str | Sequence[int],
        *,
        ctx_size: int = PERPLEXITY_WINDOW,
        on_progress: Callable[[Perplexity, int], None] | None = None,
    ) -> Perplexity:
        """How well the model predicts a text, and its MTP head the model, in windows of `ctx_size` tokens.

        Args:
          text: text, in which special tokens are not looked for, or token ids as they are.
          on_progress: called after every few windows, with the measurement so far and the number of windows.

        Raises:
          OptionError: the text fills no window, a window exceeds the model's context, or an id is no token.
        """
        encode = self.tokenizer.encode_prompt
        ids = encode(text, parse_special=False) if isinstance(text, str) else [int(i) for i in text]
        bos_id = self.tokenizer.bos_id if self.tokenizer.add_bos else None
        windows = text_windows(ids, ctx_size, bos_id)
        sizes = np.asarray([self.byte_size(i) for i in ids[: windows.size]], np.int64).reshape(windows.shape)
        for found in perplexities(self._exact, windows, sizes):
            if on_progress is not None:
                on_progress(found, len(windows))
        return found

    def speed(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int = 64,
        depth: int = 4,
        rounds: int = 5,
        threads: int = 1,
        ctx_size: int | None = None,
        spec_draft_vocab: int | str = "auto",
        on_round: Callable[[int, int], None] | None = None,
    ) -> Speed:
        """How fast the model continues a prompt with 0 to `depth` drafts a step, and what the parts of a step cost.

        Args:
          spec_draft_vocab: as in DecodeOptions.
          threads: the processor's, for the measurement of its memory.
          on_round: called before each round and after the last, with rounds done and rounds in all.

        Raises:
          OptionError: the prompt cannot be used, or a number is too small.
        """
        for name, value in (("max_tokens", max_tokens), ("rounds", rounds), ("threads", threads)):
            if value < 1:
                raise OptionError(f"{name} must be at least 1, not {value}.")
        if not 0 <= depth <= MAX_DRAFT:
            raise OptionError(f"depth must be 0 to {MAX_DRAFT}, not {depth}.")
        ids = self.tokenizer.encode_prompt(prompt) if isinstance(prompt, str) else [int(i) for i in prompt]
        options = DecodeOptions(max_tokens, spec_draft_vocab=spec_draft_vocab, ctx_size=ctx_size)
        return measure_speed(
            self.decoder,
            ids,
            self.tokenizer.stop_ids,
            max_tokens=max_tokens,
            depth=depth,
            rounds=rounds,
            threads=threads,
            ctx_size=ctx_size,
            common=self._common(options),
            on_round=on_round,
        )

    @property
    def _exact(self) -> Decoder:
        """What is measured is never rounded for speed; where nothing is, programs are shared."""
        return self.decoder if self.decoder.cfg.dtype == self.config.dtype else self._unrounded

    def _common(self, options: DecodeOptions) -> np.ndarray | None:
        """The tokens among which to draft, beside those of the prompt; None for all."""
        common = options.draft_vocab(self.config.vocab_size)
        return None if common is None else self.tokenizer.draft_ids(common)

    def _draft_vocab(self, plan: Plan) -> int | None:
        if plan.K == 0:
            return None
        return self.config.vocab_size if plan.shortlist is None else len(set(plan.shortlist.tolist()))

    def byte_size(self, token_id: int) -> int:
        """Bytes of text that a token stands for: none for a special one."""
        return 0 if self.tokenizer.is_special(token_id) else len(self.tokenizer.token_bytes(token_id))


def load(
    path: str | Path = DEMO_MODEL,
    *,
    mtp_model: str | Path | None = None,
    dtype: str = "float32",
    cache_dtype: str = "float32",
    act_quant: str = "none",
    engine: str = "auto",
    on_progress: Callable[[int, int], None] | None = None,
) -> Model:
    """Reads a GGUF file and puts its weights on the default device, packed as they are.

    Args:
      path: the file, or any shard of a split one; without one, the demo model that the package holds.
      mtp_model: a file that holds the model's MTP head alone. Where the model's own file has a head too, this one is
        used.
      dtype: type of the operands of matrix products, one of DTYPES. cache_dtype: of keys and values, of CACHE_DTYPES.
      act_quant: "q8" takes activations as int8 in blocks of 32 where they meet block formats in `generate`, as
        llama.cpp does everywhere; `score` and `perplexity` never do.
      engine: what multiplies by block formats, "native", a C++ kernel (CPU), "triton", one for GPUs, or "xla", what
        XLA compiles by itself; "auto" takes the fastest that there is.
      on_progress: called while loading, with the bytes that are on the device and the bytes in all.

    Raises:
      CheckpointError: a file cannot be used. OptionError: a type that is not offered.
    """
    given = {"dtype": (dtype, DTYPES), "cache_dtype": (cache_dtype, CACHE_DTYPES), "act_quant": (act_quant, ACT_QUANTS)}
    for name, (value, known) in given.items():
        if value not in known:
            raise OptionError(f"{name} must be one of {', '.join(known)}, not {value!r}.")
    if act_quant == "q8" and dtype != "float32":
        raise OptionError(f"act_quant q8 works in float32 and int8; with it, dtype {dtype} cannot be chosen.")
    engine, notes = choose_engine(engine)
    if engine == "native":
        stored = ("attention", f"SHARPI_CACHE={cache_dtype.capitalize()}")
        kernel.compile_ahead(stored, ("delta_window",), ("delta_replay",))
    return Model(checkpoint.read(path, mtp_model, on_progress, engine), dtype, cache_dtype, act_quant, notes)


class _Text:
    """Collects ids and text, holds back what may become a stop string, and cuts both where one appears."""

    def __init__(
        self, tokenizer: checkpoint.Tokenizer, stop: Sequence[str], on_text: Callable[[str], None] | None
    ) -> None:
        self._detokenizer = StreamingDetokenizer(tokenizer)
        self._stop = tuple(stop)
        self._on_text = on_text or (lambda piece: None)
        self._shown = 0
        self._ends: list[int] = []  # length of the text after each id
        self.ids: list[int] = []
        self.text = ""
        self.stopped = False

    def push(self, ids: Sequence[int]) -> None:
        for token in ids:
            piece = self._detokenizer.push([token])
            self.ids.append(token)
            self._ends.append(len(self.text) + len(piece))
            self._add(piece)
            if self.stopped:
                return

    def finish(self) -> None:
        if not self.stopped:
            self._add(self._detokenizer.finish())
        self._show(len(self.text))

    def _add(self, piece: str) -> None:
        # A stop string may have begun in text that is already held, but not in text that was shown.
        self.text += piece
        found = [at for s in self._stop if (at := self.text.find(s, self._shown)) >= 0]
        if found:
            self.text = self.text[: min(found)]
            self.stopped = True
            # The fewest ids whose text holds all that is kept of the text.
            del self.ids[bisect.bisect_left(self._ends, len(self.text)) + 1 if self.text else 0 :]
        else:
            self._show(len(self.text) - self._held())

    def _held(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = max((len(s) for s in self._stop), default=1) - 1
        ends = range(min(longest, len(self.text) - self._shown), 0, -1)
        return next((n for n in ends if any(s.startswith(self.text[-n:]) for s in self._stop)), 0)

    def _show(self, end: int) -> None:
        if end > self._shown:
            self._on_text(self.text[self._shown : end])
            self._shown = end
