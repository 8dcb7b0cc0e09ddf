"""The two streams: generated text goes to standard output, everything that is about it to standard error."""

import sys


def write_text(text: str) -> None:
    """Generated text, as it comes; its control characters pass."""
    sys.stdout.write(text)
    sys.stdout.flush()


def note(line: str = "") -> None:
    """One line, written at once: the two streams may be the same terminal."""
    print(line, file=sys.stderr, flush=True)


def printable(text: str) -> str:
    """`text` on one line: characters that a terminal would act on are escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "replace").decode() for c in text)


def count(number: int, noun: str) -> str:
    """`1 token`, `2 tokens`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
