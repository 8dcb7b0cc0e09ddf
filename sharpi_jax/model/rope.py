"""Rotary position embedding (Su et al. 2021), NEOX pairing, from tables made in float64 on the host.

For text all of Qwen's position streams agree, so the sectioned form is the plain one over R dimensions.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct


@struct.dataclass
class RopeTable:
    """cos and sin of position * base^(-2i/R): [S, R/2] float32 each."""

    cos: jax.Array
    sin: jax.Array


def rope_table(slots: int, dims: int, base: float) -> RopeTable:
    """The table of positions 0 to slots - 1. Host work: call it outside jit."""
    frequency = base ** (-np.arange(0, dims, 2, dtype=np.float64) / dims)
    angle = np.arange(slots, dtype=np.float64)[:, None] * frequency[None, :]
    return RopeTable(jnp.asarray(np.cos(angle).astype(np.float32)), jnp.asarray(np.sin(angle).astype(np.float32)))


def rotate(x: jax.Array, table: RopeTable, positions: jax.Array) -> jax.Array:
    """Rotates the first R dimensions of each head, pairing i with i + R/2; the rest passes through.

    Args:
      x: [B, T, H, E]. positions: [B, T]; one at or past the table's end is clipped (such rows are never kept).
    """
    half = table.cos.shape[1]
    cos = jnp.take(table.cos, positions, axis=0, mode="clip")[:, :, None, :]
    sin = jnp.take(table.sin, positions, axis=0, mode="clip")[:, :, None, :]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)
