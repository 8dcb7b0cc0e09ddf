"""Full attention with a per-row cache; with an output gate in Qwen3.5, plain in the other architectures.

What must not be got wrong: a query's bits must depend neither on how many queries the window has, nor on how many rows
the batch has, nor on how many slots the cache has. XLA chooses its kernels by size, so in decode windows every dot is
of GROUP queries and one block of BLOCK slots, whatever T, B and S, and blocks stand at fixed places. The caches are
only ever sliced by block: a slice by row, or a map over rows, would copy them whole at every step.
"""

import jax
import jax.numpy as jnp
from jax import lax

from sharpi_jax import kernel
from sharpi_jax.model.cache import BLOCK, KVCache, from_stored, to_stored
from sharpi_jax.model.config import ModelConfig
from sharpi_jax.model.norms import rms_norm, row_sum
from sharpi_jax.model.params import AttentionParams
from sharpi_jax.model.rope import RopeTable, rotate
from sharpi_jax.model.window import Window
from sharpi_jax.quant import Weight, matmul

GROUP = 2  # queries of a decode window that share a dot
_PRECISION = lax.Precision.HIGHEST
_Softmax = tuple[jax.Array, jax.Array, jax.Array]  # highest score, sum of weights [N, R, 1]; weighted values [N, R, E]


STORED = {"uint16": "Bfloat16", "float16": "Float16", "float32": "Float32"}  # the kernel's names of caches' types


def attention(
    p: AttentionParams, cfg: ModelConfig, y: jax.Array, cache: KVCache, window: Window, rope: RopeTable
) -> tuple[jax.Array, KVCache]:
    """One attention mixer: y [B, T, D] normed input -> ([B, T, D], cache with the window's valid positions written)."""
    B, T, _ = y.shape
    q = _project(y, p.q, p.q_bias, cfg, window).reshape(B, T, cfg.heads, -1)
    q, gate = jnp.split(q, 2, axis=-1) if cfg.gated else (q, None)
    k = _project(y, p.k, p.k_bias, cfg, window).reshape(B, T, cfg.key_heads, cfg.head_dim)
    v = _project(y, p.v, p.v_bias, cfg, window).reshape(B, T, cfg.key_heads, cfg.head_dim)
    if p.q_norm is not None and p.k_norm is not None:
        q, k = rms_norm(q, p.q_norm, cfg.norm_eps), rms_norm(k, p.k_norm, cfg.norm_eps)
    q, k = rotate(q, rope, window.positions), rotate(k, rope, window.positions)
    cache = _write(cache, k, v, window)

    q = q.reshape(B, T, cfg.key_heads, cfg.heads // cfg.key_heads, cfg.head_dim) * cfg.head_dim**-0.5
    mixed = _attend(q, window, cache).reshape(B, T, -1)
    if gate is not None:
        mixed = mixed * jax.nn.sigmoid(gate.reshape(B, T, -1))
    return matmul(mixed, p.out, cfg.dtype, window.used), cache


def _project(y: jax.Array, weight: Weight, bias: jax.Array | None, cfg: ModelConfig, window: Window) -> jax.Array:
    out = matmul(y, weight, cfg.dtype, window.used)
    return out if bias is None else out + bias[None, None]


def _write(cache: KVCache, k: jax.Array, v: jax.Array, window: Window) -> KVCache:
    """Stores [B, T, N, E] keys and values at the window's slots; padding goes to slot S, which `drop` discards."""
    slots = jnp.where(window.valid, window.positions, cache.k.shape[1])
    rows = jnp.arange(k.shape[0])[:, None]
    return KVCache(
        cache.k.at[rows, slots].set(to_stored(k, cache.k.dtype), mode="drop"),
        cache.v.at[rows, slots].set(to_stored(v, cache.v.dtype), mode="drop"),
    )


def _attend(q: jax.Array, window: Window, cache: KVCache) -> jax.Array:
    """Causal grouped attention: q [B, T, N, G, E], already scaled -> [B, T, N, G, E].

    Of each row only the slots up to its last valid position are read (in XLA's form whole blocks), each once for all
    queries. Decode windows on a CPU go through the C++ kernel where there is one that has vectors (its portable
    path is slower than XLA's form); prompts never do: training differentiates them.
    """
    if not window.row_exact or kernel.problem() or kernel.paths_here()[0] == "portable":
        return _by_blocks(q, window, cache)
    mixed: jax.Array = lax.platform_dependent(q, window, cache, cpu=_by_kernel, default=_by_blocks)
    return mixed


def _by_kernel(q: jax.Array, window: Window, cache: KVCache, path: str | None = None) -> jax.Array:
    """The C++ kernel's result, in which padding is 0; `path` is one of kernel.PATHS, the best unless given."""
    target = kernel.target("attention", f"SHARPI_CACHE={STORED[str(cache.k.dtype)]}", path=path)
    call = jax.ffi.ffi_call(target, jax.ShapeDtypeStruct(q.shape, jnp.float32))
    return call(q, window.positions, window.valid, cache.k, cache.v)


def _by_blocks(q: jax.Array, window: Window, cache: KVCache) -> jax.Array:
    """XLA's form."""
    B, T, N, G, E = q.shape
    size = GROUP if window.row_exact else T
    pad = -T % size
    queries = jnp.pad(q, ((0, 0), (0, pad), (0, 0), (0, 0), (0, 0))).reshape(B, -1, size, N, G, E)
    queries = jnp.moveaxis(queries, 3, 2).reshape(B, -1, N, size * G, E)
    positions = jnp.pad(window.positions, ((0, 0), (0, pad)))
    positions = jnp.repeat(positions, G, axis=1).reshape(B, -1, 1, size * G, 1)
    last = jnp.max(jnp.where(window.valid, window.positions, 0), axis=1)
    blocks = jnp.minimum(last // BLOCK + 1, cache.k.shape[1] // BLOCK)

    # A window over the whole cache needs every block: a fixed number of them has gradients, which training takes.
    every = cache.k.shape[1] // BLOCK
    spans_all = not window.row_exact and cache.k.shape[1] - T < BLOCK

    def one_row(row: tuple[jax.Array, ...]) -> jax.Array:
        index, count, q_row, positions_row = row
        groups = [(q_row[i], positions_row[i]) for i in range(q_row.shape[0])]

        def one_block(block: jax.Array, softmaxes: list[_Softmax]) -> list[_Softmax]:
            k, v = _read(cache.k, index, block), _read(cache.v, index, block)
            return [_add_block(s, *group, k, v, block) for s, group in zip(softmaxes, groups, strict=True)]

        empty = [_empty(q_group) for q_group, _ in groups]
        done = lax.fori_loop(0, every if spans_all else count, one_block, empty)
        return jnp.stack([mixed / total for _, total, mixed in done])

    mixed: jax.Array = lax.map(one_row, (jnp.arange(B), blocks, queries, positions))
    mixed = jnp.moveaxis(mixed.reshape(B, -1, N, size, G, E), 2, 3)
    return mixed.reshape(B, T + pad, N, G, E)[:, :T]


def _read(cache: jax.Array, row: jax.Array, block: jax.Array) -> jax.Array:
    """Slots of one block of one row, [N, BLOCK, E] float32."""
    _, _, N, E = cache.shape
    piece = lax.dynamic_slice(cache, (row, block * BLOCK, 0, 0), (1, BLOCK, N, E))[0]
    return jnp.moveaxis(from_stored(piece), 1, 0)


def _empty(q: jax.Array) -> _Softmax:
    column = jnp.zeros((*q.shape[:-1], 1), jnp.float32)
    return column - jnp.inf, column, jnp.zeros_like(q)


def _add_block(
    softmax: _Softmax, q: jax.Array, positions: jax.Array, k: jax.Array, v: jax.Array, block: jax.Array
) -> _Softmax:
    """Goes on with queries [N, R, E] at positions [1, R, 1] over one more block's keys and values [N, BLOCK, E]."""
    highest, total, mixed = softmax
    slots = block * BLOCK + jnp.arange(BLOCK)[None, None, :]
    scores = jnp.einsum("nre,nse->nrs", q, k, precision=_PRECISION)
    scores = jnp.where(slots <= positions, scores, -jnp.inf)
    new_highest = jnp.maximum(highest, jnp.max(scores, axis=-1, keepdims=True))
    weights, shrink = jnp.exp(scores - new_highest), jnp.exp(highest - new_highest)
    new = (
        new_highest,
        total * shrink + row_sum(weights),
        mixed * shrink + jnp.einsum("nrs,nse->nre", weights, v, precision=_PRECISION),
    )
    # A block past a query's own position leaves it as it is: other queries of the window may need that block.
    seen = block * BLOCK <= positions
    return tuple(jnp.where(seen, a, b) for a, b in zip(new, softmax, strict=True))  # type: ignore[return-value]
