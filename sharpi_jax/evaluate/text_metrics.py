"""How far one output is from another, on token ids, and from a reference answer, on text."""

from collections.abc import Sequence

import numpy as np


def first_divergence(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The first index at which two sequences differ; None where they are equal.

    Where one is the beginning of the other, it is the shorter's length: there one has a token and the other none.
    """
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


def edit_distance(a: Sequence[int], b: Sequence[int]) -> int:
    """Levenshtein's distance: the fewest insertions, deletions and substitutions of single tokens.

    One row of the usual table at a time, O(len(a) * len(b)) operations of NumPy's. Insertions run along the row, each
    on the one before it: entry j is the least over i <= j of `without[i] + (j - i)`, a running minimum.
    """
    other = np.asarray(b, np.int64)
    places = np.arange(len(other) + 1)
    row = places
    for i, token in enumerate(a, start=1):
        without = np.empty_like(row)  # the row without insertions into it
        without[0] = i
        without[1:] = np.minimum(row[1:] + 1, row[:-1] + (other != token))
        row = np.minimum.accumulate(without - places) + places
    return int(row[-1])


def matches_reference(text: str, reference: str) -> bool:
    """Whether an answer is the reference, exactly but for white space around it: case and punctuation count.

    The answer is the whole text or, as work done step by step ends with its result, its last line that is not blank.
    """
    text, wanted = text.strip(), reference.strip()
    return wanted in (text, text.rpartition("\n")[2].strip())
