"""`sharpi-jax eval`: what lossless and lossy drafting gain and lose, over many prompts, as a table and as a report."""

from __future__ import annotations

import errno
import math
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from absl import flags

from sharpi_jax.assets import DEMO_MODEL
from sharpi_jax.cli import device, json_file, model_file
from sharpi_jax.cli.flagset import Choice, Flag, Integer, Section, answered, parse
from sharpi_jax.cli.run_flags import LOAD_FLAGS, check_paths
from sharpi_jax.cli.run_flags import SECTIONS as RUN_SECTIONS
from sharpi_jax.cli.terminal import count, note
from sharpi_jax.cli.usage import UsageError
from sharpi_jax.decode.options import MAX_DRAFT
from sharpi_jax.errors import OptionError

if TYPE_CHECKING:  # these import JAX, and `--help` must not
    from sharpi_jax.evaluate.prompts import Prompt
    from sharpi_jax.evaluate.results import Evaluation
    from sharpi_jax.evaluate.sweep import Progress

HELP = """\
sharpi-jax eval: what drafting gains on your prompts and what a lossy --spec_draft_p_min costs. Decodes every prompt
greedily, then with each number of drafts and each threshold, in batches; says how fast each setting is, how many drafts
are accepted, and how far the text leaves that of greedy decoding. With --report_dir it writes report.html,
summary.json, results.csv and results.jsonl there; a run that was interrupted goes on from there when the same command
is given again.

usage: sharpi-jax eval --model=FILE.gguf --prompts=FILE.jsonl --report_dir=FOLDER [flags]"""

_BAR_S = 0.1  # between two looks of the bar


class _Numbers(flags.ArgumentParser[tuple[Any, ...]]):
    """Numbers separated by commas."""

    def __init__(self, kind: Callable[[str], Any], fits: Callable[[Any], bool], wanted: str) -> None:
        self._kind, self._fits, self._wanted = kind, fits, wanted

    def parse(self, argument: str) -> tuple[Any, ...]:
        found = []
        for part in argument.split(","):
            try:
                value = self._kind(part.strip())
            except ValueError:
                value = None
            if value is None or not self._fits(value):
                raise ValueError(f"must be {self._wanted}, separated by commas, and {part.strip()!r} is none")
            found.append(value)
        return tuple(found)


class _Cost(flags.ArgumentParser[float]):
    """A number of at least 0."""

    def parse(self, argument: str) -> float:
        try:
            value = float(argument)
        except ValueError:
            value = math.nan
        if not 0 <= value < math.inf:
            raise ValueError("must be a number of at least 0")
        return value


_P_MIN = _Numbers(float, lambda p: 0 < p <= 1, "numbers above 0 and at most 1")
_N_MAX = _Numbers(lambda text: int(text, 10), lambda K: 0 <= K <= MAX_DRAFT, f"integers from 0 to {MAX_DRAFT}")
_MODEL_FLAGS = {flag.name: flag for flag in RUN_SECTIONS[0].flags}
SECTIONS = (
    Section(
        "Evaluation",
        (
            Flag(
                "prompts",
                "a JSONL file: prompt, messages or prompt_ids, and optionally id, domain, max_tokens and reference; "
                "unset: prompts that ship with the package",
                "FILE",
            ),
            Flag(
                "on_error", "a bad line or prompt: stop, or skip it with a note", "DO", Choice("stop", "skip"), "stop"
            ),
            Flag("sweep_p_min", "acceptance thresholds; 1 is exact", "P,P,...", _P_MIN, "1,0.5,0.3,0.1,0.03"),
            Flag(
                "sweep_n_max", "drafts per step; none, greedy decoding, is always there", "N,N,...", _N_MAX, "1,2,3,4"
            ),
            Flag("max_tokens", "tokens to write for each prompt at most (-n)", "N", Integer(1, 2**31 - 1), "128"),
            Flag("batch_size", "prompts that decode together", "N", Integer(1, 1024), "16"),
            Flag(
                "rounds",
                "timed runs of each setting, of which the median is shown; 0: none",
                "N",
                Integer(0, 1000),
                "3",
            ),
            Flag("draft_cost", "other hardware: what a draft costs, in steps of plain decoding", "X", _Cost(), "0.05"),
            Flag("verify_cost", "other hardware: what verifying a draft adds to a step", "X", _Cost(), "0.02"),
            Flag("report_dir", "write the report to this folder, and go on from what it holds", "FOLDER"),
            Flag("output_json", "write the figures to PATH, - for standard output", "PATH"),
        ),
    ),
    Section(
        "Model",
        (
            Flag("model", "the GGUF file, or any shard of a split one (-m); unset: the embedded demo model", "FILE"),
            _MODEL_FLAGS["mtp_model"],
            *(_MODEL_FLAGS[name] for name in LOAD_FLAGS),
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
        raise UsageError(f"unexpected argument {parsed.positional[0]!r}; give the prompts as --prompts=FILE.")
    for name in ("model", "prompts", "report_dir"):
        if values[name] == "":
            raise UsageError(f"flag --{name} needs a path; leave it out or give one.")
    check_paths(values)
    return _evaluate(values, f"sharpi-jax eval {shlex.join(argv)}".rstrip())


def _evaluate(values: dict[str, Any], command: str) -> int:
    device.configure(values["platform"], values["threads"], compile_cache=values["compile_cache"])
    path, folder, document_path = values["model"] or str(DEMO_MODEL), values["report_dir"], values["output_json"]
    model_file.check(path, values["mtp_model"])
    if folder is not None:
        _check_folder(folder)
    if document_path is not None:
        json_file.check_writable(document_path)
    # here, not above: they import JAX
    from sharpi_jax.evaluate.results import CostModel
    from sharpi_jax.evaluate.sweep import Sweep

    prompts = _prompts(values)
    sweep = Sweep(*(values[name] for name in ("sweep_p_min", "sweep_n_max", "max_tokens", "batch_size", "rounds")))
    options = {name: values[name] for name in LOAD_FLAGS}
    last = None
    try:
        model = model_file.load(path, values["mtp_model"], values["platform"], options)
        for line in model.notes:
            note(line)
        with _bar() as show:

            def follow(progress: Progress) -> None:
                nonlocal last
                last = progress
                show(progress)

            found = model.evaluate(
                prompts,
                sweep,
                report_dir=folder,
                cost=CostModel(values["draft_cost"], values["verify_cost"]),
                details=(("command", command),),
                on_fault=(lambda fault: note(f"skipped: {fault}")) if values["on_error"] == "skip" else None,
                on_progress=follow,
            )
    except KeyboardInterrupt:
        note(_interrupted(last, folder))
        return 130
    _show(found, folder, to_error=document_path == "-")
    if document_path is not None:
        names = ("mtp_model", *LOAD_FLAGS, "platform", "threads")
        chosen = {"model": path} | {name: values[name] for name in names}
        json_file.write(document_path, {**found.as_dict(), "options": chosen})
    return 0


def _prompts(values: dict[str, Any]) -> list[Prompt] | None:
    """The prompts of the file, with a note for each line that was skipped; None for those of the package."""
    from sharpi_jax.evaluation_files import read_prompts

    if values["prompts"] is None:
        if values["model"] is None:
            note("the demo model and prompts of its own domain; for yours: --model=FILE.gguf --prompts=FILE.jsonl")
        else:
            note("the prompts that ship with the package; for yours: --prompts=FILE.jsonl")
        return None
    prompts, faults = read_prompts(values["prompts"], on_error=values["on_error"])
    for fault in faults:
        note(f"skipped: {fault}")
    return prompts


def _check_folder(folder: str) -> None:
    """Makes the folder, and a file in it that goes at once.

    Raises:
      OptionError: that cannot be done.
    """
    try:
        os.makedirs(folder, exist_ok=True)
        if os.path.isdir(os.path.join(folder, "report.html")):
            raise IsADirectoryError(errno.EISDIR, "report.html is a folder in it")
        tempfile.TemporaryFile(dir=folder).close()
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise OptionError(f"--report_dir={folder} cannot be written: {reason}.") from error


@contextmanager
def _bar() -> Iterator[Callable[[Progress], None]]:
    """What shows progress: a bar on standard error, where that is a terminal."""
    from tqdm import tqdm  # here, not above: --help must not wait for it

    with tqdm(desc="decoding", unit="run", leave=False, disable=None, file=sys.stderr) as bar:
        shown = -math.inf

        def show(progress: Progress) -> None:
            nonlocal shown
            if time.monotonic() - shown < _BAR_S and progress.done < progress.total:
                return
            shown = time.monotonic()
            bar.total, bar.n = progress.total, progress.done
            bar.set_description(progress.stage, refresh=False)
            bar.set_postfix_str(_figures(progress))  # which draws the bar

        yield show


def _figures(progress: Progress) -> str:
    parts = []
    if progress.seconds > 0:
        parts.append(f"{progress.tokens / progress.seconds:.0f} tokens/s")
    if progress.drafted:
        parts.append(f"{progress.accepted / progress.drafted:.1%} accepted")
    return ", ".join(parts)


def _interrupted(progress: Progress | None, folder: str | None) -> str:
    if folder is None:
        return "interrupted; nothing is kept without --report_dir."
    if progress is None:
        return f"interrupted; {folder} holds what it held before."
    done = f"{progress.done} of {count(progress.total, 'run')}" if progress.stage == "decoding" else "all runs"
    return f"interrupted with {done} in {folder}; the same command goes on from there."


def _show(found: Evaluation, folder: str | None, *, to_error: bool) -> None:
    """The table, and what it was made of: on standard output, or on standard error where that holds a document."""
    from sharpi_jax.evaluate.report.table import table

    headings, rows = table(found)
    stream = sys.stderr if to_error else sys.stdout
    if stream.isatty():
        from rich.console import Console
        from rich.table import Table

        drawn = Table(*headings, header_style="bold")
        for column in drawn.columns:
            column.justify = "right"
        for row in rows:
            drawn.add_row(*row)
        Console(file=stream).print(drawn)
    else:
        widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
        for row in (headings, *rows):
            print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)), file=stream)
    details, prompts = dict(found.details), {result.prompt_id for result in found.results}
    print(
        f"prompts: {len(prompts)}, timed: {details['prompts timed']}, batch size {details['batch size']}",
        f"compiled: {found.compilations} programs, {details['decode loops among the programs']} of them decode loops, "
        f"in {details['time spent compiling, not counted']}, not counted",
        f"report: {os.path.join(folder, 'report.html')}"
        if folder
        else "report: none; for one give --report_dir=FOLDER",
        sep="\n",
        file=stream,
        flush=True,
    )
