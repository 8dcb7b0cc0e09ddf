"""Host-side statistics and per-step records, in the words of the design (section 7)."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Counts of one row's decoding.

    Attributes:
      steps: verify passes made while the row was unfinished.
      drafted: drafts proposed (masked to the row's k), of which accepted were emitted.
      accepted: accepted drafts that were emitted (clamped at a stop token, the budget or the context).
      accepted_argmax: those of them that equal the target's argmax; accepted_p_min are the others.
      drafted_per_position: entry j counts the steps that proposed draft j+1.
      accepted_per_position: entry j counts the steps whose draft j+1 was emitted; sums to accepted.
    """

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_argmax: int = 0
    accepted_p_min: int = 0
    drafted_per_position: tuple[int, ...] = ()
    accepted_per_position: tuple[int, ...] = ()

    @property
    def acceptance_rate(self) -> float:
        """accepted / drafted; 0 when nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def mean_accepted_length(self) -> float:
        """Tokens emitted per verify pass: 1 + accepted / steps; 0 when no step was made."""
        return 1 + self.accepted / self.steps if self.steps else 0.0

    def as_dict(self) -> dict[str, Any]:
        """All counts and both ratios, ready for JSON."""
        fields = {
            name: list(value) if isinstance(value, tuple) else value for name, value in dataclasses.asdict(self).items()
        }
        return fields | {
            "acceptance_rate": self.acceptance_rate,
            "mean_accepted_length": self.mean_accepted_length,
        }


@dataclasses.dataclass(frozen=True)
class Timing:
    """Wall-clock seconds of one run, compilation apart: prefill and decode include no compilation."""

    prefill_tokens: int = 0
    prefill_s: float = 0.0
    decode_tokens: int = 0
    decode_s: float = 0.0
    compile_s: float = 0.0

    @property
    def prefill_tokens_per_s(self) -> float:
        return self.prefill_tokens / self.prefill_s if self.prefill_s > 0 else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        return self.decode_tokens / self.decode_s if self.decode_s > 0 else 0.0

    def as_dict(self) -> dict[str, float]:
        """The three figures of the JSON report."""
        return {
            "prefill_tokens_per_s": self.prefill_tokens_per_s,
            "decode_tokens_per_s": self.decode_tokens_per_s,
            "compile_s": self.compile_s,
        }


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """What one step did, for the trace.

    Attributes:
      position: the certain token's position (prompt included, from 0).
      token: the certain token, emitted at `position`.
      drafts: the k drafts proposed for the positions after it.
      probabilities: the target's probability of each draft.
      argmax: whether each draft is the target's argmax.
      accepted: how many drafts were emitted, from the first on.
      passed: how many drafts the rule let through; more than `accepted` only where a stop token cut them short.
      next_token: the certain token of the next step: the correction when a draft was rejected, else the bonus.
      choices: what the target by itself would emit at each of the k+1 positions: its argmax, or its draw.
    """

    position: int
    token: int
    drafts: tuple[int, ...]
    probabilities: tuple[float, ...]
    argmax: tuple[bool, ...]
    accepted: int
    passed: int
    next_token: int
    choices: tuple[int, ...]

    def as_dict(self) -> dict[str, Any]:
        return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()}


@dataclasses.dataclass(frozen=True)
class TokenLogProb:
    """Natural log-probabilities at one emitted token, the model's own: before biases, penalties and temperature.

    Attributes:
      token: its id. logprob: of it. top: (id, log-probability) of the likeliest tokens, descending.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]

    def as_dict(self) -> dict[str, Any]:
        return {"token": self.token, "logprob": self.logprob, "top": [[i, value] for i, value in self.top]}
