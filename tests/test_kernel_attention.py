"""The C++ kernel for attention in decode windows, every path of it, against float64 softmax attention."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels import lines_by_threads, needs_compiler
from models import same_bits

from sharpi_jax import kernel
from sharpi_jax.model import attention
from sharpi_jax.model.cache import BLOCK, KVCache, from_stored, to_stored
from sharpi_jax.model.window import Window, window_at

pytestmark = needs_compiler

PATHS = kernel.paths_here()
RANGE = 256  # slots that a thread takes, in attention.cc
attend = jax.jit(attention._by_kernel, static_argnames="path")


@dataclasses.dataclass
class Case:
    """Queries [B, T, N, G, E], caches of S slots, and where each row's window starts."""

    q: np.ndarray
    cache: KVCache
    starts: np.ndarray

    @staticmethod
    def random(starts, T, N, G, E, S, dtype="float16", seed=0):
        rng = np.random.default_rng(seed)
        starts = np.asarray(starts, np.int32)
        shape = (len(starts), S, N, E)
        k, v = (to_stored(jnp.asarray(rng.standard_normal(shape, np.float32)), jnp.dtype(dtype)) for _ in range(2))
        q = rng.standard_normal((len(starts), T, N, G, E), np.float32) * np.float32(E**-0.5)
        return Case(q, KVCache(k, v), starts)

    def run(self, path, T=None, rows=slice(None), slots=None):
        """The first T queries of some rows, in the first slots of the caches."""
        T = T or self.q.shape[1]
        starts = jnp.asarray(self.starts[rows])
        window = window_at(starts, jnp.full(starts.shape, T, jnp.int32), T, row_exact=True)
        cache = KVCache(self.cache.k[rows, :slots], self.cache.v[rows, :slots])
        return np.asarray(attend(self.q[rows, :T], window, cache, path=path))

    def assert_close(self, got):
        keys, values = (np.asarray(from_stored(x), np.float64) for x in (self.cache.k, self.cache.v))
        for row, t in np.ndindex(self.q.shape[:2]):
            seen = self.starts[row] + t + 1
            scores = np.einsum("nge,sne->ngs", self.q[row, t].astype(np.float64), keys[row, :seen])
            shares = np.exp(scores - scores.max(-1, keepdims=True))
            shares /= shares.sum(-1, keepdims=True)
            want = np.einsum("ngs,sne->nge", shares, values[row, :seen])
            size = np.einsum("ngs,sne->nge", shares, np.abs(values[row, :seen]))
            assert (np.abs(got[row, t] - want) <= 2e-6 * np.maximum(size, 1)).all(), (row, t)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", ["float16", "uint16", "float32"])
@pytest.mark.parametrize(
    ("starts", "T", "N", "G", "E"),
    [
        ([0], 1, 2, 4, 256),
        ([BLOCK - 2, 2 * BLOCK - 1], 4, 2, 4, 256),
        ([RANGE - 5, BLOCK, 2 * RANGE], 9, 2, 3, 80),
        ([BLOCK - 1], 2, 3, 1, 16),
        ([RANGE - 1, 0], 5, 1, 7, 64),
        ([2 * RANGE - 3], 3, 1, 2, 20),
        ([RANGE], 1, 2, 5, 8),
    ],
)
def test_it_is_float64s(starts, T, N, G, E, dtype, path):
    case = Case.random(starts, T, N, G, E, max(starts) + T, dtype)
    case.assert_close(case.run(path))


@pytest.mark.parametrize("path", PATHS)
def test_every_length_around_a_block(path):
    for T in range(1, 10):
        case = Case.random([BLOCK - T - 1, BLOCK - T, BLOCK - T + 1], T, 1, 4, 16, 2 * BLOCK + 3, seed=T)
        case.assert_close(case.run(path))


@pytest.mark.parametrize("path", PATHS)
def test_large_and_equal_scores(path):
    """One slot takes nearly all of the weight, wherever it stands; or all have the same."""
    N, E, S = 2, 16, RANGE + BLOCK + 7
    case = Case.random([S - 2], 2, N, 3, E, S, "float32")
    case.q[:] = 0
    case.q[..., 0] = 1
    for peak in (0, BLOCK - 1, RANGE, S - 2):
        keys = np.full((1, S, N, E), -80, np.float32)
        keys[:, peak] = 80
        peaked = dataclasses.replace(case, cache=KVCache(jnp.asarray(keys), case.cache.v))
        peaked.assert_close(peaked.run(path))
    for score in (-80, 0, 80):
        keys = jnp.full((1, S, N, E), score, jnp.float32)
        equal = dataclasses.replace(case, cache=KVCache(keys, case.cache.v))
        equal.assert_close(equal.run(path))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("G", [1, 3, 4])
def test_a_querys_bits_do_not_depend_on_the_others(G, path):
    """Neither on later queries of its window, nor on other rows, nor on how many slots there are."""
    case = Case.random([RANGE - 3, BLOCK - 1, 5], 9, 2, G, 64, 3 * RANGE)
    whole = case.run(path)
    for T in range(1, 9):
        assert same_bits(case.run(path, T, slots=RANGE + 6), whole[:, :T])
    for row in range(3):
        assert same_bits(case.run(path, rows=slice(row, row + 1)), whole[row : row + 1])
    for t in range(9):
        alone = dataclasses.replace(case, q=case.q[:, t:], starts=case.starts + t)
        assert same_bits(alone.run(path, 1), whole[:, t : t + 1])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_what_lies_past_a_query_leaves_no_trace(dtype, path):
    """A NaN in a later slot must not even be multiplied by a weight of 0."""
    case = Case.random([RANGE - 2, 3], 4, 2, 3, 32, 2 * RANGE, dtype)
    whole = case.run(path)
    for t in range(4):
        later = np.arange(2 * RANGE)[None] > case.starts[:, None] + t
        k, v = (jnp.where(later[:, :, None, None], jnp.nan, x).astype(x.dtype) for x in (case.cache.k, case.cache.v))
        spoilt = dataclasses.replace(case, cache=KVCache(k, v))
        assert same_bits(spoilt.run(path)[:, : t + 1], whole[:, : t + 1])


@pytest.mark.parametrize("path", PATHS)
def test_padding_changes_nothing_and_is_zero(path):
    case = Case.random([BLOCK - 2, 7, 0], 4, 2, 3, 32, 2 * BLOCK)
    counts = np.array([4, 2, 0])
    window = window_at(jnp.asarray(case.starts), jnp.asarray(counts), 4, row_exact=True)
    got = np.asarray(attend(case.q, window, case.cache, path=path))
    whole = case.run(path)
    for row, count in enumerate(counts):
        assert same_bits(got[row, :count], whole[row, :count])
        assert not got[row, count:].any()


@pytest.mark.parametrize("path", PATHS)
def test_float16s_smallest_numbers(path):
    case = Case.random([BLOCK], 2, 1, 1, 32, 2 * BLOCK)
    tiny = (np.asarray(case.cache.v, np.float32) * 2.0**-18).astype(np.float16)
    got = dataclasses.replace(case, cache=KVCache(case.cache.k, jnp.asarray(tiny))).run(path)
    large = dataclasses.replace(case, cache=KVCache(case.cache.k, jnp.asarray(tiny.astype(np.float32) * 2**18)))
    large.cache = KVCache(case.cache.k.astype(jnp.float32), large.cache.v)
    large.assert_close(got * np.float32(2**18))


def test_many_threads_give_the_bits_of_one():
    script = """
import hashlib
from test_kernel_attention import Case, PATHS
for path in PATHS:
    for starts in ([1500], [40, 700]):
        print(hashlib.sha256(Case.random(starts, 4, 2, 4, 64, 1600).run(path).tobytes()).hexdigest())
"""
    one, two, five = lines_by_threads(script)
    assert len(one) == 2 * len(PATHS)
    assert one == two == five


# --- where it is used -------------------------------------------------------------------------------------------------


def compiled(row_exact):
    case = Case.random([5], 2, 2, 4, 32, BLOCK)
    window = Window(jnp.array([[5, 6]]), jnp.ones((1, 2), bool), 2, row_exact)
    run = functools.partial(jax.jit(attention._attend), jnp.asarray(case.q), window, case.cache)
    return run(), jax.jit(attention._attend).lower(jnp.asarray(case.q), window, case.cache).as_text()


def test_decode_windows_use_it_and_prompts_do_not():
    (exact, exact_text), (prompt, prompt_text) = compiled(True), compiled(False)
    assert "sharpi_attention" in exact_text
    assert "sharpi_attention" not in prompt_text
    assert np.abs(exact - prompt).max() < 2e-6


def test_without_it_xlas_form_serves(monkeypatch):
    monkeypatch.setattr(attention.kernel, "problem", lambda: "there is no compiler")
    jax.clear_caches()
    _, text = compiled(True)
    assert "sharpi_attention" not in text
