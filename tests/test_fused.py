"""Products without the C++ kernel: float64 sums over gguf's numbers in any shape, and bits, whatever the rows."""

import dataclasses

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from blocks import BLOCKS, from_gguf, random_raw
from jax import lax
from models import same_bits
from test_bit_equality import assert_same, random_prompts, run, script

from sharpi_jax import checkpoint, quant
from sharpi_jax.decode.decoder import Decoder
from sharpi_jax.quant import FORMATS, pack

ROUNDING = 2.0**-24  # of float32, half an ulp of 1


def few(raw, name):
    """The weight as a decode window multiplies by it."""
    return quant.for_few_rows(pack(raw, name, "t", "xla"))


@jax.jit
def product(x, weight):
    return quant.matmul(x, weight)


def inputs(rows, K, seed=3):
    return np.random.default_rng(seed).standard_normal((rows, K), np.float32)


def assert_is_the_product(got, x, weights):
    exact, size = x.astype(np.float64) @ weights.T.astype(np.float64), np.abs(x) @ np.abs(weights.T)
    assert got.shape == exact.shape
    assert got.dtype == np.float32
    assert (np.abs(got - exact) <= 4 * ROUNDING * size).all()


def test_decode_windows_take_the_fused_form_and_prompts_the_dense_one():
    weight = pack(random_raw("Q4_K", 16, 256), "Q4_K", "t", "xla")
    x = inputs(2, 256)
    assert "_products" not in jax.jit(quant.matmul).lower(x, weight).as_text()
    assert "_products" in jax.jit(quant.matmul).lower(x, quant.for_few_rows(weight)).as_text()
    native = dataclasses.replace(weight, engine="native")
    assert quant.for_few_rows({"w": native, "v": x})["w"] is native


@pytest.mark.parametrize("name", BLOCKS)
def test_it_is_the_float64_product(name):
    for N, K, rows in [(33, 1280, 3), (15, 256, 16)]:
        raw, x = random_raw(name, N, K, seed=N), inputs(rows, K)
        assert_is_the_product(np.asarray(product(x, few(raw, name))), x, from_gguf(raw, name))


@pytest.mark.parametrize("name", [name for name in BLOCKS if FORMATS[name].block_size == 32])
@pytest.mark.parametrize("K", [32, 96])
def test_inputs_need_not_be_a_multiple_of_256(name, K):
    raw, x = random_raw(name, 17, K), inputs(3, K)
    assert_is_the_product(np.asarray(product(x, few(raw, name))), x, from_gguf(raw, name))


@pytest.mark.parametrize("name", BLOCKS)
def test_the_product_with_the_identity_is_the_weights(name):
    """Sums of one weight and zeros: no code, scale or minimum may come from a neighbour, nor be rounded."""
    raw = random_raw(name, 33, 512, seed=6)
    got = np.asarray(product(np.eye(512, dtype=np.float32), few(raw, name)))
    assert same_bits(got.T + 0.0, from_gguf(raw, name) + 0.0)


@jax.jit
def looped_product(x, weight):
    """The product in the second of two passes of a loop; the first only has the right shape."""

    def body(i, y):
        return quant.matmul(jnp.where(i == 0, 0, x), weight) + 0 * y

    return lax.fori_loop(0, 2, body, jnp.zeros((x.shape[0], weight.out_features)))


@pytest.mark.parametrize("name", BLOCKS)
def test_a_rows_bits_do_not_depend_on_how_many_rows_there_are(name):
    weight, x = few(random_raw(name, 48, 512), name), inputs(40, 512)
    whole = np.asarray(product(x, weight))
    for rows, form in ((1, product), (5, looped_product)):
        for at in (0, 17, 40 - rows):
            assert same_bits(np.asarray(form(x[at : at + rows], weight)) + 0.0, whole[at : at + rows] + 0.0)


def test_leading_axes_are_only_rows():
    weight, x = few(random_raw("Q6_K", 32, 256), "Q6_K"), inputs(30, 256)
    whole = np.asarray(product(x, weight))
    for lead in [(1, 1), (2, 3), (5, 2), (3, 10)]:
        n = int(np.prod(lead))
        assert same_bits(np.asarray(product(x[:n].reshape(*lead, 256), weight)), whole[:n].reshape(*lead, 32))


def test_one_matrix_of_a_stack():
    raw, x = random_raw("Q4_K", 3 * 33, 256), inputs(4, 256)
    stack = few(raw.reshape(3, 33, -1), "Q4_K")
    for i in range(3):
        got = np.asarray(product(x, quant.take_matrix(stack, jnp.int32(i))))
        assert same_bits(got, np.asarray(product(x, few(raw[33 * i : 33 * (i + 1)], "Q4_K"))))


def test_nothing_is_unpacked_inside_a_loop_or_in_front_of_it():
    weight = few(random_raw("Q4_K", 1024, 1024), "Q4_K")
    compiled = looped_product.lower(inputs(4, 1024), weight).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 1024 * 1024  # a quarter of it in float32


# --- whole models -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "act"),
    [("qwen35-tiny-q4_0", "float32"), ("qwen35-tiny256-q8_0", "int8")],
)
def test_drafts_leave_the_bits_of_plain_decoding(name, act):
    read = checkpoint.read(models.fixture(name), engine="xla")
    decoder = Decoder(read.params, dataclasses.replace(read.config, dtype=act))
    batch, budgets, rng = random_prompts(6, 8), [24] * 8, np.random.default_rng(5)
    plain = run(decoder, batch, budgets, 0)
    assert_same(plain, run(decoder, batch, budgets, 4, script(plain, rng, 4)))
    alone = run(decoder, batch[:1], budgets[:1], 1)
    assert_same(alone, plain, rows=1)
