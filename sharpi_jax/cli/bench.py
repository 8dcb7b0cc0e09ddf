"""`sharpi-jax bench`: how fast a model decodes here, by the number of drafts, and what that is made of."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sharpi_jax.assets import DEMO_MODEL, DEMO_PROMPT
from sharpi_jax.cli import device, json_file, model_file
from sharpi_jax.cli.flagset import Flag, Integer, Section, answered, parse
from sharpi_jax.cli.prompt import read_text
from sharpi_jax.cli.run_flags import LOAD_FLAGS, check_paths, check_text
from sharpi_jax.cli.run_flags import SECTIONS as RUN_SECTIONS
from sharpi_jax.cli.terminal import note, printable
from sharpi_jax.cli.usage import UsageError
from sharpi_jax.decode.options import MAX_DRAFT

if TYPE_CHECKING:  # api imports JAX, and `--help` must not
    from sharpi_jax.api import Model
    from sharpi_jax.evaluate.speed import Speed

HELP = """\
sharpi-jax bench: how many drafts a step pay on this machine. Decodes one prompt with 0, 1, 2, ... drafts, in turn, and
says how fast each is, what a step costs by its parts, how many drafts are accepted, and how much of the memory's read
bandwidth, measured beside it, reading the weights takes. Acceptance depends on the text: give a prompt of your own.

usage: sharpi-jax bench --model=FILE.gguf [--prompt_file=TEXT] [flags]"""

SECTIONS = (
    Section(
        "Benchmark",
        (
            Flag("prompt", "the text to continue (-p); unset: a few words", "TEXT"),
            Flag("prompt_file", "a UTF-8 file with the text, - for standard input; a final newline is dropped", "FILE"),
            Flag("prompt_tokens", "repeat or cut the prompt to N tokens; unset: as it is", "N", Integer(1, 2**20)),
            Flag("max_tokens", "tokens of each run (-n, --n-predict)", "N", Integer(1, 2**31 - 1), "64"),
            Flag("spec_draft_n_max", "the most drafts per step (--draft-max)", "N", Integer(0, MAX_DRAFT), "4"),
            next(flag for section in RUN_SECTIONS for flag in section.flags if flag.name == "spec_draft_vocab"),
            Flag("rounds", "runs of each kind, of which the median is shown", "N", Integer(1, 1000), "5"),
            Flag("output_json", "write the figures to PATH, - for standard output", "PATH"),
        ),
    ),
    Section(
        "Model",
        (
            Flag("model", "the GGUF file, or any shard of a split one (-m); unset: the embedded demo model", "FILE"),
            *RUN_SECTIONS[0].flags[1:],
        ),
    ),
    RUN_SECTIONS[-1],
)


def main(argv: Sequence[str]) -> int:
    """The subcommand: argv without its name."""
    parsed = parse(argv, SECTIONS)
    values = parsed.values
    if answered(parsed, HELP, SECTIONS):
        return 0
    if parsed.positional:
        raise UsageError(f"unexpected argument {parsed.positional[0]!r}; give the model as --model=FILE.")
    if values["model"] == "":
        raise UsageError("flag --model needs a path; without the flag the embedded demo model is measured.")
    if values["prompt"] is not None and values["prompt_file"] is not None:
        raise UsageError("--prompt and --prompt_file were both given; give one prompt.")
    check_text("prompt", values["prompt"])
    check_paths(values)
    _measure(values)
    return 0


def _measure(values: dict[str, Any]) -> None:
    device.configure(values["platform"], values["threads"], compile_cache=values["compile_cache"])
    path, document_path = values["model"] or str(DEMO_MODEL), values["output_json"]
    model_file.check(path, values["mtp_model"])
    text = values["prompt"] if values["prompt"] is not None else DEMO_PROMPT
    if values["prompt_file"] is not None:
        text = read_text(values["prompt_file"], "prompt")
    if document_path is not None:
        json_file.check_writable(document_path)
    options = {name: values[name] for name in LOAD_FLAGS}
    model = model_file.load(path, values["mtp_model"], values["platform"], options)
    for line in model.notes:
        note(line)
    prompt = model.tokenizer.encode_prompt(text)
    if prompt and values["prompt_tokens"] is not None:
        wanted = values["prompt_tokens"]
        prompt = (prompt * (wanted // len(prompt) + 1))[:wanted]
    found = _with_bar(model, prompt, values)
    for line in _report(found, path, values["threads"] or _processors()):
        note(line) if document_path == "-" else print(line)
    if document_path is not None:
        names = ("mtp_model", *LOAD_FLAGS, "spec_draft_vocab", "platform", "threads")
        options = {"model": path} | {name: values[name] for name in names}
        json_file.write(document_path, {**found.as_dict(), "options": options})


def _with_bar(model: Model, prompt: list[int], values: dict[str, Any]) -> Speed:
    """Measures, with a bar on standard error where that is a terminal."""
    from tqdm import tqdm  # here, not above: --help must not wait for it

    with tqdm(desc="compiling", unit="round", leave=False, disable=None, file=sys.stderr) as bar:

        def show(done: int, rounds: int) -> None:
            bar.total, bar.n = rounds, done
            bar.set_description("measuring" if done else "compiling")  # which draws the bar

        return model.speed(
            prompt,
            max_tokens=values["max_tokens"],
            depth=values["spec_draft_n_max"],
            rounds=values["rounds"],
            threads=values["threads"] or _processors(),
            ctx_size=values["ctx_size"],
            spec_draft_vocab=values["spec_draft_vocab"],
            on_round=show,
        )


def _processors() -> int:
    """Those that this process may use: as many threads as XLA starts by itself."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _report(found: Speed, path: str, threads: int) -> list[str]:
    lines = [
        f"model:     {printable(path)}",
        f"each run:  {found.prompt_tokens} tokens of prompt, {found.max_tokens} decoded, in a context of "
        f"{found.slots}; medians of {found.rounds}",
        f"bandwidth: {found.bandwidth_gb_per_s:.1f} GB/s read, {threads} threads",
        f"prefill:   {found.prefill_tokens_per_s:.1f} tokens/s",
        f"compile:   {found.compile_s:.1f} s, not counted",
        "",
        f"{'K':>2} {'tokens/s':>9} {'ratio':>6} {'accepted':>9} {'tokens/step':>11} {'step ms':>8} {'verify':>7} "
        f"{'draft':>7} {'MB read':>8} {'GB/s':>6} {'share':>6}  ids of K = 0",
    ]
    plain = found.depths[0].tokens_per_s
    for K, depth in enumerate(found.depths):
        accepted = f"{depth.stats.acceptance_rate:.1%}" if K else ""
        lines.append(
            f"{K:>2} {depth.tokens_per_s:>9.1f} {depth.tokens_per_s / plain:>6.2f} {accepted:>9} "
            f"{depth.stats.mean_accepted_length:>11.2f} {depth.step_ms:>8.2f} {found.costs.verify_ms[K]:>7.2f} "
            f"{found.costs.draft_ms[K]:>7.2f} {depth.step_bytes / 1e6:>8.1f} {depth.gb_per_s:>6.1f} "
            f"{found.bandwidth_share(K):>6.1%}  {'yes' if depth.same_ids else 'no'}"
        )
    if len(found.depths) == 1:
        return [*lines, "", "best:      K = 0, the only one: there are no drafts without an MTP head"]
    best = found.best
    advice = f"--spec_draft_n_max={best.K}" if best.K else "--spec_type=none"
    return [*lines, "", f"best:      K = {best.K} ({advice}), {best.tokens_per_s / plain:.2f} times plain decoding"]
