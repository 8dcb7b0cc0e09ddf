"""Rotary position embedding (Su et al. 2021), from tables made in float64 on the host.

For text all of Qwen's position streams agree, so the sectioned form is the plain one over R dimensions.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from sharpi_jax.model.config import ModelConfig


@struct.dataclass
class RopeTable:
    """cos and sin of position * base^(-2i/R): [S, R/2] float32 each.

    interleaved: dimension 2i is paired with 2i + 1 (GGUF's "llama"); else i with i + R/2 (NEOX).
    """

    cos: jax.Array
    sin: jax.Array
    interleaved: bool = struct.field(pytree_node=False, default=False)


def rope_of(cfg: ModelConfig, slots: int) -> RopeTable:
    """A model's table of positions 0 to slots - 1. Host work: call it outside jit."""
    table = rope_table(slots, cfg.rope_dims, cfg.rope_base, cfg.rope_factors)
    return RopeTable(table.cos, table.sin, cfg.rope_interleaved)


def rope_table(slots: int, dims: int, base: float, factors: Sequence[float] = ()) -> RopeTable:
    """The table of `dims` = R rotated dimensions, the frequencies divided by `factors`, R/2 or one."""
    frequency = base ** (-np.arange(0, dims, 2, dtype=np.float64) / dims)
    if factors:
        frequency = frequency / np.asarray(factors, np.float64)
    angle = np.arange(slots, dtype=np.float64)[:, None] * frequency[None, :]
    return RopeTable(jnp.asarray(np.cos(angle).astype(np.float32)), jnp.asarray(np.sin(angle).astype(np.float32)))


def rotate(x: jax.Array, table: RopeTable, positions: jax.Array) -> jax.Array:
    """Rotates the first R dimensions of each head in pairs; the rest passes through.

    Args:
      x: [B, T, H, E]. positions: [B, T]; one at or past the table's end is clipped (such rows are never kept).
    """
    half = table.cos.shape[1]
    cos = jnp.take(table.cos, positions, axis=0, mode="clip")[:, :, None, :]
    sin = jnp.take(table.sin, positions, axis=0, mode="clip")[:, :, None, :]
    rotated, rest = x[..., : 2 * half], x[..., 2 * half :]
    if table.interleaved:
        a, b = rotated[..., ::2], rotated[..., 1::2]
        turned = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(rotated.shape)
        return jnp.concatenate([turned, rest], axis=-1)
    a, b = rotated[..., :half], rotated[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)
