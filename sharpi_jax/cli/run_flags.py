"""The flags of `run`, and the checks that need no model.

`read_flags` turns argv into RunFlags or raises UsageError; nothing here imports JAX or opens the model.
"""

import dataclasses
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags

from sharpi_jax.assets import DEMO_MODEL
from sharpi_jax.cli.flagset import Choice, Flag, Integer, Parsed, Section, parse
from sharpi_jax.cli.sampling_flags import ACCEPTANCE, DRAFT_STOP, SAMPLING, sampling_values
from sharpi_jax.cli.usage import UsageError
from sharpi_jax.decode.options import AUTO_DRAFT_VOCAB, AUTO_MAX_DRAFT, MAX_DRAFT, SPEC_TYPES, DecodeOptions
from sharpi_jax.errors import OptionError

PLATFORMS = ("cpu", "gpu", "tpu")
LOAD_FLAGS = ("dtype", "cache_dtype", "act_quant", "engine")  # of api.load
PROMPT_FLAGS = ("prompt", "prompt_file", "prompt_ids")


class DraftLength(flags.ArgumentParser[int | str]):
    """An integer from 1 to 16, or the word auto."""

    def parse(self, argument: str) -> int | str:
        if argument == "auto":
            return argument
        try:
            length = int(argument, 10)
        except ValueError:
            raise ValueError(f"must be an integer from 1 to {MAX_DRAFT}, or auto") from None
        if length == 0:
            raise ValueError("to decode without drafts use --spec_type=none")
        if not 1 <= length <= MAX_DRAFT:
            raise ValueError(f"must be an integer from 1 to {MAX_DRAFT}, or auto")
        return length


class DraftVocabulary(flags.ArgumentParser[int | str]):
    """An integer of at least 1, or one of the words auto and full."""

    def parse(self, argument: str) -> int | str:
        if argument in ("auto", "full"):
            return argument
        try:
            size = int(argument, 10)
        except ValueError:
            size = 0
        if size < 1:
            raise ValueError("must be an integer of at least 1, auto or full")
        return size


class Threshold(flags.ArgumentParser[float]):
    """A probability in [0, 1]."""

    def parse(self, argument: str) -> float:
        try:
            value = float(argument)
        except ValueError:
            value = math.nan
        if not 0 <= value <= 1:  # false for NaN
            raise ValueError("must be a number from 0 to 1")
        return value


class TokenIds(flags.ArgumentParser[tuple[int, ...]]):
    """Comma-separated token ids."""

    def parse(self, argument: str) -> tuple[int, ...]:
        parts = [part.strip() for part in argument.split(",")]
        for part in parts:
            if not re.fullmatch(r"-?[0-9]+", part):
                raise ValueError(f"must be integers separated by commas, and {part!r} is none")
            if part.startswith("-"):
                raise ValueError(f"{part} is no token id, ids are 0 or greater")
            if len(part) > 9:  # beyond any vocabulary, and perhaps beyond the integers of an array
                raise ValueError(f"{part} is no token id, it is too large")
        return tuple(int(part, 10) for part in parts)


class StopText(flags.ArgumentParser[str]):
    r"""A stop text, with the escapes \n, \t, \r and \\; any other backslash stands for itself."""

    def parse(self, argument: str) -> str:
        if not argument:
            raise ValueError("must not be empty")
        escapes = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}
        return re.sub(r"\\([ntr\\])", lambda match: escapes[match.group(1)], argument)


SECTIONS = (
    Section(
        "Model",
        (
            Flag(
                "model",
                "the GGUF file, or any shard of a split one (-m); unset: the embedded demo model, with MTP off and on",
                "FILE",
            ),
            Flag("mtp_model", "a GGUF file with the model's MTP head alone, for a --model without one", "FILE"),
            Flag("dtype", "arithmetic: float32 or bfloat16", "TYPE", Choice("float32", "bfloat16"), "float32"),
            Flag(
                "cache_dtype",
                "keys and values in the cache: float32, float16 or bfloat16",
                "TYPE",
                Choice("float32", "float16", "bfloat16"),
                "float16",
            ),
            Flag(
                "act_quant",
                "activations where they meet block formats: none keeps them in float32; q8 rounds them to int8 in "
                "blocks of 32, as llama.cpp does, which is faster and changes the text a little, alike with and "
                "without drafts (perplexity never does it)",
                "TYPE",
                Choice("none", "q8"),
                "none",
            ),
            Flag(
                "engine",
                "what multiplies by block formats: native, a C++ kernel for this processor (CPU; compiled on first "
                "use), triton, a kernel for GPUs, or xla; auto takes the fastest that there is",
                "NAME",
                Choice("auto", "native", "triton", "xla"),
                "auto",
            ),
            Flag("ctx_size", "positions for prompt and output together (-c); unset: what is needed", "N", Integer(1)),
        ),
    ),
    Section(
        "Prompt (one of the first three; a pipe on standard input is read when none is given)",
        (
            Flag("prompt", "the text to continue (-p)", "TEXT"),
            Flag("prompt_file", "a UTF-8 file with the text, - for standard input; a final newline is dropped", "FILE"),
            Flag("prompt_ids", "token ids separated by commas, taken as they are", "IDS", TokenIds()),
            Flag("raw", "continue the prompt as it is; this is the default"),
            Flag(
                "chat",
                "send the prompt as a user message through the file's chat template; on a terminal and without a "
                "prompt, a conversation that ends at Ctrl-D",
            ),
            Flag("system_prompt", "the system message (only with --chat)", "TEXT"),
            Flag(
                "thinking",
                "let the model think before it answers, or not with --no_thinking (only with --chat, and where the "
                "file's chat template has a switch for it); unset: as the template does by itself",
                optional=True,
            ),
        ),
    ),
    Section(
        "Output",
        (
            Flag("max_tokens", "tokens to write at most (-n, --n-predict)", "N", Integer(0, 2**31 - 1), "256"),
            Flag("ignore_eos", "never end at an end-of-text token: their logits are masked"),
            Flag("stop", r"end before this text; \n and \t are understood", "TEXT", StopText(), repeated=True),
            Flag("output_json", "write ids, text, options and statistics to PATH, - for standard output", "PATH"),
            Flag("trace_mtp", "a line per step on standard error: drafts and verdicts (or SHARPI_TRACE_MTP=1)"),
        ),
    ),
    SAMPLING,
    Section(
        "Speculation by the model's own MTP head",
        (
            Flag(
                "spec_type",
                "auto drafts when the file has a head, none never does (or SHARPI_DISABLE_MTP=1), mtp insists on one",
                "TYPE",
                Choice(*SPEC_TYPES),
                "auto",
            ),
            Flag(
                "spec_draft_n_max",
                f"drafts per step, 1 to {MAX_DRAFT} (--draft-max); auto chooses for every step, 0 to {AUTO_MAX_DRAFT}, "
                "by what was accepted and by what steps cost here, which the first run measures",
                "N",
                DraftLength(),
                "3",
            ),
            Flag(
                "spec_draft_p_min",
                "threshold on the TARGET's probability of a draft that is not its first choice. 1 is exact: the text "
                "is that of decoding without drafts. Two tokens cannot both exceed one half, so every value in "
                "(0.5, 1] is the same as 1; the useful range is (0, 0.5], which is lossy. 0 means not set, hence 1. "
                "llama.cpp's flag of this name is something else: there the drafter's own probability stops drafting",
                "P",
                Threshold(),
                "1",
            ),
            Flag(
                "spec_draft_vocab",
                "tokens among which drafts are chosen: the N commonest, the special ones and the prompt's; full is "
                f"all. auto is {AUTO_DRAFT_VOCAB} where the vocabulary is twice that or more and --spec_draft_p_min is "
                "1, else full. With an exact threshold it never changes the text; full may pay where text is of tokens "
                "with high ids, as in some languages",
                "N",
                DraftVocabulary(),
                "auto",
            ),
            *DRAFT_STOP,
        ),
    ),
    ACCEPTANCE,
    Section(
        "Machine",
        (
            Flag("platform", "cpu, gpu or tpu; unset: JAX chooses", "NAME", Choice(*PLATFORMS)),
            Flag(
                "compile_cache",
                "keep compiled programs in your cache folder, so that only a first run compiles; off: "
                "--no_compile_cache",
                default="true",
            ),
            Flag("threads", "size of XLA's CPU thread pool (sets NPROC); unset: one per core", "N", Integer(1, 1024)),
        ),
    ),
)


@dataclasses.dataclass(frozen=True)
class RunFlags:
    """What the user chose, checked as far as it can be without the model.

    Attributes:
      model: a path; is_demo says that it is the embedded model's, since none was given. mtp_model: a path.
      load: the LOAD_FLAGS. prompt, prompt_file, prompt_ids: at most one is set.
      options: what decoding needs; a spec_draft_p_min of 0 is already 1 here.
      p_min_unset: whether spec_draft_p_min was given as 0.
      trace: --trace_mtp or its variable.
    """

    model: str
    is_demo: bool
    mtp_model: str | None
    load: dict[str, str]
    prompt: str | None
    prompt_file: str | None
    prompt_ids: tuple[int, ...] | None
    chat: bool
    system_prompt: str | None
    thinking: bool | None
    stop: tuple[str, ...]
    output_json: str | None
    trace: bool
    platform: str | None
    threads: int | None
    compile_cache: bool
    options: DecodeOptions
    p_min_unset: bool


def parse_run(argv: Sequence[str]) -> Parsed:
    """argv against the table, for callers that look at --help and --version first."""
    return parse(argv, SECTIONS)


def check_paths(values: dict[str, Any]) -> None:
    """What every command that runs a model asks of its paths.

    Raises:
      UsageError: a path is empty, or a head is given without its trunk.
    """
    if values["mtp_model"] is not None and not (values["model"] and values["mtp_model"]):
        raise UsageError("flag --mtp_model needs a path, and a --model beside it that holds the trunk.")
    if values["output_json"] == "":
        raise UsageError("flag --output_json needs a path, or - for standard output.")


def check_text(name: str, value: str | None) -> None:
    """Refuses what was typed for a flag where it is no text.

    Raises:
      UsageError: bytes of argv that are not UTF-8.
    """
    try:
        (value or "").encode()
    except UnicodeEncodeError:
        raise UsageError(f"flag --{name} is not valid UTF-8.") from None


def check_run(parsed: Parsed, environ: Mapping[str, str] = os.environ) -> RunFlags:
    """The combinations: each refusal is one sentence that names the flags.

    Raises:
      UsageError: flags that cannot be honoured together, or one that is missing.
    """
    values = parsed.values
    if parsed.positional:
        raise UsageError(_unexpected(parsed.positional[0], values["model"]))
    if values["model"] == "":
        raise UsageError("flag --model needs a path; without the flag the embedded demo model runs.")
    check_paths(values)
    _check_prompt(values)
    return RunFlags(
        **{name: values[name] for name in (*PROMPT_FLAGS, "chat", "system_prompt", "thinking")},
        **{name: values[name] for name in ("mtp_model", "output_json", "platform", "threads", "compile_cache")},
        model=values["model"] or str(DEMO_MODEL),
        is_demo=values["model"] is None,
        load={name: values[name] for name in LOAD_FLAGS},
        stop=tuple(values["stop"] or ()),
        trace=values["trace_mtp"] or environ.get("SHARPI_TRACE_MTP") == "1",
        options=_options(values, _spec_type(parsed, environ)),
        p_min_unset=values["spec_draft_p_min"] == 0,
    )


def _options(values: Mapping[str, Any], spec_type: str) -> DecodeOptions:
    names = ("max_tokens", "spec_draft_n_max", "spec_draft_vocab", "ctx_size", "ignore_eos")
    try:
        return DecodeOptions(
            spec_type=spec_type,
            spec_draft_p_min=values["spec_draft_p_min"] or 1.0,
            **{name: values[name] for name in names},
            **sampling_values(values),
        )
    except OptionError as error:  # flags that contradict each other
        raise UsageError(str(error)) from None


def _check_prompt(values: Mapping[str, Any]) -> None:
    given = [f"--{name}" for name in PROMPT_FLAGS if values[name] is not None]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} were both given; give one prompt.")
    if values["chat"] and values["raw"]:
        raise UsageError("--chat and --raw were both given; give one.")
    if values["system_prompt"] is not None and not values["chat"]:
        raise UsageError("--system_prompt needs --chat: a raw prompt has no system message.")
    if values["thinking"] is not None and not values["chat"]:
        flag = "--thinking" if values["thinking"] else "--no_thinking"
        raise UsageError(f"{flag} needs --chat: the chat template turns thinking on and off.")
    if values["prompt_ids"] is not None and values["chat"]:
        raise UsageError("--prompt_ids needs --raw: a chat template renders text, not token ids.")
    for name in ("prompt", "system_prompt"):
        check_text(name, values[name])


def _spec_type(parsed: Parsed, environ: Mapping[str, str]) -> str:
    chosen: str = parsed.values["spec_type"]
    if environ.get("SHARPI_DISABLE_MTP") != "1":
        return chosen
    if chosen == "mtp":
        raise UsageError("--spec_type=mtp contradicts SHARPI_DISABLE_MTP=1 in the environment; drop one of them.")
    return "none"


def _unexpected(argument: str, model: str | None) -> str:
    if argument in ("run", "inspect", "perplexity", "bench", "eval"):
        return f"the subcommand {argument} must come first."
    if not model and argument.endswith(".gguf"):
        return f"unexpected argument {argument!r}; did you mean --model={argument}?"
    return f"unexpected argument {argument!r}; put quotes around a prompt that has spaces."
