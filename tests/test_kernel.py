"""The C++ kernel, every path of it, against float64 arithmetic on gguf's dequantised weights."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from blocks import BLOCKS, from_gguf, random_raw
from kernels import lines_by_threads, needs_compiler
from models import same_bits

from sharpi_jax import kernel
from sharpi_jax.errors import OptionError
from sharpi_jax.kernel import build
from sharpi_jax.model import norms
from sharpi_jax.quant import FORMATS, choose_engine, matmul, native, pack, take_matrix

pytestmark = needs_compiler

ROUNDING = 2.0**-24  # of float32, half an ulp of 1
PATHS = kernel.paths_here()
multiply = jax.jit(native.matmul, static_argnames=("int8", "path"))


def shapes(name):
    """(input features, output features, rows): one block, an odd number of them, many; columns around a tile's 16."""
    size = FORMATS[name].block_size
    return ((size, 1, 1), (3 * size, 17, 5), (9 * size if size == 32 else 5 * size, 33, 16), (8 * size, 15, 2))


def to_int8(x):
    """x as blocks of 32 whole numbers from -127 to 127 times their scale, in float64, and how near a number lies to a
    tie, where float32 may round to the other side."""
    blocks = x.astype(np.float64).reshape(len(x), -1, 32)
    scale = np.abs(blocks).max(-1, keepdims=True) / 127
    steps = np.divide(blocks, scale, out=np.zeros_like(blocks), where=scale > 0)
    return (np.rint(steps) * scale).reshape(x.shape), np.abs(steps % 1 - 0.5).min()


def test_the_paths_are_those_of_the_processor():
    assert PATHS[-1] == "portable"
    assert list(PATHS) == [path for path in kernel.PATHS if path in PATHS]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", BLOCKS)
def test_float32_products_are_those_of_the_dequantised_weights(name, path):
    for K, N, rows in shapes(name):
        raw = random_raw(name, N, K, seed=N)
        x = np.random.default_rng(K).standard_normal((rows, K), np.float32)
        weights = from_gguf(raw, name).astype(np.float64)
        got = np.asarray(multiply(x, pack(raw, name, "t", "native"), int8=False, path=path))
        size = np.abs(x).astype(np.float64) @ np.abs(weights.T)
        assert got.shape == (rows, N)
        assert (np.abs(got - x.astype(np.float64) @ weights.T) <= 4 * ROUNDING * size).all(), (K, N, rows)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", BLOCKS)
def test_the_product_with_the_identity_is_the_weights(name, path):
    raw = random_raw(name, 40, 512, seed=6)
    got = np.asarray(multiply(np.eye(512, dtype=np.float32), pack(raw, name, "t", "native"), int8=False, path=path))
    assert same_bits(got.T + 0.0, from_gguf(raw, name) + 0.0)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", BLOCKS)
def test_int8_products_are_those_of_the_rounded_activations(name, path):
    """Whole numbers within a group are exact, so all that is left is the rounding of scales and of sums over groups."""
    for K, N, rows in shapes(name):
        raw = random_raw(name, N, K, seed=N)
        x = np.random.default_rng(K + 7).standard_normal((rows, K), np.float32)
        x[0] *= 1e-3
        if K > 32:
            x[-1, :32] = 0
        rounded, tie = to_int8(x)
        assert tie > 1e-5
        weights = from_gguf(raw, name).astype(np.float64)
        got = np.asarray(multiply(x, pack(raw, name, "t", "native"), int8=True, path=path))
        # A minimum and a scale of a few hundred codes each may cancel: hence a multiple of the plain bound.
        size = np.abs(rounded) @ (np.abs(weights.T) + 32 * np.abs(weights).mean())
        assert (np.abs(got - rounded @ weights.T) <= 8 * ROUNDING * size).all(), (K, N, rows)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize(
    ("name", "path"), [(name, PATHS[0]) for name in BLOCKS] + [("Q5_1", path) for path in PATHS[1:]]
)
def test_a_rows_bits_do_not_depend_on_how_many_rows_there_are(name, path, int8):
    raw = random_raw(name, 50, 1024)
    weight = pack(raw, name, "t", "native")
    x = np.random.default_rng(3).standard_normal((40, 1024), np.float32)
    whole = np.asarray(multiply(x, weight, int8=int8, path=path))
    for rows in (1, 2, 3, 4, 5, 8, 9, 13, 16):
        for at in (0, 5, 40 - rows):
            piece = np.asarray(multiply(x[at : at + rows], weight, int8=int8, path=path))
            assert same_bits(piece, whole[at : at + rows]), rows


@pytest.mark.parametrize("name", BLOCKS)
def test_of_a_stack_the_matrix_that_is_meant_is_read(name):
    K = 2 * FORMATS[name].block_size
    raw = random_raw(name, 3 * 20, K).reshape(3, 20, -1)
    stack = pack(raw, name, "t", "native")
    x = np.random.default_rng(0).standard_normal((4, K), np.float32)
    chosen = jax.jit(lambda x, index: matmul(x, take_matrix(stack, index)))
    for index in range(3):
        alone = np.asarray(multiply(x, pack(raw[index], name, "t", "native"), int8=False))
        assert same_bits(np.asarray(chosen(x, jnp.int32(index))), alone)


def test_many_threads_give_the_bits_of_one(tmp_path: Path):
    """Columns are shared out, and none is summed by two."""
    script = """
import hashlib
from blocks import random_raw
import jax, numpy as np
from sharpi_jax.quant import matmul, pack
x = np.random.default_rng(0).standard_normal((3, 512), np.float32)
weight = pack(random_raw("Q4_K", 3000, 512), "Q4_K", "t", "native")
for dtype in ("float32", "int8"):
    y = np.asarray(jax.jit(matmul, static_argnums=2)(x, weight, dtype))
    print(hashlib.sha256(y.tobytes()).hexdigest())
"""
    one, two, five = lines_by_threads(script)
    assert len(one) == 2
    assert one == two == five


# --- building ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def unbuilt(monkeypatch, tmp_path):
    """A user who never ran this before; nothing that was found out is remembered."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    forgetful = (build._library, kernel.problem, kernel.target)
    for function in forgetful:
        function.cache_clear()
    yield tmp_path
    for function in forgetful:
        function.cache_clear()


def test_it_is_built_once(unbuilt, monkeypatch):
    made = build.library("norms.cc", "portable")
    assert [f.name for f in (unbuilt / "sharpi_jax" / "kernels").iterdir()] == [made.name]
    build._library.cache_clear()
    monkeypatch.setattr(build, "_compile", lambda *args: pytest.fail("built again"))
    assert build.library("norms.cc", "portable") == made


def test_without_a_compiler_all_runs_and_a_note_says_why(unbuilt, monkeypatch):
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    engine, notes = choose_engine()
    assert engine == "xla"
    assert len(notes) == 1
    assert "no C++ compiler was found" in notes[0]
    assert "install g++" in notes[0]
    with pytest.raises(OptionError, match=r"engine native is not available: no C\+\+ compiler.*engine auto"):
        choose_engine("native")
    assert choose_engine("xla") == ("xla", ())


def test_a_compiler_that_fails_is_quoted(unbuilt, monkeypatch):
    monkeypatch.setattr(build, "_FLAGS", (*build._FLAGS, "-Dfloat=nonsense"))
    assert "failed: " in kernel.problem()
    assert "error" in kernel.problem()
    assert list((unbuilt / "sharpi_jax" / "kernels").iterdir()) == []


def test_a_cache_folder_that_cannot_be_written_is_named(unbuilt, monkeypatch):
    (unbuilt / "sharpi_jax").write_text("a file where the folder should be")
    assert "kernels cannot be written" in kernel.problem()


# --- norms ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("width", [16, 20, 128, 2560])
def test_norms_are_those_of_float64_and_a_row_is_a_row(width, path):
    rng = np.random.default_rng(width)
    x, w = 3 * rng.standard_normal((40, width), np.float32), rng.standard_normal(width, np.float32)
    normed = jax.jit(lambda x: norms._by_kernel(x, w, width, 1e-6, path))
    whole, exact = np.asarray(normed(x)), x.astype(np.float64)
    want = exact / np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-6) * w
    assert (np.abs(whole - want) <= 1e-6 * np.maximum(np.abs(want), 1)).all()
    for rows in (1, 2, 3, 8):
        assert same_bits(np.asarray(normed(x[5 : 5 + rows])), whole[5 : 5 + rows])


def test_gradients_of_a_norm_are_those_without_the_kernel():
    x, w = (np.random.default_rng(i).standard_normal((5, 64), np.float32) for i in (0, 1))
    with_kernel = jax.grad(lambda x, w: jnp.sum(norms.rms_norm(x, w, 1e-6) ** 3), (0, 1))
    without = jax.grad(lambda x, w: jnp.sum(norms._by_xla(x, w, 64, 1e-6) ** 3), (0, 1))
    for a, b in zip(with_kernel(x, w[0]), without(x, w[0]), strict=True):
        assert np.allclose(a, b, rtol=1e-5, atol=1e-6)
