"""The weights, as frozen pytrees. Matrices are `Weight`s; norms, biases and taps are float32 arrays."""

import jax
from flax import struct

from sharpi_jax.quant import Weight


@struct.dataclass
class AttentionParams:
    """Full attention. Where it is gated q holds, per head, E query rows and then E gate rows."""

    q: Weight  # [HE, D], gated [2HE, D]
    k: Weight  # [NE, D]
    v: Weight  # [NE, D]
    out: Weight  # [D, HE]
    q_norm: jax.Array | None = None  # [E]
    k_norm: jax.Array | None = None  # [E]
    q_bias: jax.Array | None = None  # [HE]
    k_bias: jax.Array | None = None  # [NE]
    v_bias: jax.Array | None = None  # [NE]


@struct.dataclass
class DeltaParams:
    """Gated DeltaNet. Value heads are tiled: value head h uses key head h % N."""

    qkv: Weight  # [C, D]
    gate: Weight  # [HE, D], the output gate z
    alpha: Weight  # [H, D], input of the log decay g
    beta: Weight  # [H, D], input of the write strength
    a: jax.Array  # [H], already -exp(A_log)
    dt: jax.Array  # [H]
    conv: jax.Array  # [C, J], oldest tap first
    norm: jax.Array  # [E]
    out: Weight  # [D, HE]


@struct.dataclass
class FeedForwardParams:
    """SwiGLU."""

    gate: Weight  # [F, D]
    up: Weight  # [F, D]
    down: Weight  # [D, F]


@struct.dataclass
class ExpertsParams:
    """A mixture of X experts of width F, and where there is one the expert that all positions share."""

    router: Weight  # [X, D]
    gate: Weight  # [X, F, D]
    up: Weight  # [X, F, D]
    down: Weight  # [X, D, F]
    shared_gate: jax.Array | None = None  # [D]
    shared: FeedForwardParams | None = None


@struct.dataclass
class LayerParams:
    """One pre-norm residual layer."""

    mixer_norm: jax.Array  # [D]
    mixer: AttentionParams | DeltaParams
    ffn_norm: jax.Array  # [D]
    ffn: FeedForwardParams | ExpertsParams


@struct.dataclass
class MtpParams:
    """The MTP ("nextn") block. Where the file has no tables of its own, embed and head are the trunk's."""

    embed: Weight  # [V, D]
    embed_norm: jax.Array  # [D]
    hidden_norm: jax.Array  # [D]
    proj: Weight  # [D, 2D], eh_proj: embedding first
    layer: LayerParams
    head_norm: jax.Array  # [D]
    head: Weight  # [V, D]


@struct.dataclass
class ModelParams:
    """The whole model. A tied head is the embedding table itself."""

    embed: Weight  # [V, D]
    layers: tuple[LayerParams, ...]
    final_norm: jax.Array  # [D]
    head: Weight  # [V, D]
    mtp: MtpParams | None
