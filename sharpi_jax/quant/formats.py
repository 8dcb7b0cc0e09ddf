"""GGUF block formats: how the bytes of a block become float32 numbers, inside a compiled program.

Each `decode` repeats the arithmetic of the format's definition (ggml's `dequantize_row_*`), so that results equal
`gguf.quants` bit for bit. Two things could spoil that:

XLA may join a product and a sum into one operation, which then rounds once instead of twice. It makes no difference
here, and a new format must keep it so: every product is exact in float32. A float16 scale has 11 significant bits, and
scale and weight in the block have 12 between them at the most (Q6_K, IQ4_XS), so 23 of float32's 24 are used. Only the
sum with a minimum rounds.

A float32 result below 2^-126 is flushed to zero. It is the one exception, and only MXFP4's two lowest scales meet it.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from jax import lax


@dataclasses.dataclass(frozen=True)
class BlockFormat:
    """One block format.

    Attributes:
      name: ggml's name of the type.
      block_size: weights per block.
      block_bytes: bytes per block.
      dtype: element type of the array on the device: uint8 for packed blocks, uint16 for plain floats of two bytes (as
        floats XLA converts a whole table before it gathers a row), float32.
      decode: blocks [..., n, block_bytes] uint8 -> [..., n, block_size] float32; for plain floats [..., K] -> [..., K].
    """

    name: str
    block_size: int
    block_bytes: int
    dtype: str
    decode: Callable[[jax.Array], jax.Array]

    @property
    def is_plain(self) -> bool:
        """True for formats without blocks (F32, F16, BF16)."""
        return self.block_size == 1


def _f32(weights: jax.Array) -> jax.Array:
    return weights


def _f16(weights: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(weights, jnp.float16).astype(jnp.float32)


def _bf16(weights: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(weights, jnp.bfloat16).astype(jnp.float32)


def _half(two_bytes: jax.Array) -> jax.Array:
    """A float16 field [..., 2] uint8 as float32 [..., 1]: little-endian, as the file has it."""
    return _f16(lax.bitcast_convert_type(two_bytes, jnp.uint16))[..., None]


def _signed(field: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(field, jnp.int8)


def _planes(field: jax.Array, bits: int, run: int | None = None) -> jax.Array:
    """Numbers of `bits` bits out of bytes, [..., n] to [..., n * 8 / bits].

    The lowest bits of every byte, then the next ones; of each `run` of bytes by itself, or of all.
    """
    runs = field.reshape(*field.shape[:-1], -1, run or field.shape[-1])
    planes = jnp.concatenate([(runs >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)], axis=-1)
    return planes.reshape(*field.shape[:-1], -1)


def _bit_planes(field: jax.Array) -> jax.Array:
    """`_planes` of single bits. XLA's CPU loops are slow on eight joined pieces, and on two or four shifted at once."""
    shifts = jnp.arange(8, dtype=jnp.uint8).reshape(*(1,) * (field.ndim - 1), 8, 1)
    return ((field[..., None, :] >> shifts) & 1).reshape(*field.shape[:-1], -1)


def _in_order(field: jax.Array, bits: int) -> jax.Array:
    """Numbers of `bits` bits out of bytes, [..., n] to [..., n * 8 / bits]: all of the first byte, then the next."""
    shifts = jnp.arange(0, 8, bits, dtype=jnp.uint8).reshape(*(1,) * field.ndim, -1)
    return ((field[..., None] >> shifts) & ((1 << bits) - 1)).reshape(*field.shape[:-1], -1)


def _scaled(scales: jax.Array, q: jax.Array, minima: jax.Array | None = None) -> jax.Array:
    """Scale times integer, less the minimum, in float32: q [..., n] in as many equal runs as scales [..., s]."""
    values = scales[..., None] * q.reshape(*scales.shape, -1).astype(jnp.float32)
    return (values if minima is None else values - minima[..., None]).reshape(q.shape)


# --- blocks of 32: one scale, sometimes a minimum ---------------------------------------------------------------------


def _q8_0(blocks: jax.Array) -> jax.Array:
    """float16 scale, 32 signed bytes."""
    d, q = jnp.split(blocks, (2,), axis=-1)
    return _half(d) * _signed(q).astype(jnp.float32)


def _q4_0(blocks: jax.Array) -> jax.Array:
    """float16 scale, 16 bytes: low nibbles are weights 0 to 15, high nibbles 16 to 31, each less 8."""
    d, q = jnp.split(blocks, (2,), axis=-1)
    return _half(d) * (_planes(q, 4).astype(jnp.int8) - 8).astype(jnp.float32)


def _q4_1(blocks: jax.Array) -> jax.Array:
    """float16 scale, float16 minimum, nibbles as in Q4_0 without the 8."""
    d, m, q = jnp.split(blocks, (2, 4), axis=-1)
    return _half(d) * _planes(q, 4).astype(jnp.float32) + _half(m)


def _q5_0(blocks: jax.Array) -> jax.Array:
    """float16 scale, 4 bytes with a fifth bit for each weight in turn, nibbles as in Q4_0; each less 16."""
    d, high, low = jnp.split(blocks, (2, 6), axis=-1)
    q = (_planes(low, 4) | (_in_order(high, 1) << 4)).astype(jnp.int8) - 16
    return _half(d) * q.astype(jnp.float32)


def _q5_1(blocks: jax.Array) -> jax.Array:
    """float16 scale, float16 minimum, then as in Q5_0 without the 16."""
    d, m, high, low = jnp.split(blocks, (2, 4, 8), axis=-1)
    q = _planes(low, 4) | (_in_order(high, 1) << 4)
    return _half(d) * q.astype(jnp.float32) + _half(m)


# --- blocks of 256: a super-scale, and small scales of runs of 16 or 32 weights ---------------------------------------


def _q2_k(blocks: jax.Array) -> jax.Array:
    """16 bytes of scale (low nibble) and minimum (high) of 16 weights each, 64 of bit pairs, both float16 factors."""
    scales, q, d, m = jnp.split(blocks, (16, 80, 82), axis=-1)
    low, high = scales & 15, scales >> 4
    return _scaled(_half(d) * low.astype(jnp.float32), _planes(q, 2, 32), _half(m) * high.astype(jnp.float32))


def _q3_k(blocks: jax.Array) -> jax.Array:
    """32 bytes of third bits, 64 of bit pairs, 12 of sixteen 6-bit scales less 32, float16 super-scale; weights less 4.

    The scales' low nibbles are in 8 bytes, their high bit pairs in the 4 after them.
    """
    high, low, low_scales, high_scales, d = jnp.split(blocks, (32, 96, 104, 108), axis=-1)
    scales = (_planes(low_scales, 4) | (_planes(high_scales, 2) << 4)).astype(jnp.int8) - 32
    q = (_planes(low, 2, 32) | (_bit_planes(high) << 2)).astype(jnp.int8) - 4
    return _scaled(_half(d) * scales.astype(jnp.float32), q)


def _q4_k(blocks: jax.Array) -> jax.Array:
    """float16 factors of scales and minima, 12 bytes of these, 128 of nibbles."""
    d, m, small, q = jnp.split(blocks, (2, 4, 16), axis=-1)
    scales, minima = _scales_and_minima(small)
    return _scaled(_half(d) * scales, _planes(q, 4, 32), _half(m) * minima)


def _q5_k(blocks: jax.Array) -> jax.Array:
    """As Q4_K, with 32 bytes of fifth bits in front of the nibbles."""
    d, m, small, high, low = jnp.split(blocks, (2, 4, 16, 48), axis=-1)
    scales, minima = _scales_and_minima(small)
    return _scaled(_half(d) * scales, _planes(low, 4, 32) | (_bit_planes(high) << 4), _half(m) * minima)


def _q6_k(blocks: jax.Array) -> jax.Array:
    """128 bytes of low 4 bits, 64 of high 2 bits, 16 signed scales of 16 weights each, one float16 super-scale."""
    low, high, scales, d = jnp.split(blocks, (128, 192, 208), axis=-1)
    q = (_planes(low, 4, 64) | (_planes(high, 2, 32) << 4)).astype(jnp.int8) - 32
    return _scaled(_half(d) * _signed(scales).astype(jnp.float32), q)


def _scales_and_minima(small: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Eight 6-bit scales and minima out of 12 bytes, [..., 8] float32 each.

    Four bytes each for the first four scales and minima; the two bits they leave free are the high bits of the last
    four, whose low nibbles are in the last four bytes: the scale's low, the minimum's high.
    """
    a, b, c = jnp.split(small, 3, axis=-1)
    scales = jnp.concatenate([a & 63, (c & 15) | ((a >> 6) << 4)], axis=-1)
    minima = jnp.concatenate([b & 63, (c >> 4) | ((b >> 6) << 4)], axis=-1)
    return scales.astype(jnp.float32), minima.astype(jnp.float32)


# --- nibbles that are places in a table -------------------------------------------------------------------------------

_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice what the four bits stand for


def _looked_up(table: tuple[int, ...], packed: jax.Array, run: int | None = None) -> jax.Array:
    """The table's numbers at the nibbles of bytes, [..., n] to [..., 2n] int8, in the order of `_planes`.

    Joined after the gathers: the other way round takes an XLA CPU loop up to three times as long, while gathers so
    placed are as fast as a tree of selects.
    """
    values = jnp.asarray(table, jnp.int8)
    runs = packed.reshape(*packed.shape[:-1], -1, run or packed.shape[-1])
    found = jnp.concatenate([jnp.take(values, q, mode="clip") for q in (runs & 15, runs >> 4)], axis=-1)
    return found.reshape(*packed.shape[:-1], -1)


def _iq4_nl(blocks: jax.Array) -> jax.Array:
    """As Q4_0, the nibbles being places in a table."""
    d, q = jnp.split(blocks, (2,), axis=-1)
    return _half(d) * _looked_up(_IQ4, q).astype(jnp.float32)


def _iq4_xs(blocks: jax.Array) -> jax.Array:
    """float16 super-scale, 2 bytes of high bit pairs and 4 of low nibbles of eight scales less 32, 128 of nibbles."""
    d, high, low, q = jnp.split(blocks, (2, 4, 8), axis=-1)
    scales = (_in_order(low, 4) | (_in_order(high, 2) << 4)).astype(jnp.int8) - 32
    return _scaled(_half(d) * scales.astype(jnp.float32), _looked_up(_IQ4, q, 16))


def _mxfp4(blocks: jax.Array) -> jax.Array:
    """A byte e, the scale 2^(e - 128), and nibbles as in Q4_0.

    Multiplied in two steps, by powers of two that are normal numbers: 2^-128 itself would count as zero.
    """
    e, q = jnp.split(blocks, (1,), axis=-1)
    half = e >> 1
    return _looked_up(_E2M1, q).astype(jnp.float32) * _power(half) * _power(e - half)


def _power(exponent: jax.Array) -> jax.Array:
    """2^(exponent - 64) for a byte of at most 128."""
    return lax.bitcast_convert_type((exponent.astype(jnp.uint32) + (127 - 64)) << 23, jnp.float32)


def _entry(name: str, dtype: str, decode: Callable[[jax.Array], jax.Array]) -> tuple[str, BlockFormat]:
    size, width = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    return name, BlockFormat(name, size, width, dtype, decode)


FORMATS: dict[str, BlockFormat] = dict(
    [
        _entry("F32", "float32", _f32),
        _entry("F16", "uint16", _f16),
        _entry("BF16", "uint16", _bf16),
        _entry("Q8_0", "uint8", _q8_0),
        _entry("Q4_0", "uint8", _q4_0),
        _entry("Q4_1", "uint8", _q4_1),
        _entry("Q5_0", "uint8", _q5_0),
        _entry("Q5_1", "uint8", _q5_1),
        _entry("Q2_K", "uint8", _q2_k),
        _entry("Q3_K", "uint8", _q3_k),
        _entry("Q4_K", "uint8", _q4_k),
        _entry("Q5_K", "uint8", _q5_k),
        _entry("Q6_K", "uint8", _q6_k),
        _entry("IQ4_NL", "uint8", _iq4_nl),
        _entry("IQ4_XS", "uint8", _iq4_xs),
        _entry("MXFP4", "uint8", _mxfp4),
    ]
)
