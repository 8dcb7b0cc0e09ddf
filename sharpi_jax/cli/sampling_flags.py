"""The flags of sampling and of the acceptance rules, and their parsers."""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

from absl import flags

from sharpi_jax.cli.flagset import Choice, Flag, Integer, Section
from sharpi_jax.decode.options import ACCEPT_RULES, MAX_DRAFT, MAX_LOGPROBS, RuleOptions, SamplingOptions

_LARGE = 2**31 - 1


class Number(flags.ArgumentParser[float]):
    """A number between two bounds; `upper` None means no limit, though it must be finite."""

    def __init__(self, lower: float, upper: float | None = None, *, open_below: bool = False) -> None:
        self.lower, self.upper, self.open_below = lower, upper, open_below

    def parse(self, argument: str) -> float:
        try:
            value = float(argument)
        except ValueError:
            value = math.nan
        above = value > self.lower if self.open_below else value >= self.lower
        if not (above and value <= (3e38 if self.upper is None else self.upper)):  # false for NaN
            least = f"above {self.lower:g}" if self.open_below else f"of at least {self.lower:g}"
            if self.upper is None:
                raise ValueError(f"must be a number {least}")
            start = f"above {self.lower:g}, at most" if self.open_below else f"from {self.lower:g} to"
            raise ValueError(f"must be a number {start} {self.upper:g}")
        return value


class LogitBias(flags.ArgumentParser[tuple[int, float]]):
    """A token id and what is added to its logit, with its sign between them, as llama.cpp's flag has it."""

    def parse(self, argument: str) -> tuple[int, float]:
        found = re.fullmatch(r"([0-9]{1,9})([+-](?:[0-9]+\.?[0-9]*|\.[0-9]+|inf))", argument)
        if not found or found[2] == "+inf":
            raise ValueError("must be a token id and a signed number, like 15043+1 or 15043-inf")
        return int(found[1]), float(found[2])


SAMPLING = Section(
    "Sampling",
    (
        Flag("temperature", "0 takes the likeliest token; above, tokens are drawn (--temp)", "T", Number(0), "0"),
        Flag("top_k", "draw among the K likeliest tokens; 0 is off", "K", Integer(0, _LARGE), "0"),
        Flag("top_p", "draw among the likeliest tokens whose probabilities reach P; 1 is off", "P", Number(0, 1), "1"),
        Flag(
            "min_p",
            "draw among tokens of at least P times the likeliest one's probability; 0 is off",
            "P",
            Number(0, 1),
            "0",
        ),
        Flag("seed", "of the random numbers: with it the text is the same every time", "N", Integer(0, 2**32 - 1), "0"),
        Flag("repeat_penalty", "divides logits of recent tokens; 1 is off", "X", Number(0, open_below=True), "1"),
        Flag("repeat_last_n", "recent tokens, the prompt's among them; -1 is all", "N", Integer(-1, _LARGE), "64"),
        Flag(
            "logit_bias",
            "added to a token's logit: its id and a signed number, like 15043+1 or 15043-inf",
            "BIAS",
            LogitBias(),
            repeated=True,
        ),
        Flag("min_tokens", "no stop token and no --stop before so many tokens", "N", Integer(0, _LARGE), "0"),
        Flag("max_thinking_tokens", "end thinking after N tokens; unset: no limit", "N", Integer(0, _LARGE)),
        Flag(
            "logprobs",
            "in --output_json, the log-probability of every token, and of the N likeliest ones in its place",
            "N",
            Integer(0, MAX_LOGPROBS),
        ),
    ),
)

ACCEPTANCE = Section(
    "Acceptance of drafts (README.md compares the rules)",
    (
        Flag(
            "accept_rule",
            "auto is greedy_p_min at temperature 0 and sample_match above, both exact. rejection and block keep the "
            "distribution, not the text of a seed. typical, relaxed and threshold are lossy, as greedy_p_min is below "
            "--spec_draft_p_min=1",
            "RULE",
            Choice(*ACCEPT_RULES),
            "auto",
        ),
        Flag("typical_epsilon", "typical: enough probability at any entropy", "P", Number(0, 1), "0.09"),
        Flag("typical_alpha", "typical: share of exp(-entropy) that is enough", "X", Number(0), "0.3"),
        Flag("relaxed_top_k", "relaxed: among the K likeliest", "K", Integer(1, _LARGE), "10"),
        Flag("relaxed_delta", "relaxed: log-probability below the best, at most", "X", Number(0), "0.6"),
        Flag("threshold_single", "threshold: enough probability; 1 is exact", "P", Number(0, 1), "1"),
        Flag("threshold_acc", "threshold: divides the probability", "P", Number(0, 1, open_below=True), "1"),
    ),
)

DRAFT_STOP = (
    Flag(
        "spec_draft_stop_p",
        "stop drafting before a draft of less probability to the DRAFTER, which never changes an exact text; 0 is off. "
        "This is what llama.cpp calls --spec-draft-p-min",
        "P",
        Number(0, 1),
        "0",
    ),
    Flag(
        "spec_draft_stop_top_k",
        "among how many of its candidates that probability is taken: 0 for all, 10 as llama.cpp",
        "K",
        Integer(0, 1000),
        "0",
    ),
    Flag(
        "spec_draft_n_min",
        "propose no drafts where there are fewer than N (--draft-min)",
        "N",
        Integer(0, MAX_DRAFT),
        "0",
    ),
)


def sampling_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """What the flags above say, as arguments of DecodeOptions."""
    names = [f.name for f in (*dataclasses.fields(SamplingOptions), *dataclasses.fields(RuleOptions))]
    names += [flag.name for flag in DRAFT_STOP]
    return {name: values[name] for name in names} | {"logit_bias": tuple(values["logit_bias"] or ())}
