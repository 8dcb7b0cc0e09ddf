"""The demo model's shape and its first weights, in the package's own types.

What is trained is a `ModelParams` with three differences, undone by `to_params`: the tied tables are held once, and a
delta layer's `a` holds log A, so that -exp(log A) stays negative. Norms hold the whole weight, which is what a GGUF
holds (a Hugging Face checkpoint has it less one).
"""

import math

import jax
import jax.numpy as jnp

from sharpi_jax.model.config import ModelConfig
from sharpi_jax.model.params import (
    AttentionParams,
    DeltaParams,
    FeedForwardParams,
    LayerParams,
    ModelParams,
    MtpParams,
)
from sharpi_jax.quant import Packed

CONFIG = ModelConfig(
    architecture="qwen35",
    layer_kinds=("delta", "delta", "delta", "attention"),
    has_mtp=True,
    width=256,
    vocab_size=4096,
    context_length=1024,
    ffn_width=768,
    heads=4,
    key_heads=2,
    head_dim=64,
    rope_dims=32,
    rope_base=10000.0,
    norm_eps=1e-6,
    delta_heads=8,
    delta_key_heads=4,
    delta_head_dim=32,
    conv_taps=4,
)


def init_trainable(cfg: ModelConfig, key: jax.Array) -> ModelParams:
    """First weights: matrices normal of deviation 1/sqrt(inputs), those into the residual stream smaller by depth."""
    keys = iter(jax.random.split(key, 256))
    residual = 1 / math.sqrt(2 * len(cfg.layer_kinds))

    def matrix(outputs: int, inputs: int, scale: float = 1.0) -> Packed:
        return Packed(jax.random.normal(next(keys), (outputs, inputs)) * (scale / math.sqrt(inputs)), "F32")

    def attention() -> AttentionParams:
        queries, stored = cfg.heads * cfg.head_dim, cfg.key_heads * cfg.head_dim
        return AttentionParams(
            q=matrix(2 * queries, cfg.width),
            k=matrix(stored, cfg.width),
            v=matrix(stored, cfg.width),
            out=matrix(cfg.width, queries, residual),
            q_norm=jnp.ones(cfg.head_dim),
            k_norm=jnp.ones(cfg.head_dim),
        )

    def delta() -> DeltaParams:
        values = cfg.delta_heads * cfg.delta_head_dim
        # As Mamba-2 and Gated DeltaNet do: decay rates A of 1 to 16, time steps of 0.001 to 0.1, by the logarithm.
        step = jnp.exp(jax.random.uniform(next(keys), (cfg.delta_heads,), minval=math.log(1e-3), maxval=math.log(0.1)))
        return DeltaParams(
            qkv=matrix(cfg.conv_channels, cfg.width),
            gate=matrix(values, cfg.width),
            alpha=matrix(cfg.delta_heads, cfg.width),
            beta=matrix(cfg.delta_heads, cfg.width),
            a=jnp.log(jax.random.uniform(next(keys), (cfg.delta_heads,), minval=1.0, maxval=16.0)),
            dt=step + jnp.log(-jnp.expm1(-step)),  # softplus(dt) = step
            conv=jax.random.uniform(next(keys), (cfg.conv_channels, cfg.conv_taps), minval=-0.5, maxval=0.5),
            norm=jnp.ones(cfg.delta_head_dim),
            out=matrix(cfg.width, values, residual),
        )

    def layer(kind: str) -> LayerParams:
        return LayerParams(
            mixer_norm=jnp.ones(cfg.width),
            mixer=attention() if kind == "attention" else delta(),
            ffn_norm=jnp.ones(cfg.width),
            ffn=FeedForwardParams(
                gate=matrix(cfg.ffn_width, cfg.width),
                up=matrix(cfg.ffn_width, cfg.width),
                down=matrix(cfg.width, cfg.ffn_width, residual),
            ),
        )

    nothing = Packed(jnp.zeros((0, cfg.width)), "F32")
    return ModelParams(
        embed=matrix(cfg.vocab_size, cfg.width, 0.5),
        layers=tuple(layer(kind) for kind in cfg.layer_kinds),
        final_norm=jnp.ones(cfg.width),
        head=nothing,
        mtp=MtpParams(
            embed=nothing,
            embed_norm=jnp.ones(cfg.width),
            hidden_norm=jnp.ones(cfg.width),
            proj=matrix(cfg.width, 2 * cfg.width),
            layer=layer("attention"),
            head_norm=jnp.ones(cfg.width),
            head=nothing,
        ),
    )


def to_params(trainable: ModelParams) -> ModelParams:
    """What the package's forward pass takes: tables tied, `a` negative."""
    table = trainable.embed
    assert trainable.mtp is not None
    layers = tuple(
        layer.replace(mixer=layer.mixer.replace(a=-jnp.exp(layer.mixer.a)))
        if isinstance(layer.mixer, DeltaParams)
        else layer
        for layer in trainable.layers
    )
    return trainable.replace(layers=layers, head=table, mtp=trainable.mtp.replace(embed=table, head=table))
