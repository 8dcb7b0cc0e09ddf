"""The MTP ("nextn") block: from a token and the hidden before it, the hidden and logits of the token after it.

The entry (token x_p, hidden h_{p-1}) sits at position p and predicts x_{p+1}; position 0 has an entry too, with a zero
hidden. What must not be got wrong: the embedding comes *first* in the concatenation, the hidden handed over is the one
*after* the final norm, and chained drafts feed back the block's own hidden *after* its head norm. A wrong wiring never
breaks the text, only the speed, so tests hold the block's logits, not its acceptance.
"""

import jax
import jax.numpy as jnp

from sharpi_jax.model.cache import KVCache
from sharpi_jax.model.config import ModelConfig
from sharpi_jax.model.norms import rms_norm
from sharpi_jax.model.params import MtpParams
from sharpi_jax.model.rope import RopeTable
from sharpi_jax.model.trunk import layer
from sharpi_jax.model.window import Window
from sharpi_jax.quant import matmul, take_rows


def mtp_block(
    p: MtpParams,
    cfg: ModelConfig,
    tokens: jax.Array,
    hidden: jax.Array,
    cache: KVCache,
    window: Window,
    rope: RopeTable,
) -> tuple[jax.Array, KVCache]:
    """Runs the block over a window.

    Args:
      tokens: [B, T] int32 at the window's positions. hidden: [B, T, D], each of the position before.
      cache: the block's own keys and values.

    Returns:
      hidden [B, T, D] after the head norm (for `head(p.head, ...)` and for chaining), and the cache.
    """
    with jax.named_scope("mtp"):
        embedding = rms_norm(take_rows(p.embed, tokens), p.embed_norm, cfg.norm_eps)
        before = rms_norm(hidden, p.hidden_norm, cfg.norm_eps)
        u = matmul(jnp.concatenate([embedding, before], axis=-1), p.proj, cfg.dtype)
        u, state = layer(p.layer, cfg, u, cache, window, rope)
        assert isinstance(state, KVCache)
        return rms_norm(u, p.head_norm, cfg.norm_eps), state
