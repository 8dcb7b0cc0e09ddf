"""The Gated DeltaNet mixer: projections, causal convolution, gated delta rule, gated norm.

What must not be got wrong: GGUF *tiles* value heads over key heads (value head h uses key head h % N); the Hugging Face
order (h // (H/N), a repeat) loads without complaint and writes nonsense.
"""

import jax
import jax.numpy as jnp

from sharpi_jax.model.cache import DeltaState, DeltaWindow
from sharpi_jax.model.config import ModelConfig
from sharpi_jax.model.delta_rule import chunked_delta_rule, recurrent_delta_rule, replay
from sharpi_jax.model.norms import l2_norm, rms_norm
from sharpi_jax.model.params import DeltaParams
from sharpi_jax.model.window import Window
from sharpi_jax.quant import matmul


def delta_net(
    p: DeltaParams, cfg: ModelConfig, y: jax.Array, state: DeltaState, window: Window
) -> tuple[jax.Array, DeltaState | DeltaWindow]:
    """One Gated DeltaNet mixer: y [B, T, D] normed input -> ([B, T, D], state).

    A decode window (row_exact) returns a DeltaWindow, of which `state_after` makes the state after any of its tokens; a
    prompt returns the DeltaState after its valid positions.
    """
    B, T, _ = y.shape
    mixed = matmul(y, p.qkv, cfg.dtype, window.used)
    beta = jax.nn.sigmoid(matmul(y, p.beta, cfg.dtype, window.used))
    g = jax.nn.softplus(matmul(y, p.alpha, cfg.dtype, window.used) + p.dt[None, None]) * p.a[None, None]
    inputs = jnp.concatenate([state.conv, mixed], axis=1)
    q, k, v = _split_heads(cfg, jax.nn.silu(_causal_conv(inputs, p.conv)))

    if window.row_exact:
        used = window.used
        q, k, v, decay, beta = (a[:, :used] for a in (q, k, v, jnp.exp(g), beta))
        o, d = recurrent_delta_rule(q, k, v, decay, beta, state.recurrent)
        o = jnp.pad(o, ((0, 0), (0, T - used), (0, 0), (0, 0)))
        new_state: DeltaState | DeltaWindow = DeltaWindow(inputs, k, d, decay)
    else:
        o, final = chunked_delta_rule(q, k, v, g, beta, window.valid, state.recurrent)
        count = jnp.sum(window.valid, axis=1, dtype=jnp.int32)
        new_state = DeltaState(conv_state_after(inputs, count, cfg.conv_taps), final)

    o = rms_norm(o, p.norm, cfg.norm_eps).reshape(B, T, -1) * jax.nn.silu(matmul(y, p.gate, cfg.dtype, window.used))
    return matmul(o, p.out, cfg.dtype, window.used), new_state


def state_after(before: DeltaState, window: DeltaWindow, count: jax.Array, taps: int) -> DeltaState:
    """The state after the first `count` [B] tokens of a decode window; `before` where that is none."""
    return DeltaState(
        conv_state_after(window.conv, count, taps),
        replay(before.recurrent, window.k, window.written, window.decay, count),
    )


def conv_state_after(inputs: jax.Array, count: jax.Array, taps: int) -> jax.Array:
    """The conv state [B, J-1, C] after `count` [B] tokens of a window whose conv inputs are [B, J-1+T, C]."""
    rows = count[:, None] + jnp.arange(taps - 1, dtype=jnp.int32)[None, :]
    return jnp.take_along_axis(inputs, rows[:, :, None], axis=1)


def _causal_conv(inputs: jax.Array, taps: jax.Array) -> jax.Array:
    """Depthwise causal convolution: inputs [B, J-1+T, C], taps [C, J] oldest first -> [B, T, C]."""
    J = taps.shape[1]
    T = inputs.shape[1] - (J - 1)
    out = inputs[:, :T] * taps[None, None, :, 0]
    for j in range(1, J):
        out = out + inputs[:, j : j + T] * taps[None, None, :, j]
    return out


def _split_heads(cfg: ModelConfig, mixed: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Conv output [B, T, C] -> q, k (normed, tiled to the value heads) and v, [B, T, H, E] each."""
    B, T, _ = mixed.shape
    E, N, H = cfg.delta_head_dim, cfg.delta_key_heads, cfg.delta_heads
    q, k, v = jnp.split(mixed, (N * E, 2 * N * E), axis=-1)
    q = l2_norm(q.reshape(B, T, N, E), cfg.norm_eps) * E**-0.5
    k = l2_norm(k.reshape(B, T, N, E), cfg.norm_eps)
    tile = (1, 1, H // N, 1)
    return jnp.tile(q, tile), jnp.tile(k, tile), v.reshape(B, T, H, E)
