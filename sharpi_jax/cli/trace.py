r"""The lines of `--trace_mtp`: one per step, in the manner of SharpInference's `[mtp]` lines.

    [mtp] P=42 t1=258 " the" | d1=355 " mirror" p=0.9731 ACCEPT | d2=297 " w" p=0.0817 ACCEPT(p_min) \
        | d3=30 "?" p=0.0004 reject | correction=293 " It"

P is the certain token's position (from 0, the prompt included), t1 that token, d1..dk the drafts for the positions
after it; p is the *target's* probability of the draft. The verdicts:
  ACCEPT          emitted; the draft is what the target itself chooses: its argmax, or its draw
  ACCEPT(p_min)   emitted; it is not, and its probability reaches --spec_draft_p_min (or ACCEPT(rule), by that rule)
  stop            the rule let it through, and it is a stop token: the text ends before it
  reject          the first draft that the rule did not let through
  -               after a rejection or a stop: not reached, so its probability decided nothing
The last field is the certain token of the next step: `correction` after a rejection, `bonus` after a full accept;
after a stop there is none. A line depends on the step alone: no times. On a terminal trace_colour.py colours it.
"""

from collections.abc import Callable

from sharpi_jax.cli.terminal import printable
from sharpi_jax.decode.stats import StepRecord


def trace_line(step: StepRecord, token_text: Callable[[int], str], rule: str = "p_min") -> str:
    """The line of one step.

    Args:
      step: the record.
      token_text: a token's text, for people. rule: what accepts other tokens than the target's own.
    """
    return "".join(text for text, _ in trace_pieces(step, token_text, rule))


def trace_pieces(step: StepRecord, token_text: Callable[[int], str], rule: str = "p_min") -> list[tuple[str, str]]:
    """The line in pieces, each with the letter of how its token came to be (evaluate.report.palette), or with ""."""

    def shown(token: int) -> str:
        return f'{token} "{printable(token_text(token))}"'

    pieces = [(f"[mtp] P={step.position} ", ""), (f"t1={shown(step.token)}", "C")]
    for index, draft in enumerate(step.drafts):
        text = f"d{index + 1}={shown(draft)} p={step.probabilities[index]:.4f} {_verdict(step, index, rule)}"
        letter = ("A" if draft == step.choices[index] else "P") if index < step.accepted else ""
        pieces += [(" | ", ""), (text, letter)]
    if step.passed == step.accepted:
        name, letter = ("bonus", "C") if step.accepted == len(step.drafts) else ("correction", "X")
        pieces += [(" | ", ""), (f"{name}={shown(step.next_token)}", letter)]
    return pieces


def _verdict(step: StepRecord, index: int, rule: str) -> str:
    if index < step.accepted:
        return "ACCEPT" if step.drafts[index] == step.choices[index] else f"ACCEPT({rule})"
    if index == step.accepted:
        return "stop" if step.passed > step.accepted else "reject"
    return "-"
