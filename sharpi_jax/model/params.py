"""The weights, as frozen pytrees. Matrices are `Packed`; norms, biases and taps are float32 arrays."""

import jax
from flax import struct

from sharpi_jax.quant import Packed


@struct.dataclass
class AttentionParams:
    """Gated full attention: q holds, per head, E query rows and then E gate rows."""

    q: Packed  # [2HE, D]
    k: Packed  # [NE, D]
    v: Packed  # [NE, D]
    out: Packed  # [D, HE]
    q_norm: jax.Array  # [E]
    k_norm: jax.Array  # [E]


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
class LayerParams:
    """One pre-norm residual layer."""

    mixer_norm: jax.Array  # [D]
    mixer: AttentionParams | DeltaParams
    ffn_norm: jax.Array  # [D]
    ffn: FeedForwardParams


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
