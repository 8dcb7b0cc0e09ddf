"""Normalisations, in float32.

What must not be got wrong: a row's bits must not depend on how many rows there are, and XLA's CPU reductions do: from
4096 elements on they sum in another order. So on a CPU a row is summed by a kernel of our own, and where there is none
by a dot with ones, which keeps that promise too.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sharpi_jax import kernel
from sharpi_jax.quant import rows_dot


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis (Zhang & Sennrich 2019): x [..., D], weight [D]."""
    return _normed(x, weight, x.shape[-1], eps)


def l2_norm(x: jax.Array, eps: float) -> jax.Array:
    """x / sqrt(sum(x^2) + eps) over the last axis, as Gated DeltaNet normalises its queries and keys."""
    return _normed(x, jnp.ones(x.shape[-1:], jnp.float32), 1, eps)


def row_sum(x: jax.Array) -> jax.Array:
    """Sum over the last axis, by a dot with ones: [..., D] -> [..., 1]."""
    return rows_dot(x, jnp.ones((1, x.shape[-1]), jnp.float32))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _normed(x: jax.Array, weight: jax.Array, divisor: int, eps: float) -> jax.Array:
    """x / sqrt(sum(x^2) / divisor + eps) * weight."""
    if jax.default_backend() != "cpu" or kernel.problem():
        return _by_xla(x, weight, divisor, eps)
    by_kernel, by_xla = (functools.partial(f, divisor=divisor, eps=eps) for f in (_by_kernel, _by_xla))
    y: jax.Array = lax.platform_dependent(x, weight, cpu=by_kernel, default=by_xla)
    return y


def _by_kernel(x: jax.Array, weight: jax.Array, divisor: int, eps: float, path: str | None = None) -> jax.Array:
    rows = x.reshape(-1, x.shape[-1])
    call = jax.ffi.ffi_call(kernel.target("norms", path=path), jax.ShapeDtypeStruct(rows.shape, jnp.float32))
    y: jax.Array = call(rows, weight, divisor=np.float32(divisor), eps=np.float32(eps))
    return y.reshape(x.shape)


def _by_xla(x: jax.Array, weight: jax.Array, divisor: int, eps: float) -> jax.Array:
    scale = lax.rsqrt(row_sum(jnp.square(x)) / divisor + eps)
    return x * scale * weight.reshape((1,) * (x.ndim - 1) + weight.shape)


def _forward(x: jax.Array, weight: jax.Array, divisor: int, eps: float) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return _normed(x, weight, divisor, eps), (x, weight)


def _backward(divisor: int, eps: float, saved: tuple[jax.Array, ...], slope: jax.Array) -> tuple[jax.Array, ...]:
    """Training's gradients: the kernel has none, and needs none."""
    slopes: tuple[jax.Array, ...] = jax.vjp(functools.partial(_by_xla, divisor=divisor, eps=eps), *saved)[1](slope)
    return slopes


_normed.defvjp(_forward, _backward)
