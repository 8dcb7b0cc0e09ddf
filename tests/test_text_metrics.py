"""Divergence, edit distance and reference match, against plain definitions."""

import functools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sharpi_jax.evaluate.text_metrics import edit_distance, first_divergence, matches_reference

IDS = st.lists(st.integers(0, 3), max_size=9)


def by_definition(a, b):
    """Levenshtein's distance as its recursion says it."""

    @functools.cache
    def d(i, j):
        if not (i and j):
            return i + j
        return min(d(i - 1, j) + 1, d(i, j - 1) + 1, d(i - 1, j - 1) + (a[i - 1] != b[j - 1]))

    return d(len(a), len(b))


@settings(deadline=None)
@given(IDS, IDS)
def test_edit_distance_is_that_of_the_recursion(a, b):
    assert edit_distance(a, b) == by_definition(a, b) == edit_distance(b, a)


@pytest.mark.parametrize(
    ("a", "b", "distance"),
    [("kitten", "sitting", 3), ("saturday", "sunday", 3), ("", "", 0), ("", "abc", 3), ("abc", "", 3), ("ab", "ba", 2)],
)
def test_known_distances(a, b, distance):
    assert edit_distance([ord(c) for c in a], [ord(c) for c in b]) == distance


def test_long_outputs_take_well_under_a_second():
    rng = np.random.default_rng(0)
    a = rng.integers(0, 150_000, 1000).tolist()
    cut = [*a[:300], 7, *a[305:]]  # one substitution and four deletions
    begin = time.perf_counter()
    assert edit_distance(a, cut) == 5
    assert time.perf_counter() - begin < 0.5


@settings(deadline=None)
@given(IDS, IDS)
def test_divergence_is_the_length_of_what_is_common(a, b):
    found = first_divergence(a, b)
    assert found == first_divergence(b, a)
    if found is None:
        assert a == b
    else:
        assert a[:found] == b[:found]
        assert a[found : found + 1] != b[found : found + 1]


def test_divergence_of_beginnings():
    assert first_divergence([], []) is None
    assert first_divergence([1, 2], [1, 2]) is None
    assert first_divergence([1, 2], [1, 2, 3]) == 2
    assert first_divergence([], [5]) == 0
    assert first_divergence([1, 2, 3], [1, 9, 3]) == 1


@pytest.mark.parametrize(
    ("text", "matches"),
    [
        ("42", True),
        ("  42\n", True),
        ("6 * 7\n= 42\n42\n\n", True),
        ("42.", False),
        ("= 42", False),
        ("42\nor 43", False),
        ("", False),
        ("4 2", False),
    ],
)
def test_reference(text, matches):
    assert matches_reference(text, "42 ") == matches


def test_reference_keeps_case_and_may_have_lines():
    assert not matches_reference("mercury", "Mercury")
    assert matches_reference("a\nb\n", "a\nb")
    assert not matches_reference("x\na\nb", "a\nb")
