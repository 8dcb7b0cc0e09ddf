"""GGUF block formats: how the bytes of a block become float32 numbers, inside a compiled program.

Each `decode` repeats the arithmetic of the format's definition (ggml's `dequantize_row_*`) in its order of operations,
so that results equal `gguf.quants` bit for bit. The one exception is a float32 result below 2^-126, which XLA flushes
to zero.
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


def _q8_0(blocks: jax.Array) -> jax.Array:
    """float16 scale, 32 signed bytes."""
    return _half(blocks[..., :2]) * _signed(blocks[..., 2:]).astype(jnp.float32)


def _q4_0(blocks: jax.Array) -> jax.Array:
    """float16 scale, 16 bytes: low nibbles are weights 0 to 15, high nibbles 16 to 31, each less 8."""
    nibbles = blocks[..., 2:]
    q = jnp.concatenate([nibbles & 15, nibbles >> 4], axis=-1)
    return _half(blocks[..., :2]) * (q.astype(jnp.int8) - 8).astype(jnp.float32)


def _q6_k(blocks: jax.Array) -> jax.Array:
    """128 bytes of low 4 bits, 64 of high 2 bits, 16 signed scales of 16 weights each, one float16 super-scale."""
    lead = blocks.shape[:-1]
    low, high, scales, d = jnp.split(blocks, (128, 192, 208), axis=-1)
    # Two halves of 128 weights each: 64 bytes of low nibbles (weights 0..63, then 64..127), 32 bytes of high bit pairs.
    low = low.reshape(*lead, 2, 64)
    low = jnp.concatenate([low & 15, low >> 4], axis=-1)
    high = high.reshape(*lead, 2, 32)
    high = jnp.concatenate([(high >> shift) & 3 for shift in (0, 2, 4, 6)], axis=-1)
    q = (low | (high << 4)).astype(jnp.int8) - 32
    scale = _half(d) * _signed(scales).astype(jnp.float32)
    return (scale[..., None] * q.reshape(*lead, 16, 16).astype(jnp.float32)).reshape(*lead, 256)


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
        _entry("Q6_K", "uint8", _q6_k),
    ]
)
