"""The trunk's forward pass: embed, each layer, final norm; and its output head."""

import jax

from sharpi_jax.model.attention import attention
from sharpi_jax.model.cache import DeltaState, KVCache, LayerState, TrunkCache
from sharpi_jax.model.config import ModelConfig
from sharpi_jax.model.delta import delta_net
from sharpi_jax.model.feed_forward import feed_forward
from sharpi_jax.model.norms import rms_norm
from sharpi_jax.model.params import AttentionParams, DeltaParams, LayerParams, ModelParams
from sharpi_jax.model.rope import RopeTable
from sharpi_jax.model.window import Window
from sharpi_jax.quant import Weight, matmul, take_rows


def trunk(
    params: ModelParams, cfg: ModelConfig, tokens: jax.Array, cache: TrunkCache, window: Window
) -> tuple[jax.Array, TrunkCache]:
    """Runs the trunk over a window.

    Args:
      tokens: [B, T] int32. cache: states covering each row's positions before the window.

    Returns:
      hidden [B, T, D] float32 *after* the final norm (what the head and the MTP block both take), and the states.
    """
    x = take_rows(params.embed, tokens)
    states = []
    for index, (p, state) in enumerate(zip(params.layers, cache.layers, strict=True)):
        with jax.named_scope(f"layer_{index}"):
            x, state = layer(p, cfg, x, state, window, cache.rope)
        states.append(state)
    return rms_norm(x, params.final_norm, cfg.norm_eps), TrunkCache(tuple(states), cache.rope)


def layer(
    p: LayerParams, cfg: ModelConfig, x: jax.Array, state: LayerState, window: Window, rope: RopeTable
) -> tuple[jax.Array, LayerState]:
    """One pre-norm residual layer of either kind: x [B, T, D] -> ([B, T, D], state)."""
    y = rms_norm(x, p.mixer_norm, cfg.norm_eps)
    new_state: LayerState
    match p.mixer, state:
        case AttentionParams(), KVCache():
            mixed, new_state = attention(p.mixer, cfg, y, state, window, rope)
        case DeltaParams(), DeltaState():
            mixed, new_state = delta_net(p.mixer, cfg, y, state, window)
        case _:
            raise TypeError(f"a {type(p.mixer).__name__} layer was given a {type(state).__name__}")
    x = x + mixed
    return x + feed_forward(p.ffn, cfg, rms_norm(x, p.ffn_norm, cfg.norm_eps), window), new_state


def head(weight: Weight, cfg: ModelConfig, hidden: jax.Array) -> jax.Array:
    """Logits [..., V] float32 of hidden [..., D]."""
    with jax.named_scope("head"):
        return matmul(hidden, weight, cfg.dtype)
