"""`sharpi-jax perplexity`: how well a model predicts a text, and how well its MTP head predicts the model."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sharpi_jax.assets import DEMO_MODEL
from sharpi_jax.cli import device, json_file, model_file
from sharpi_jax.cli.flagset import Flag, Integer, Section, answered, parse
from sharpi_jax.cli.prompt import read_text
from sharpi_jax.cli.run_flags import SECTIONS as RUN_SECTIONS
from sharpi_jax.cli.run_flags import check_paths
from sharpi_jax.cli.terminal import count, note, printable
from sharpi_jax.cli.usage import UsageError

if TYPE_CHECKING:  # api imports JAX, and `--help` must not
    from sharpi_jax.api import Model
    from sharpi_jax.evaluate.perplexity import Perplexity

HELP = """\
sharpi-jax perplexity: how well a model predicts a text, measured as llama.cpp's tool of that name does. Where the
model has an MTP head: how often the head's draft is the model's own choice, the figure that acceptance comes from.

usage: sharpi-jax perplexity --model=FILE.gguf --file=TEXT [flags]"""

_MODEL_FLAGS = {flag.name: flag for flag in RUN_SECTIONS[0].flags}
SECTIONS = (
    Section(
        "Perplexity",
        (
            Flag("model", "the GGUF file, or any shard of a split one (-m); unset: the embedded demo model", "FILE"),
            _MODEL_FLAGS["mtp_model"],
            Flag("file", "a UTF-8 text, - for standard input; a final newline is dropped", "FILE"),
            Flag("ctx_size", "tokens per window, of which the second half is scored (-c)", "N", Integer(1), "512"),
            Flag("output_json", "write the figures to PATH, - for standard output", "PATH"),
            _MODEL_FLAGS["dtype"],
            dataclasses.replace(_MODEL_FLAGS["cache_dtype"], default="float32"),
            _MODEL_FLAGS["engine"],
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
        raise UsageError(f"unexpected argument {parsed.positional[0]!r}; give the text as --file=FILE.")
    if not values["file"]:
        raise UsageError("flag --file needs a path; give --file=TEXT.")
    if values["model"] == "":
        raise UsageError("flag --model needs a path; without the flag the embedded demo model is measured.")
    check_paths(values)
    _measure(values)
    return 0


def _measure(values: dict[str, Any]) -> None:
    device.configure(values["platform"], values["threads"], compile_cache=values["compile_cache"])
    path, document_path = values["model"] or str(DEMO_MODEL), values["output_json"]
    model_file.check(path, values["mtp_model"])
    text = read_text(values["file"], "text")
    if document_path is not None:
        json_file.check_writable(document_path)
    types = {name: values[name] for name in ("dtype", "cache_dtype", "engine")}
    model = model_file.load(path, values["mtp_model"], values["platform"], types)
    for line in model.notes:
        note(line)
    found = _with_bar(model, text, values["ctx_size"])
    for line in _report(found, values["file"]):
        note(line) if document_path == "-" else print(line)
    if document_path is not None:
        names = ("mtp_model", "file", "ctx_size", "dtype", "cache_dtype", "engine", "platform", "threads")
        options = {"model": path} | {name: values[name] for name in names}
        json_file.write(document_path, {**found.as_dict(), "options": options})


def _with_bar(model: Model, text: str, ctx_size: int) -> Perplexity:
    """Measures, with a bar on standard error where that is a terminal."""
    from tqdm import tqdm  # here, not above: --help must not wait for it

    with tqdm(desc="perplexity", unit="window", leave=False, disable=None, file=sys.stderr) as bar:

        def show(found: Perplexity, windows: int) -> None:
            bar.total, bar.n = windows, found.windows
            bar.set_postfix_str(f"{found.perplexity:.4f}")  # which draws the bar

        return model.perplexity(text, ctx_size=ctx_size, on_progress=show)


def _report(found: Perplexity, source: str) -> list[str]:
    agreement = found.agreement
    if agreement is None:
        head = "none in this file"
    else:
        rates = (
            f"{d}: {agreement.rate(d):.1%} ± {agreement.standard_error(d):.1%}"
            for d in range(1, len(agreement.hits) + 1)
        )
        head = "drafts that are the model's own choice, by depth, on the text's tokens: " + "  ".join(rates)
    return [
        f"text:           {printable(source)}, {count(found.windows, 'window')} of {found.ctx_size} tokens, "
        f"{count(found.tokens, 'token')} scored",
        f"perplexity:     {found.perplexity:.4f} ± {found.perplexity_error:.4f}",
        f"nats per token: {found.nats_per_token:.4f} ± {found.nats_error:.4f}",
        f"bits per byte:  {found.bits_per_byte:.4f}",
        f"MTP head:       {head}",
    ]
