"""The model's shape: everything that is static in a compiled program."""

import dataclasses
from typing import Literal

LayerKind = Literal["attention", "delta"]


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A Qwen3.5-architecture model. Frozen and hashable: always a static argument.

    Attributes:
      architecture: GGUF's name, e.g. "qwen35".
      layer_kinds: the trunk's layers, first to last: "attention" (gated full attention) or "delta" (Gated DeltaNet).
      has_mtp: whether an MTP block follows the trunk.
      width: D. vocab_size: V. context_length: the largest S the model was made for. ffn_width: F.
      heads, key_heads, head_dim: H, N, E of the attention layers.
      rope_dims: R; rope_base: theta.
      norm_eps: epsilon of every RMS norm and of the delta rule's L2 norms.
      delta_heads, delta_key_heads, delta_head_dim: H (value heads), N, E of the Gated DeltaNet layers.
      conv_taps: J.
      dtype: operand type of the matrix products; cache_dtype: type of the keys and values kept.
    """

    architecture: str
    layer_kinds: tuple[LayerKind, ...]
    has_mtp: bool
    width: int
    vocab_size: int
    context_length: int
    ffn_width: int
    heads: int
    key_heads: int
    head_dim: int
    rope_dims: int
    rope_base: float
    norm_eps: float
    delta_heads: int
    delta_key_heads: int
    delta_head_dim: int
    conv_taps: int
    dtype: str = "float32"
    cache_dtype: str = "float32"

    @property
    def conv_channels(self) -> int:
        """C: the q, k and v channels that pass through a delta layer's convolution."""
        return (2 * self.delta_key_heads + self.delta_heads) * self.delta_head_dim
