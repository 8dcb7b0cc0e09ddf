"""Block formats against gguf's dequantisers bit for bit, and what the exact promises rest on: rows and their bits."""

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from blocks import BLOCKS, HALVES, from_gguf, random_raw
from jax import lax
from models import same_bits

from sharpi_jax import quant
from sharpi_jax.errors import CheckpointError
from sharpi_jax.model.norms import l2_norm, rms_norm, row_sum
from sharpi_jax.quant import FORMATS, Packed, pack

SCALED = [name for name in BLOCKS if HALVES[name]]
SMALLEST_NORMAL = np.finfo(np.float32).tiny
ROUNDING = 2.0**-24  # of float32, half an ulp of 1

dequantise = jax.jit(quant.dequantise)
matmul = jax.jit(quant.matmul, static_argnums=2)
take_rows = jax.jit(quant.take_rows)


def assert_bits(got, want):
    """Equal bits wherever the oracle has a normal number or a zero.

    Infinite and NaN scales are no weights: not compared. A subnormal float32 may be a zero of its sign instead, since
    XLA flushes such results of arithmetic. Of the block formats only MXFP4 can reach one (elsewhere 2^-24 is the
    smallest scale); beyond it this concerns numbers that are subnormal in an F32 or BF16 file itself.
    """
    assert got.shape == want.shape
    assert got.dtype == want.dtype == np.float32
    finite = np.isfinite(want)
    subnormal = (want != 0) & (np.abs(want) < SMALLEST_NORMAL)
    ordinary = finite & ~subnormal
    assert ordinary.mean() > 0.9
    assert same_bits(got[ordinary], want[ordinary])
    kept = got[subnormal].view(np.uint32) == want[subnormal].view(np.uint32)
    flushed = (got[subnormal] == 0) & (np.signbit(got[subnormal]) == np.signbit(want[subnormal]))
    assert (kept | flushed).all()


def with_halves(name, blocks, *halves):
    """Every block under every float16 of `halves`, or pair of them where a block has two: [blocks, bytes per block]."""
    places, out = HALVES[name], []
    for fields in itertools.product(*halves[: len(places)]):
        copy = blocks.copy()
        for at, half in zip(places, fields, strict=True):
            copy[:, at : at + 2] = np.float16(half).reshape(1).view(np.uint8)
        out.append(copy)
    return np.concatenate(out)


# --- dequantisation ---------------------------------------------------------------------------------------------------


def test_every_format_takes_part():
    assert set(HALVES) == set(BLOCKS)
    assert {"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"} <= set(FORMATS)
    assert {"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"} <= set(FORMATS)


@pytest.mark.parametrize("name", BLOCKS)
def test_random_blocks_are_ggufs_bit_for_bit(name):
    fmt = FORMATS[name]
    raw = np.random.default_rng(1).integers(0, 256, (64, 8 * fmt.block_bytes), np.uint8)
    assert_bits(np.asarray(dequantise(pack(raw, name, "t"))), from_gguf(raw, name))
    tame = random_raw(name, 64, 8 * fmt.block_size)
    assert_bits(np.asarray(dequantise(pack(tame, name, "t"))), from_gguf(tame, name))


SUBNORMAL = (6e-8, -6e-8, 6.0976e-5, -3e-5)
EXTREME = (0.0, -0.0, 1.0, -1.0, 65504.0, -65504.0, *SUBNORMAL, 6.104e-5, 0.333)


@pytest.mark.parametrize("name", SCALED)
def test_extreme_blocks_are_ggufs_bit_for_bit(name):
    """Every payload byte the same, under every kind of float16 scale, subnormal ones and both zeros among them."""
    assert (np.abs(np.float16(SUBNORMAL)) < np.finfo(np.float16).tiny).all()
    payloads = np.uint8([0x00, 0xFF, 0x80, 0x7F, 0x0F, 0xF0, 0x08, 0x88, 0x01, 0x10])
    raw = with_halves(name, np.repeat(payloads[:, None], FORMATS[name].block_bytes, axis=1), EXTREME, EXTREME)
    want = from_gguf(raw, name)
    assert np.isfinite(want).all()
    assert np.signbit(want[want == 0]).any()
    assert_bits(np.asarray(dequantise(pack(raw, name, "t"))), want)


@pytest.mark.parametrize("name", BLOCKS)
def test_every_byte_at_every_place_is_ggufs(name):
    """256 blocks in which each place takes each value once, neighbours never the same."""
    values = np.arange(256)[:, None] * 37 + np.arange(FORMATS[name].block_bytes) * 101
    raw = with_halves(name, (values % 256).astype(np.uint8), (0.01, -0.7, 6e-8), (0.003, -1.0))
    assert_bits(np.asarray(dequantise(pack(raw, name, "t"))), from_gguf(raw, name))


@pytest.mark.parametrize("name", SCALED)
def test_every_scale_is_ggufs(name):
    """All finite float16 in each float16 field over one random block; every seventh where blocks are large."""
    fmt, every = FORMATS[name], np.arange(1 << 16, dtype=np.uint16)
    every = every[np.isfinite(every.view(np.float16))][:: 1 if fmt.block_size == 32 else 7, None].view(np.uint8)
    for field in HALVES[name]:
        raw = np.repeat(random_raw(name, 1, fmt.block_size), len(every), axis=0)
        raw[:, field : field + 2] = every
        assert_bits(np.asarray(dequantise(pack(raw, name, "t"))), from_gguf(raw, name))


def test_only_the_two_lowest_scales_of_mxfp4_give_subnormal_numbers_and_these_become_zero():
    """The one exception to "bit for bit". Every exponent with every nibble, infinities included."""
    exponents, nibbles = np.arange(256, dtype=np.uint8), np.arange(16, dtype=np.uint8) * 0x11
    raw = np.concatenate([exponents[:, None], np.tile(nibbles, (256, 1))], axis=1)
    got, want = np.asarray(dequantise(pack(raw, "MXFP4", "t"))), from_gguf(raw, "MXFP4")
    subnormal = (want != 0) & (np.abs(want) < SMALLEST_NORMAL)
    assert same_bits(got[~subnormal], want[~subnormal])
    assert np.abs(want[0]).max() > SMALLEST_NORMAL  # their larger numbers are ordinary
    assert sorted(set(np.nonzero(subnormal)[0])) == [0, 1]
    assert (got[subnormal] == 0).all()


@pytest.mark.parametrize("name", ["F16", "BF16"])
def test_every_16_bit_float_is_ggufs(name):
    raw = np.arange(1 << 16, dtype=np.uint16).reshape(64, -1).view(np.uint8)
    assert_bits(np.asarray(dequantise(pack(raw, name, "t"))), from_gguf(raw, name))


def test_plain_float32_is_itself():
    raw = np.random.default_rng(2).integers(0, 256, (64, 4 * 64), np.uint8)
    assert_bits(np.asarray(dequantise(pack(raw, "F32", "t"))), raw.view(np.float32))


@pytest.mark.parametrize("name", FORMATS)
def test_features_leading_axes_and_rows_taken(name):
    K = 4 * max(FORMATS[name].block_size, 16)
    raw = random_raw(name, 12, K)
    weight, want = pack(raw, name, "t"), from_gguf(raw, name)
    assert (weight.in_features, weight.out_features) == (K, 12) == want.shape[::-1]
    assert weight.blocks.nbytes == raw.nbytes
    stacked = pack(raw.reshape(2, 3, 2, -1), name, "t")
    assert (stacked.in_features, stacked.out_features) == (K, 2)
    assert same_bits(np.asarray(dequantise(stacked)), want.reshape(2, 3, 2, K))
    ids = np.array([[11, 0, 5], [5, 5, 10]])
    assert same_bits(np.asarray(take_rows(weight, ids)), want[ids])


def test_an_unsupported_type_is_refused_by_name():
    with pytest.raises(CheckpointError, match=r"blk\.7\.ffn_down\.weight has type Q8_K.*convert the file.*Q8_0"):
        pack(np.zeros((2, 292), np.uint8), "Q8_K", "blk.7.ffn_down.weight")


# --- products ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FORMATS)
def test_matmul_is_the_float64_product(name, dtype):
    """Operands are rounded once, to `dtype`; beyond that only float32 sums differ from exact arithmetic."""
    K = 1024
    raw = random_raw(name, 24, K)
    x = np.random.default_rng(3).standard_normal((2, 3, K), np.float32)
    got = np.asarray(matmul(x, pack(raw, name, "t"), dtype))
    assert got.dtype == np.float32
    kind = np.float32 if dtype == "float32" else ml_dtypes.bfloat16
    rounded_x, rounded_w = (a.astype(kind).astype(np.float64) for a in (x, from_gguf(raw, name)))
    size = np.abs(rounded_x) @ np.abs(rounded_w.T)
    assert (np.abs(got - rounded_x @ rounded_w.T) <= 4 * ROUNDING * size).all()
    exact = x.astype(np.float64) @ from_gguf(raw, name).T.astype(np.float64)
    assert (np.abs(got - exact) <= (4 * ROUNDING if dtype == "float32" else 2.0**-8) * size).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", BLOCKS)
def test_the_product_with_the_identity_is_the_weights(name, dtype):
    """Sums of one weight and zeros show the bits of what reaches the product, but for the sign of a zero."""
    raw = random_raw(name, 64, 512, seed=6)
    got, want = np.asarray(matmul(np.eye(512, dtype=np.float32), pack(raw, name, "t"), dtype)), from_gguf(raw, name)
    want = want.astype(np.float32 if dtype == "float32" else ml_dtypes.bfloat16).astype(np.float32)
    assert same_bits(got.T + 0.0, want + 0.0)


@pytest.mark.parametrize("name", BLOCKS)
def test_a_sum_in_the_same_program_rounds_as_one_apart(name):
    raw = random_raw(name, 64, 512, seed=7)
    x = np.random.default_rng(8).standard_normal((64, 512), np.float32) * np.float32(0.1)
    together = jax.jit(lambda weight, x: quant.dequantise(weight) + x)
    assert same_bits(np.asarray(together(pack(raw, name, "t"), x)), from_gguf(raw, name) + x)


def test_with_rounded_products_it_would_not():
    """Why products in `formats` must be exact. If this fails, XLA has changed: it no longer joins product and sum."""
    a, b, c = np.random.default_rng(9).standard_normal((3, 64, 512), np.float32)
    assert not same_bits(np.asarray(jax.jit(lambda a, b, c: a * b + c)(a, b, c)), a * b + c)


# --- rows and bits ----------------------------------------------------------------------------------------------------

MOST = 136
EVERY = (*range(1, 41), 64, 100)
MANY = (*range(1, 18), 33, 40, 64)
SOME = (1, 2, 3, 4, 5, 8, 17, 40)


def operands(K, N):
    rng = np.random.default_rng(K + N)
    return rng.standard_normal((MOST, K), np.float32), rng.standard_normal((N, K), np.float32) * np.float32(K**-0.5)


def changed_rows(function, x, counts):
    """The row counts n at which `function`, called on pieces of n rows, gives other bits than on all of x."""
    whole = np.asarray(function(x))

    def same(n):
        starts = range(0, min(MOST - n, 6 * n), n)
        return all(same_bits(np.asarray(function(x[at : at + n])), whole[at : at + n]) for at in starts)

    return [n for n in counts if not same(n)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("K", "N", "counts"),
    [
        (1024, 3584, EVERY),
        (1024, 1, MANY),
        (3584, 1024, SOME),
        (1024, 3, SOME),
        (64, 4, SOME),
        (64, 512, SOME),
    ],
)
def test_a_rows_bits_do_not_depend_on_how_many_rows_there_are(K, N, counts, dtype):
    x, w = operands(K, N)
    weight = Packed(jnp.asarray(w), "F32")
    assert changed_rows(lambda rows: matmul(rows, weight, dtype), x, counts) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", BLOCKS)
def test_packed_weights_keep_the_promise_too(name, dtype):
    x, _ = operands(256, 1)
    weight = pack(random_raw(name, 96, 256), name, "t")
    assert changed_rows(lambda rows: matmul(rows, weight, dtype), x, (1, 2, 3, 8)) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_leading_axes_are_only_rows(dtype):
    x, w = operands(64, 512)
    weight = Packed(jnp.asarray(w), "F32")
    whole = np.asarray(matmul(x, weight, dtype))
    for lead in [(1, 1), (2, 1), (1, 3), (5, 2), (8, 17), (2, 4, 17)]:
        n = int(np.prod(lead))
        got = np.asarray(matmul(x[:n].reshape(*lead, 64), weight, dtype))
        assert same_bits(got, whole[:n].reshape(*lead, 512)), lead


@jax.jit
def plain_dot(x, w):
    return lax.dot_general(
        x, w, (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_padding_one_row_or_one_column_has_other_bits(dtype):
    """Why `matmul` pads. If this fails, XLA has changed: the padding can go."""

    def changed(K, N, counts):
        x, w = (jnp.asarray(a).astype(dtype) for a in operands(K, N))
        return changed_rows(lambda rows: plain_dot(rows, w), x, counts)

    assert changed(64, 512, [1]), "one-row products now have the bits of many-row ones: the row padding can go"
    assert changed(1024, 1, SOME), "one-column products no longer depend on the rows: the column padding can go"


NORMS = {
    "rms_norm": jax.jit(lambda x, w: rms_norm(x, w, 1e-6)),
    "l2_norm": jax.jit(lambda x, w: l2_norm(x, 1e-6)),
    "row_sum": jax.jit(lambda x, w: row_sum(x)),
}
NORM_ROWS = (1, 2, 3, 8, 9, 40, 63, 64, 100)


@pytest.mark.parametrize("width", [16, 64, 1024])
@pytest.mark.parametrize("name", NORMS)
def test_a_norms_bits_do_not_depend_on_how_many_rows_there_are(name, width):
    x, w = operands(width, 1)
    assert changed_rows(lambda rows: NORMS[name](rows, w[0]), x, NORM_ROWS) == []


def test_a_plain_sum_would_depend_on_them():
    """Why norms sum by a dot. If this fails, XLA has changed: a plain sum may do."""
    x, _ = operands(64, 1)
    plain = jax.jit(lambda x: jnp.sum(jnp.square(x), axis=-1))
    assert changed_rows(plain, x, NORM_ROWS), "plain sums no longer depend on the rows: norms may use them"
