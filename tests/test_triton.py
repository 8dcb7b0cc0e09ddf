"""The GPU's kernel, run by XLA on a CPU, against the float64 product of what gguf makes of the blocks."""

import functools

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from test_quant import BLOCKS, ROUNDING, from_gguf, random_raw

from sharpi_jax import quant
from sharpi_jax.quant import FORMATS, Packed, pack, triton
from sharpi_jax.quant.tiles import tile

kernel = functools.partial(triton.matmul, interpret=True)


def inputs(rows, K, seed=3):
    return np.random.default_rng(seed).standard_normal((rows, K), np.float32)


def assert_float64_product(got, x, weights):
    """Within a few roundings of the size of what is added up; `weights` [N, K] are gguf's."""
    want = x.astype(np.float64) @ weights.T.astype(np.float64)
    size = np.abs(x).astype(np.float64) @ np.abs(weights.T)
    assert got.shape == want.shape
    assert (np.abs(got - want) <= 4 * ROUNDING * size).all()


@pytest.mark.parametrize("name", BLOCKS)
def test_every_format_to_the_bit_and_in_the_sum(name):
    """57 columns: no whole tiles, and the last program has one tile. 768 inputs: the last step is half empty."""
    raw, x = random_raw(name, 57, 768, seed=6), inputs(8, 768)
    weight, weights = pack(raw, name, "t", "triton"), from_gguf(raw, name)
    assert_float64_product(np.asarray(kernel(x, weight)), x, weights)
    # A sum of one weight and zeros shows that weight, but for the sign of a zero.
    alone = np.concatenate([np.asarray(kernel(x, weight)) for x in np.split(np.eye(768, dtype=np.float32), 96)])
    assert models.same_bits(alone.T + 0.0, weights + 0.0)


@pytest.mark.parametrize(
    ("name", "K", "N"),
    [
        ("Q4_0", 32, 1),
        ("Q8_0", 96, 16),
        ("Q5_0", 96, 33),
        ("Q8_0", 1280, 40),
        ("Q4_K", 256, 1),
        ("Q6_K", 1280, 40),
        ("Q4_K", 4352, 16),
    ],
)
def test_odd_shapes_and_few_rows(name, K, N):
    """From two units of inputs to several shares of K, uneven ones too; one column to one more than two tiles."""
    raw = random_raw(name, N, K, seed=N)
    weight, weights = pack(raw, name, "t", "triton"), from_gguf(raw, name)
    for rows in (1, 3):
        x = inputs(rows, K)
        assert_float64_product(np.asarray(kernel(x, weight)), x, weights)


@pytest.mark.parametrize("name", ["Q4_K", "Q8_0"])
def test_of_a_stack_the_matrix_at_the_index_is_taken(name):
    raw, x = random_raw(name, 3 * 40, 512), inputs(4, 512)
    stack = pack(raw.reshape(3, 40, -1), name, "t", "triton")
    one = jax.jit(lambda x, stack, index: kernel(x, quant.take_matrix(stack, index)))
    for index in range(3):
        weights = from_gguf(raw, name)[40 * index : 40 * (index + 1)]
        assert_float64_product(np.asarray(one(x, stack, jnp.int32(index))), x, weights)


@pytest.mark.parametrize("name", ["Q5_1", "Q6_K"])
def test_a_rows_bits_do_not_depend_on_how_many_rows_there_are(name):
    x, weight = inputs(13, 1280), pack(random_raw(name, 40, 1280), name, "t", "triton")
    whole = np.asarray(kernel(x, weight))
    for rows in range(1, 9):
        for start in (0, 13 - rows):
            got = np.asarray(kernel(x[start : start + rows], weight))
            assert models.same_bits(got, whole[start : start + rows])


def test_inputs_are_shared_out_only_where_there_are_few_columns():
    def shares(N, K):
        raw = jax.ShapeDtypeStruct((N, K // 32 * FORMATS["Q8_0"].block_bytes), jnp.uint8)
        weight = jax.eval_shape(lambda raw: tile(Packed(raw, "Q8_0")), raw)
        text = str(jax.make_jaxpr(triton.matmul)(jax.ShapeDtypeStruct((1, K), jnp.float32), weight))
        return int(text.split("out_avals=(ShapedArray(float32[")[1].split(",")[0])

    assert shares(248_320, 1024) == 1
    assert shares(1024, 3584) == 7


# --- behind quant.matmul ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "int8", "bfloat16"])
@pytest.mark.parametrize("rows", [32, 33])
def test_matmul_takes_the_kernel_on_a_gpu_for_few_rows_in_float32(rows, dtype):
    weight = pack(random_raw("Q4_K", 40, 256), "Q4_K", "t", "triton")
    traced = jax.jit(functools.partial(quant.matmul, dtype=dtype)).trace(inputs(rows, 256), weight)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert ("__gpu$xla.gpu.triton" in text) == (rows <= 32 and dtype != "bfloat16")


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_anywhere_else_it_is_what_xla_makes_of_it(dtype):
    raw, x = random_raw("Q4_K", 40, 256), inputs(5, 256)
    got = quant.matmul(x, pack(raw, "Q4_K", "t", "triton"), dtype)
    assert models.same_bits(np.asarray(got), np.asarray(quant.matmul(x, pack(raw, "Q4_K", "t", "xla"), dtype)))


@pytest.mark.parametrize(("backend", "engine"), [("gpu", "triton"), ("tpu", "xla"), ("cpu", "native or xla")])
def test_the_engine_that_is_taken_unless_one_is_asked_for(backend, engine, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    assert quant.choose_engine()[0] in engine
