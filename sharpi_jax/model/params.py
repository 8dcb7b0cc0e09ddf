"""The weights, as frozen pytrees. Matrices are `Packed`; norms, biases and taps are float32 arrays."""

import jax
from flax import struct

from sharpi_jax.quant import Packed


@struct.dataclass
class AttentionParams:
    """Full attention. Where it is gated q holds, per head, E query rows and then E gate rows."""

    q: Packed  # [HE, D], gated [2HE, D]
    k: Packed  # [NE, D]
    v: Packed  # [NE, D]
    out: Packed  # [D, HE]
    q_norm: jax.Array | None = None  # [E]
    k_norm: jax.Array | None = None  # [E]
    q_bias: jax.Array | None = None  # [HE]
    k_bias: jax.Array | None = None  # [NE]
    v_bias: jax.Array | None = None  # [NE]


@struct.dataclass
class DeltaParams:
    """Gated DeltaNet. Value heads are tiled: value head h uses key head h % N."""

    qkv: Packed  # [C, D]
    gate: Packed  # [HE, D], the output gate z
    alpha: Packed  # [H, D], input of the log decay g
    beta: Packed  # [H, D], input of the write strength
    a: jax.Array  # [H], already -exp(A_log)
    dt: jax.Array  # [H]
    conv: jax.Array  # [C, J], oldest tap first
    norm: jax.Array  # [E]
    out: Packed  # [D, HE]


@struct.dataclass
class FeedForwardParams:
    """SwiGLU."""

    gate: Packed  # [F, D]
    up: Packed  # [F, D]
    down: Packed  # [D, F]


@struct.dataclass
class ExpertsParams:
    """A mixture of X experts of width F, and where there is one the expert that all positions share."""

    router: Packed  # [X, D]
    gate: Packed  # [X, F, D]
    up: Packed  # [X, F, D]
    down: Packed  # [X, D, F]
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

    embed: Packed  # [V, D]
    embed_norm: jax.Array  # [D]
    hidden_norm: jax.Array  # [D]
    proj: Packed  # [D, 2D], eh_proj: embedding first
    layer: LayerParams
    head_norm: jax.Array  # [D]
    head: Packed  # [V, D]


@struct.dataclass
class ModelParams:
    """The whole model. A tied head is the embedding table itself."""

    embed: Packed  # [V, D]
    layers: tuple[LayerParams, ...]
    final_norm: jax.Array  # [D]
    head: Packed  # [V, D]
    mtp: MtpParams | None
