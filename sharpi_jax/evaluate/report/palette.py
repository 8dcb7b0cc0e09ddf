"""The four ways in which a token comes to be, and their colours in the report and on a terminal.

Blue, orange, purple and grey after the palette of M. Okabe and K. Ito (Color Universal Design, 2008), made paler or
darker until text reads on them; they stay apart for every kind of colour blindness (tests/test_report.py measures it).
"""

import dataclasses
from collections.abc import Sequence

from sharpi_jax.decode.stats import StepRecord


@dataclasses.dataclass(frozen=True)
class Origin:
    """How a token came to be.

    Attributes:
      key: in style sheets. letter: in the data of the token view. name, meaning: for people.
      light, dark: (background, text) on a light and on a dark page. On terminals, whose background is unknown, light.
      ansi: the background on a terminal that has but 16 colours, under black text.
    """

    key: str
    letter: str
    name: str
    meaning: str
    light: tuple[str, str]
    dark: tuple[str, str]
    ansi: str


CERTAIN = Origin(
    "certain",
    "C",
    "certain",
    "the trunk's own choice, after the prompt or after drafts that all passed",
    ("#e4e7eb", "#11161c"),
    ("#2f363e", "#f3f5f7"),
    "white",
)
ARGMAX = Origin(
    "argmax",
    "A",
    "accepted by argmax",
    "a draft that is what the trunk would have chosen",
    ("#a9d5f5", "#11161c"),
    ("#11579c", "#f3f5f7"),
    "cyan",
)
P_MIN = Origin(
    "p-min",
    "P",
    "accepted by p_min",
    "a draft that the trunk would not have chosen but finds likely enough",
    ("#ffc56e", "#11161c"),
    ("#8a5200", "#f3f5f7"),
    "yellow",
)
CORRECTION = Origin(
    "correction",
    "X",
    "correction",
    "the trunk's own choice in place of a draft that was rejected",
    ("#df9cc4", "#11161c"),
    ("#b03b75", "#f3f5f7"),
    "magenta",
)
ORIGINS = (CERTAIN, ARGMAX, P_MIN, CORRECTION)


def verdicts(step: StepRecord) -> str:
    """A letter per draft: A and P emitted, by argmax or by p_min; R rejected; S a stop token; - not reached."""
    letters = []
    for index in range(len(step.drafts)):
        if index < step.accepted:
            letters.append(ARGMAX.letter if step.argmax[index] else P_MIN.letter)
        elif index == step.accepted:
            letters.append("S" if step.passed > step.accepted else "R")
        else:
            letters.append("-")
    return "".join(letters)


def origins(steps: Sequence[StepRecord]) -> list[str]:
    """Per step, the letter of its certain token and those of its drafts."""
    letters, corrected = [], False
    for step in steps:
        own = verdicts(step)
        letters.append((CORRECTION if corrected else CERTAIN).letter + own)
        corrected = "R" in own
    return letters
