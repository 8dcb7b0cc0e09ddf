"""GGUF block formats: what the bytes of a block mean, and their exact float32 numbers inside a compiled program.

Every format comes apart in the same way (ggml's `dequantize_row_*`): codes of a few bits; a scale per block, perhaps
times a small integer per group of 16 or 32 weights; and perhaps a minimum made likewise:

    weight = (d * small) * q - (m * small_m),   q = code - offset, or table[code]

So a format is a row of numbers and one `split`, and whatever multiplies by packed weights (quant/tiles.py) needs to
know no format by name. `decode` must equal `gguf.quants` bit for bit. Two things could spoil that:

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
from flax import struct
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from jax import lax


@struct.dataclass
class Parts:
    """A block taken apart, [..., blocks, n] each.

    Attributes:
      codes: uint8, one per weight.
      d: uint16 [..., 1], the scale: the bits of a float16, or of MXFP4 the exponent.
      small: int8 or uint8, one per group, or None where the block has one scale.
      m: uint16 [..., 1], a float16; small_m: uint8, one per group. Either may be None.
    """

    codes: jax.Array
    d: jax.Array
    small: jax.Array | None = None
    m: jax.Array | None = None
    small_m: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class BlockFormat:
    """One block format.

    Attributes:
      name: ggml's name of the type.
      block_size: weights per block. block_bytes: bytes per block.
      dtype: element type of the file's bytes on the device: uint8 for packed blocks, uint16 for plain floats of two
        bytes (as floats XLA converts a whole table before it gathers a row), float32.
      split: blocks [..., n, block_bytes] uint8 to Parts; None for plain floats.
      bits: of a code. group: weights that share a small scale (or the block's, where it has no small ones).
      minimum: whether there is one. offset: what is taken from a code. table: what a code stands for instead, or empty.
      exponent: whether the scale is 2^(d - 128), not a float16.
    """

    name: str
    block_size: int
    block_bytes: int
    dtype: str
    split: Callable[[jax.Array], Parts] | None
    bits: int
    group: int
    minimum: bool = False
    offset: int = 0
    table: tuple[int, ...] = ()
    exponent: bool = False

    @property
    def is_plain(self) -> bool:
        """True for formats without blocks (F32, F16, BF16)."""
        return self.split is None


def decode(fmt: BlockFormat, raw: jax.Array) -> jax.Array:
    """The float32 numbers of blocks [..., n, block_bytes] -> [..., n, block_size]; of plain floats [..., K] -> same."""
    if fmt.split is not None:
        return values(fmt, fmt.split(raw))
    return raw if fmt.name == "F32" else lax.bitcast_convert_type(raw, _PLAIN[fmt.name]).astype(jnp.float32)


def values(fmt: BlockFormat, parts: Parts) -> jax.Array:
    """The float32 numbers [..., n] of parts whose codes are [..., n] and whose other fields divide n evenly."""
    codes = parts.codes
    if fmt.table:
        q = jnp.take(jnp.asarray(fmt.table, jnp.int8), codes, mode="clip").astype(jnp.float32)
    else:
        q = (codes.astype(jnp.int16) - fmt.offset).astype(jnp.float32)
    groups = (*codes.shape[:-1], codes.shape[-1] // fmt.group)
    q = q.reshape(*groups, fmt.group)
    if fmt.exponent:
        # In two steps, by powers of two that are normal numbers: 2^-128 itself would count as zero.
        e = _spread(parts.d, groups)[..., None]
        return (q * power(e >> 1) * power(e - (e >> 1))).reshape(codes.shape)
    scale, minimum = _factor(parts.d, parts.small, groups), None
    if parts.m is not None:
        minimum = _factor(parts.m, parts.small_m, groups)
    out = scale[..., None] * q
    return (out if minimum is None else out - minimum[..., None]).reshape(codes.shape)


def half(bits: jax.Array) -> jax.Array:
    """uint16 as the float16 of these bits, in float32."""
    return lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32)


def _factor(whole: jax.Array, small: jax.Array | None, groups: tuple[int, ...]) -> jax.Array:
    factor = _spread(half(whole), groups)
    return factor if small is None else factor * small.astype(jnp.float32)


def _spread(field: jax.Array, groups: tuple[int, ...]) -> jax.Array:
    """A number per block, repeated for each of its groups."""
    return jnp.broadcast_to(field[..., None], (*field.shape, groups[-1] // field.shape[-1])).reshape(groups)


def power(exponent: jax.Array) -> jax.Array:
    """2^(exponent - 64) for an exponent of at most 128."""
    return lax.bitcast_convert_type((exponent.astype(jnp.uint32) + (127 - 64)) << 23, jnp.float32)


# --- pieces of blocks -------------------------------------------------------------------------------------------------


def _two(field: jax.Array) -> jax.Array:
    """Two bytes [..., 2] as uint16 [..., 1]: little-endian, as the file has it."""
    return lax.bitcast_convert_type(field, jnp.uint16)[..., None]


def _planes(field: jax.Array, bits: int, run: int | None = None) -> jax.Array:
    """Numbers of `bits` bits out of bytes, [..., n] to [..., n * 8 / bits].

    The lowest bits of every byte, then the next ones; of each `run` of bytes by itself, or of all.
    """
    runs = field.reshape(*field.shape[:-1], -1, run or field.shape[-1])
    shifts = jnp.arange(0, 8, bits, dtype=jnp.uint8).reshape(*(1,) * (runs.ndim - 1), -1, 1)
    return ((runs[..., None, :] >> shifts) & ((1 << bits) - 1)).reshape(*field.shape[:-1], -1)


def _in_order(field: jax.Array, bits: int) -> jax.Array:
    """Numbers of `bits` bits out of bytes, [..., n] to [..., n * 8 / bits]: all of the first byte, then the next."""
    shifts = jnp.arange(0, 8, bits, dtype=jnp.uint8).reshape(*(1,) * field.ndim, -1)
    return ((field[..., None] >> shifts) & ((1 << bits) - 1)).reshape(*field.shape[:-1], -1)


# --- blocks of 32: one scale, sometimes a minimum ---------------------------------------------------------------------


def _q8_0(blocks: jax.Array) -> Parts:
    """float16 scale, 32 signed bytes (as codes, 128 more)."""
    d, q = jnp.split(blocks, (2,), axis=-1)
    return Parts(q ^ 0x80, _two(d))


def _nibbles_of_32(blocks: jax.Array) -> Parts:
    """float16 scale, 16 bytes: low nibbles are weights 0 to 15, high nibbles 16 to 31 (Q4_0, IQ4_NL)."""
    d, q = jnp.split(blocks, (2,), axis=-1)
    return Parts(_planes(q, 4), _two(d))


def _q4_1(blocks: jax.Array) -> Parts:
    """float16 scale, float16 number to *add*, nibbles as in Q4_0."""
    d, m, q = jnp.split(blocks, (2, 4), axis=-1)
    return Parts(_planes(q, 4), _two(d), m=_two(m) ^ 0x8000)


def _q5_0(blocks: jax.Array) -> Parts:
    """float16 scale, 4 bytes with a fifth bit for each weight in turn, nibbles as in Q4_0."""
    d, high, low = jnp.split(blocks, (2, 6), axis=-1)
    return Parts(_planes(low, 4) | (_in_order(high, 1) << 4), _two(d))


def _q5_1(blocks: jax.Array) -> Parts:
    """float16 scale, float16 number to *add*, then as in Q5_0."""
    d, m, high, low = jnp.split(blocks, (2, 4, 8), axis=-1)
    return Parts(_planes(low, 4) | (_in_order(high, 1) << 4), _two(d), m=_two(m) ^ 0x8000)


def _mxfp4(blocks: jax.Array) -> Parts:
    """A byte e, the scale 2^(e - 128), and nibbles as in Q4_0."""
    e, q = jnp.split(blocks, (1,), axis=-1)
    return Parts(_planes(q, 4), e.astype(jnp.uint16))


# --- blocks of 256: a super-scale, and small scales of groups of 16 or 32 weights -------------------------------------


def _q2_k(blocks: jax.Array) -> Parts:
    """16 bytes of scale (low nibble) and minimum (high) of 16 weights each, 64 of bit pairs, both float16 factors."""
    scales, q, d, m = jnp.split(blocks, (16, 80, 82), axis=-1)
    return Parts(_planes(q, 2, 32), _two(d), scales & 15, _two(m), scales >> 4)


def _q3_k(blocks: jax.Array) -> Parts:
    """32 bytes of third bits, 64 of bit pairs, 12 of sixteen 6-bit scales less 32, float16 super-scale.

    The scales' low nibbles are in 8 bytes, their high bit pairs in the 4 after them.
    """
    high, low, low_scales, high_scales, d = jnp.split(blocks, (32, 96, 104, 108), axis=-1)
    scales = (_planes(low_scales, 4) | (_planes(high_scales, 2) << 4)).astype(jnp.int8) - 32
    return Parts(_planes(low, 2, 32) | (_planes(high, 1) << 2), _two(d), scales)


def _q4_k(blocks: jax.Array) -> Parts:
    """float16 factors of scales and minima, 12 bytes of these, 128 of nibbles."""
    d, m, small, q = jnp.split(blocks, (2, 4, 16), axis=-1)
    scales, minima = _scales_and_minima(small)
    return Parts(_planes(q, 4, 32), _two(d), scales, _two(m), minima)


def _q5_k(blocks: jax.Array) -> Parts:
    """As Q4_K, with 32 bytes of fifth bits in front of the nibbles."""
    d, m, small, high, low = jnp.split(blocks, (2, 4, 16, 48), axis=-1)
    scales, minima = _scales_and_minima(small)
    return Parts(_planes(low, 4, 32) | (_planes(high, 1) << 4), _two(d), scales, _two(m), minima)


def _q6_k(blocks: jax.Array) -> Parts:
    """128 bytes of low 4 bits, 64 of high 2 bits, 16 signed scales of 16 weights each, one float16 super-scale."""
    low, high, scales, d = jnp.split(blocks, (128, 192, 208), axis=-1)
    codes = _planes(low, 4, 64) | (_planes(high, 2, 32) << 4)
    return Parts(codes, _two(d), lax.bitcast_convert_type(scales, jnp.int8))


def _scales_and_minima(small: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Eight 6-bit scales and minima out of 12 bytes, [..., 8] uint8 each.

    Four bytes each for the first four scales and minima; the two bits they leave free are the high bits of the last
    four, whose low nibbles are in the last four bytes: the scale's low, the minimum's high.
    """
    a, b, c = jnp.split(small, 3, axis=-1)
    scales = jnp.concatenate([a & 63, (c & 15) | ((a >> 6) << 4)], axis=-1)
    minima = jnp.concatenate([b & 63, (c >> 4) | ((b >> 6) << 4)], axis=-1)
    return scales, minima


def _iq4_xs(blocks: jax.Array) -> Parts:
    """float16 super-scale, 2 bytes of high bit pairs and 4 of low nibbles of eight scales less 32, 128 of nibbles."""
    d, high, low, q = jnp.split(blocks, (2, 4, 8), axis=-1)
    scales = (_in_order(low, 4) | (_in_order(high, 2) << 4)).astype(jnp.int8) - 32
    return Parts(_planes(q, 4, 16), _two(d), scales)


_PLAIN = {"F16": jnp.float16, "BF16": jnp.bfloat16}
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice what the four bits stand for


def _entry(name: str, split: Callable[[jax.Array], Parts] | None, bits: int, group: int = 1, **rest) -> BlockFormat:  # type: ignore[no-untyped-def]
    size, width = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    dtype = "uint8" if split else "float32" if name == "F32" else "uint16"
    return BlockFormat(name, size, width, dtype, split, bits, group, **rest)


FORMATS: dict[str, BlockFormat] = {
    fmt.name: fmt
    for fmt in (
        _entry("F32", None, 32),
        _entry("F16", None, 16),
        _entry("BF16", None, 16),
        _entry("Q8_0", _q8_0, 8, 32, offset=128),
        _entry("Q4_0", _nibbles_of_32, 4, 32, offset=8),
        _entry("Q4_1", _q4_1, 4, 32, minimum=True),
        _entry("Q5_0", _q5_0, 5, 32, offset=16),
        _entry("Q5_1", _q5_1, 5, 32, minimum=True),
        _entry("Q2_K", _q2_k, 2, 16, minimum=True),
        _entry("Q3_K", _q3_k, 3, 16, offset=4),
        _entry("Q4_K", _q4_k, 4, 32, minimum=True),
        _entry("Q5_K", _q5_k, 5, 32, minimum=True),
        _entry("Q6_K", _q6_k, 6, 16, offset=32),
        _entry("IQ4_NL", _nibbles_of_32, 4, 32, table=_IQ4),
        _entry("IQ4_XS", _iq4_xs, 4, 32, table=_IQ4),
        _entry("MXFP4", _mxfp4, 4, 32, table=_E2M1, exponent=True),
    )
}
