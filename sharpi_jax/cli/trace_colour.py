"""A step's line on standard error: in the colours of a report's token view where that is a terminal, else plain."""

import os
import sys
from collections.abc import Callable

from sharpi_jax.cli.terminal import note
from sharpi_jax.cli.trace import trace_line, trace_pieces
from sharpi_jax.decode.stats import StepRecord


def note_step(step: StepRecord, token_text: Callable[[int], str], rule: str) -> None:
    """Writes the line of one step, as trace.py has it: in colours on a terminal that has any, unless NO_COLOR."""
    if not sys.stderr.isatty() or os.environ.get("NO_COLOR"):
        note(trace_line(step, token_text, rule))
        return
    # here, not above: --help must not wait for them
    from rich.console import Console
    from rich.text import Text

    from sharpi_jax.evaluate.report.palette import ORIGINS

    console = Console(file=sys.stderr, highlight=False, soft_wrap=True)
    if console.color_system is None:  # a terminal without colours
        note(trace_line(step, token_text, rule))
        return
    styles = {}
    for origin in ORIGINS:
        background, text = origin.light
        few = console.color_system == "standard"
        styles[origin.letter] = f"black on {origin.ansi}" if few else f"{text} on {background}"
    pieces = trace_pieces(step, token_text, rule)
    console.print(Text.assemble(*((text, styles.get(letter, "")) for text, letter in pieces)))
