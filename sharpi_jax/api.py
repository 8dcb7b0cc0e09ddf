"""The facade that joins checkpoint and decode: `load`, then `Model.generate`, `.score`, `.perplexity`, `.speed` and
`.evaluate`."""

import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sharpi_jax import checkpoint, kernel
from sharpi_jax.assets import DEMO_MODEL
from sharpi_jax.checkpoint.output_text import OutputText
from sharpi_jax.decode.decoder import Decoder, Plan
from sharpi_jax.decode.generate import stream
from sharpi_jax.decode.options import MAX_DRAFT, DecodeOptions
from sharpi_jax.decode.score import Scores, score
from sharpi_jax.decode.stats import Statistics, StepRecord, Timing, TokenLogProb
from sharpi_jax.errors import OptionError
from sharpi_jax.evaluate import Perplexity, Speed, measure_speed, perplexities, text_windows
from sharpi_jax.evaluate.costs import with_step_costs
from sharpi_jax.evaluate.evaluation import (
    Bench,
    Compilations,
    make_tasks,
    slots_of,
    sweep_details,
    token_ids_of,
)
from sharpi_jax.evaluate.prompts import Prompt
from sharpi_jax.evaluate.report import write_report
from sharpi_jax.evaluate.results import CostModel, Evaluation
from sharpi_jax.evaluate.summary import summarise
from sharpi_jax.evaluate.sweep import Progress, Sweep
from sharpi_jax.evaluation_files import default_prompts, evaluate_tasks, read_prompts
from sharpi_jax.quant import choose_engine

DTYPES = ("float32", "bfloat16")
ACT_QUANTS = ("none", "q8")
CACHE_DTYPES = ("float32", "float16", "bfloat16")
THINK_TOKENS = ("<think>", "</think>")
PERPLEXITY_WINDOW = 512  # tokens: llama.cpp's default, with which published figures are made


@dataclasses.dataclass(frozen=True)
class Generation:
    """The result of one run.

    Attributes:
      options: what was asked for.
      output_ids: what was emitted, never a stop token. text: its text, without a stop string and what follows it.
      finish_reason: "stop" (a stop token or stop string), "length" (max_tokens) or "context" (no room left).
      drafting: whether the MTP head drafted; draft_vocab: among how many tokens, None without.
      steps: one record per step, only when traced.
      logprobs: of each of output_ids, only when options.logprobs asks for them.
      ctx_size: cache slots that were allocated.
    """

    options: DecodeOptions
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    text: str
    finish_reason: str
    drafting: bool
    draft_vocab: int | None
    stats: Statistics
    timing: Timing
    steps: tuple[StepRecord, ...]
    logprobs: tuple[TokenLogProb, ...]
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
        plan = self.decoder.plan(prompt_ids, options, self._common(options), self._think_ids(options))
        if on_start is not None:
            on_start()
        plan = with_step_costs(self.decoder, plan, int(os.environ.get("NPROC") or os.cpu_count() or 1))
        stepwise = trace or on_step is not None
        text = OutputText(self.tokenizer, stop, options.min_tokens, on_text)
        steps: list[StepRecord] = []
        logprobs: list[TokenLogProb] = []
        for progress in stream(self.decoder, plan, self.tokenizer.stop_ids, stepwise=stepwise):
            if progress.record is not None:
                steps.append(progress.record)
                if on_step is not None:
                    on_step(progress.record)
            logprobs += progress.logprobs
            text.push(progress.new_ids)
            if text.stopped:
                break
        text.finish()
        return Generation(
            options=options,
            prompt_ids=tuple(prompt_ids),
            output_ids=tuple(text.ids),
            text=text.text,
            finish_reason="stop" if text.stopped else progress.finish_reason,
            drafting=plan.K > 0,
            draft_vocab=self._draft_vocab(plan),
            stats=progress.stats,
            timing=progress.timing,
            steps=tuple(steps) if trace else (),
            logprobs=tuple(logprobs[: len(text.ids)]),
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

    def evaluate(
        self,
        prompts: Sequence[Prompt | str] | None = None,
        sweep: Sweep | None = None,
        *,
        report_dir: str | Path | None = None,
        cost: CostModel | None = None,
        details: Sequence[tuple[str, str]] = (),
        on_fault: Callable[[str], None] | None = None,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> Evaluation:
        """Decodes every prompt with every setting of a sweep, beside greedy decoding: what is gained, what is lost.

        Args:
          prompts: those of a file (`read_prompts`), or texts; None for the built-in ones.
          report_dir: a folder for the report, and for results.jsonl, which a run that was interrupted goes on from;
            None writes nothing.
          cost: other hardware to predict a speed-up for. details: further lines of the report's head.
          on_fault: called with a sentence for each prompt that cannot be decoded, which is left out; without it, the
            first of them is refused.

        Raises:
          OptionError: a prompt cannot be decoded, the model has no MTP head, or the folder cannot be used.
        """
        sweep = sweep or Sweep()
        given = default_prompts(self.path) if prompts is None else prompts
        tasks = make_tasks(given, self._prompt_ids, sweep, self.decoder, on_fault)
        options = DecodeOptions(sweep.max_tokens, spec_draft_p_min=min(sweep.p_min))
        stop_ids, text_of = tuple(self.tokenizer.stop_ids), functools.partial(self.tokenizer.decode, continues=True)
        bench = Bench(self.decoder, stop_ids, text_of, self._common(options), slots_of(self.decoder, tasks))
        compiled = Compilations(self.decoder.programs)
        show = on_progress or (lambda progress: None)
        results, timings = evaluate_tasks(bench, tasks, sweep, self.path.name, report_dir, show)
        evaluation = Evaluation(
            model=self.path.name,
            results=tuple(results),
            summaries=summarise(results, timings, cost=cost),
            cost=cost or CostModel(),
            token_texts={
                i: self.tokenizer.token_bytes(i).decode(errors="backslashreplace") for i in token_ids_of(results)
            },
            compilations=compiled.count,
            details=(*details, *sweep_details(tasks, sweep, bench, compiled)),
        )
        if report_dir is not None:
            write_report(report_dir, evaluation)
        return evaluation

    def _prompt_ids(self, prompt: Prompt) -> Sequence[int]:
        if prompt.messages is not None:
            if self.chat_template is None:
                raise OptionError("it has messages, but the model file has no chat template; give it as text.")
            return self.tokenizer.encode_prompt(self.chat_template.render(prompt.messages))
        return prompt.prompt_ids or self.tokenizer.encode_prompt(prompt.text or "")

    @property
    def _exact(self) -> Decoder:
        """What is measured is never rounded for speed; where nothing is, programs are shared."""
        return self.decoder if self.decoder.cfg.dtype == self.config.dtype else self._unrounded

    def _common(self, options: DecodeOptions) -> np.ndarray | None:
        """The tokens among which to draft, beside those of the prompt; None for all."""
        common = options.draft_vocab(self.config.vocab_size)
        return None if common is None else self.tokenizer.draft_ids(common)

    def _think_ids(self, options: DecodeOptions) -> tuple[int, int] | None:
        """The tokens around thinking, where there is a budget for it.

        Raises:
          OptionError: the model has no such tokens.
        """
        if options.max_thinking_tokens is None:
            return None
        opening, closing = (self.tokenizer.encode(text) for text in THINK_TOKENS)
        if len(opening) != 1 or len(closing) != 1:
            raise OptionError(
                f"max_thinking_tokens needs a model with the tokens {' and '.join(THINK_TOKENS)}, and {self.path.name} "
                "has none; leave it out."
            )
        return opening[0], closing[0]

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


def evaluate(
    model: Model | str | Path = DEMO_MODEL,
    prompts: str | Path | Sequence[Prompt | str] | None = None,
    sweep: Sweep | None = None,
    **options: Any,
) -> Evaluation:
    """Evaluates a model, or one in a file, on prompts, or those of a JSONL file: see `Model.evaluate`.

    Raises:
      CheckpointError: the file cannot be used. OptionError: the prompts or an option cannot be used.
    """
    loaded = model if isinstance(model, Model) else load(model)
    given = read_prompts(prompts)[0] if isinstance(prompts, str | Path) else prompts
    return loaded.evaluate(given, sweep, **options)
