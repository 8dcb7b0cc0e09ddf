"""What a run without --model shows: the embedded model, with MTP off and on, side by side."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from sharpi_jax.cli import report
from sharpi_jax.cli.run_flags import RunFlags
from sharpi_jax.cli.terminal import count, note, write_text

if TYPE_CHECKING:  # api imports JAX, and `--help` must not
    from sharpi_jax.api import Generation, Model
    from sharpi_jax.decode.options import DecodeOptions


def is_comparison(flags: RunFlags) -> bool:
    """Whether this run compares: on the embedded model, unless a flag asks for one run and what it has to say."""
    return flags.is_demo and not (flags.chat or flags.trace or flags.output_json) and flags.options.spec_type == "auto"


def compare(model: Model, flags: RunFlags, prompt: str | tuple[int, ...]) -> None:
    """Runs the prompt without and with drafts: the text to standard output, the comparison to standard error."""
    note("the demo model that ships with sharpi_jax; for one of your own give --model=FILE.gguf")
    for line in report.notices(flags, model):
        note(line)
    shown = prompt if isinstance(prompt, str) else ""
    write_text(shown)
    plain_options = dataclasses.replace(flags.options, spec_type="none")
    plain = model.generate(prompt, plain_options, stop=flags.stop, on_text=write_text)
    write_text("\n")
    drafted = model.generate(prompt, flags.options, stop=flags.stop)
    if drafted.output_ids != plain.output_ids:
        note("with MTP on the text is another:")
        write_text(f"{shown}{drafted.text}\n")
    for line in _comparison(plain, drafted, flags.options):
        note(line)


def _comparison(plain: Generation, drafted: Generation, options: DecodeOptions) -> list[str]:
    off, on = plain.timing, drafted.timing
    ratio = f", {on.decode_tokens_per_s / off.decode_tokens_per_s:.2f} times" if off.decode_tokens_per_s else ""
    return [
        f"MTP off:  {report.rate(off.decode_tokens, off.decode_s)}",
        f"MTP on:   {report.rate(on.decode_tokens, on.decode_s)}{ratio}",
        f"outputs:  {_verdict(plain.output_ids, drafted.output_ids, options)}",
        *report.drafting(drafted),
        f"compile:  {off.compile_s + on.compile_s:.2f} s, not counted above",
        report.finish(drafted),
    ]


def _verdict(plain: tuple[int, ...], drafted: tuple[int, ...], options: DecodeOptions) -> str:
    if plain == drafted:
        return f"identical, all {count(len(plain), 'token')}"
    pairs = enumerate(zip(plain, drafted, strict=False))
    same = next((at for at, (a, b) in pairs if a != b), min(len(plain), len(drafted)))
    cause = "a lossy --spec_draft_p_min" if options.rule == "greedy_p_min" else f"--accept_rule={options.rule}"
    why = "which must not happen: please report it" if options.same_text else f"as {cause} allows"
    return f"different from output token {same + 1} on, {why}"
