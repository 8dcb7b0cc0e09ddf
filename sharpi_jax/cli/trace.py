r"""The lines of `--trace_mtp`: one per step, in the manner of SharpInference's `[mtp]` lines.

    [mtp] P=42 t1=258 " the" | d1=355 " mirror" p=0.9731 ACCEPT | d2=297 " w" p=0.0817 ACCEPT(p_min) \
        | d3=30 "?" p=0.0004 reject | correction=293 " It"

P is the certain token's position (from 0, the prompt included), t1 that token, d1..dk the drafts for the positions
after it; p is the *target's* probability of the draft. The verdicts:
  ACCEPT          emitted; the draft is the target's argmax
  ACCEPT(p_min)   emitted; it is not the argmax, and its probability reaches --spec_draft_p_min
  stop            the rule let it through, and it is a stop token: the text ends before it
  reject          the first draft that the rule did not let through
  -               after a rejection or a stop: not reached, so its probability decided nothing
The last field is the certain token of the next step: `correction` after a rejection, `bonus` after a full accept;
after a stop there is none. A line depends on the step alone: no times, no colours.
"""

from collections.abc import Callable

from sharpi_jax.cli.terminal import printable
from sharpi_jax.decode.stats import StepRecord


def trace_line(step: StepRecord, token_text: Callable[[int], str]) -> str:
    """The line of one step.

    Args:
      step: the record.
      token_text: a token's text, for people.
    """

    def shown(token: int) -> str:
        return f'{token} "{printable(token_text(token))}"'

    fields = [f"[mtp] P={step.position} t1={shown(step.token)}"]
    for index, draft in enumerate(step.drafts):
        fields.append(f"d{index + 1}={shown(draft)} p={step.probabilities[index]:.4f} {_verdict(step, index)}")
    if step.passed == step.accepted:
        fields.append(f"{'bonus' if step.accepted == len(step.drafts) else 'correction'}={shown(step.next_token)}")
    return " | ".join(fields)


def _verdict(step: StepRecord, index: int) -> str:
    if index < step.accepted:
        return "ACCEPT" if step.argmax[index] else "ACCEPT(p_min)"
    if index == step.accepted:
        return "stop" if step.passed > step.accepted else "reject"
    return "-"
