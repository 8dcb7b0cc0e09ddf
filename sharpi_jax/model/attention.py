"""Full attention with a per-row cache; with an output gate in Qwen3.5, plain in the other architectures.

What must not be got wrong: a query's bits must depend neither on how many queries the window has nor on how many rows
the batch has. One einsum does (XLA chooses its kernels by size), so decode windows go one query at a time; prompts,
whose shape is the same with and without drafting, take the single einsum.
"""

import jax
import jax.numpy as jnp
from jax import lax

from sharpi_jax.model.cache import KVCache
from sharpi_jax.model.config import ModelConfig
from sharpi_jax.model.norms import rms_norm, row_sum
from sharpi_jax.model.params import AttentionParams
from sharpi_jax.model.rope import RopeTable, rotate
from sharpi_jax.model.window import Window
from sharpi_jax.quant import Weight, matmul

_PRECISION = lax.Precision.HIGHEST


def attention(
    p: AttentionParams, cfg: ModelConfig, y: jax.Array, cache: KVCache, window: Window, rope: RopeTable
) -> tuple[jax.Array, KVCache]:
    """One attention mixer: y [B, T, D] normed input -> ([B, T, D], cache with the window's valid positions written)."""
    B, T, _ = y.shape
    q = _project(y, p.q, p.q_bias, cfg).reshape(B, T, cfg.heads, -1)
    q, gate = jnp.split(q, 2, axis=-1) if cfg.gated else (q, None)
    k = _project(y, p.k, p.k_bias, cfg).reshape(B, T, cfg.key_heads, cfg.head_dim)
    v = _project(y, p.v, p.v_bias, cfg).reshape(B, T, cfg.key_heads, cfg.head_dim)
    if p.q_norm is not None and p.k_norm is not None:
        q, k = rms_norm(q, p.q_norm, cfg.norm_eps), rms_norm(k, p.k_norm, cfg.norm_eps)
    q, k = rotate(q, rope, window.positions), rotate(k, rope, window.positions)
    cache = _write(cache, k, v, window)

    q = q.reshape(B, T, cfg.key_heads, cfg.heads // cfg.key_heads, cfg.head_dim) * cfg.head_dim**-0.5
    mixed = (_attend_one_by_one if window.row_exact else _attend)(q, window.positions, cache)
    mixed = mixed.reshape(B, T, -1)
    if gate is not None:
        mixed = mixed * jax.nn.sigmoid(gate.reshape(B, T, -1))
    return matmul(mixed, p.out, cfg.dtype), cache


def _project(y: jax.Array, weight: Weight, bias: jax.Array | None, cfg: ModelConfig) -> jax.Array:
    out = matmul(y, weight, cfg.dtype)
    return out if bias is None else out + bias[None, None]


def _write(cache: KVCache, k: jax.Array, v: jax.Array, window: Window) -> KVCache:
    """Stores [B, T, N, E] keys and values at the window's slots; padding goes to slot S, which `drop` discards."""
    slots = jnp.where(window.valid, window.positions, cache.k.shape[1])
    rows = jnp.arange(k.shape[0])[:, None]
    return KVCache(
        cache.k.at[rows, slots].set(k.astype(cache.k.dtype), mode="drop"),
        cache.v.at[rows, slots].set(v.astype(cache.v.dtype), mode="drop"),
    )


def _attend_one_by_one(q: jax.Array, positions: jax.Array, cache: KVCache) -> jax.Array:
    """As `_attend`, a row after the other and in it a query after the other: bits depend on neither B nor T."""

    def one_row(row: tuple[jax.Array, ...]) -> jax.Array:
        q_row, positions_row, k, v = row

        def one_query(query: tuple[jax.Array, jax.Array]) -> jax.Array:
            q_one, position = query
            return _attend(q_one[None, None], position[None, None], KVCache(k[None], v[None]))[0, 0]

        out: jax.Array = lax.map(one_query, (q_row, positions_row))
        return out

    mixed: jax.Array = lax.map(one_row, (q, positions, cache.k, cache.v))
    return mixed


def _attend(q: jax.Array, positions: jax.Array, cache: KVCache) -> jax.Array:
    """Causal grouped attention over the cache: q [B, T, N, G, E], positions [B, T] -> [B, T, N, G, E]."""
    k, v = cache.k.astype(jnp.float32), cache.v.astype(jnp.float32)
    scores = jnp.einsum("btnge,bsne->btngs", q, k, precision=_PRECISION)
    visible = jnp.arange(k.shape[1])[None, None, :] <= positions[:, :, None]
    scores = jnp.where(visible[:, :, None, None, :], scores, -jnp.inf)
    weights = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    return jnp.einsum("btngs,bsne->btnge", weights, v, precision=_PRECISION) / row_sum(weights)
