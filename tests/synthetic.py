"""A model of random weights in any shape: for what the fixtures are too small to show. Not part of the package."""

import jax.numpy as jnp
import numpy as np

from sharpi_jax.model.config import ModelConfig
from sharpi_jax.model.params import AttentionParams, DeltaParams, FeedForwardParams, LayerParams, ModelParams, MtpParams
from sharpi_jax.quant import Packed

# The layer shapes of Qwen3.5-0.8B, with fewer layers and a smaller vocabulary.
REAL_LAYERS = ModelConfig(
    architecture="qwen35",
    layer_kinds=("delta", "attention"),
    has_mtp=True,
    width=1024,
    vocab_size=2048,
    context_length=4096,
    ffn_width=3584,
    heads=8,
    key_heads=2,
    head_dim=256,
    rope_dims=64,
    rope_base=1e7,
    norm_eps=1e-6,
    delta_heads=16,
    delta_key_heads=16,
    delta_head_dim=128,
    conv_taps=4,
)


def random_model(cfg: ModelConfig, seed: int = 0) -> ModelParams:
    """Float32 weights at the usual initial scale."""
    rng = np.random.default_rng(seed)

    def matrix(rows, columns):
        return Packed(jnp.asarray(rng.standard_normal((rows, columns), np.float32) * columns**-0.5), "F32")

    def vector(*shape):
        return jnp.asarray(1 + 0.1 * rng.standard_normal(shape, np.float32))

    D, F, E, V = cfg.width, cfg.ffn_width, cfg.head_dim, cfg.vocab_size
    dHE, C = cfg.delta_heads * cfg.delta_head_dim, cfg.conv_channels

    def layer(kind):
        if kind == "attention":
            mixer = AttentionParams(
                q=matrix(2 * cfg.heads * E, D),
                k=matrix(cfg.key_heads * E, D),
                v=matrix(cfg.key_heads * E, D),
                out=matrix(D, cfg.heads * E),
                q_norm=vector(E),
                k_norm=vector(E),
            )
        else:
            mixer = DeltaParams(
                qkv=matrix(C, D),
                gate=matrix(dHE, D),
                alpha=matrix(cfg.delta_heads, D),
                beta=matrix(cfg.delta_heads, D),
                a=-vector(cfg.delta_heads),
                dt=vector(cfg.delta_heads),
                conv=vector(C, cfg.conv_taps) / 2,
                norm=vector(cfg.delta_head_dim),
                out=matrix(D, dHE),
            )
        ffn = FeedForwardParams(gate=matrix(F, D), up=matrix(F, D), down=matrix(D, F))
        return LayerParams(mixer_norm=vector(D), mixer=mixer, ffn_norm=vector(D), ffn=ffn)

    embed = matrix(V, D)
    mtp = MtpParams(
        embed=embed,
        embed_norm=vector(D),
        hidden_norm=vector(D),
        proj=matrix(D, 2 * D),
        layer=layer("attention"),
        head_norm=vector(D),
        head=embed,
    )
    return ModelParams(
        embed=embed,
        layers=tuple(layer(kind) for kind in cfg.layer_kinds),
        final_norm=vector(D),
        head=embed,
        mtp=mtp if cfg.has_mtp else None,
    )
