"""Normalisations, in float32.

What must not be got wrong: a row's bits must not depend on how many rows there are, and XLA's CPU reductions do: from
4096 elements on they sum in another order. So each row is summed by a dot with ones, which keeps that promise.
"""

import jax
import jax.numpy as jnp
from jax import lax

from sharpi_jax.quant import rows_dot


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis (Zhang & Sennrich 2019): x [..., D], weight [D]."""
    scale = lax.rsqrt(row_sum(jnp.square(x)) / x.shape[-1] + eps)
    return x * scale * weight.reshape((1,) * (x.ndim - 1) + weight.shape)


def l2_norm(x: jax.Array, eps: float) -> jax.Array:
    """x / sqrt(sum(x^2) + eps) over the last axis, as Gated DeltaNet normalises its queries and keys."""
    return x * lax.rsqrt(row_sum(jnp.square(x)) + eps)


def row_sum(x: jax.Array) -> jax.Array:
    """Sum over the last axis, by a dot with ones: [..., D] -> [..., 1]."""
    return rows_dot(x, jnp.ones((1, x.shape[-1]), jnp.float32))
