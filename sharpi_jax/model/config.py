"""The model's shape: everything that is static in a compiled program."""

import dataclasses
from typing import Literal

LayerKind = Literal["attention", "delta"]


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer, or Qwen3.5's hybrid. Frozen and hashable: always a static argument.

    Attributes:
      architecture: GGUF's name, e.g. "qwen35".
      layer_kinds: the trunk's layers, first to last: "attention" (full attention) or "delta" (Gated DeltaNet).
      has_mtp: whether an MTP block follows the trunk.
      width: D. vocab_size: V. context_length: the largest S the model was made for. ffn_width: F, 0 with experts.
      heads, key_heads, head_dim: H, N, E of the attention layers. gated: whether a sigmoid gates their output.
      rope_dims: R; rope_base: theta. rope_interleaved: whether dimension 2i turns with 2i + 1, not i with i + R/2.
      rope_factors: what the R/2 frequencies are divided by: each, or one number for all; empty for 1.
      norm_eps: epsilon of every RMS norm and of the delta rule's L2 norms.
      delta_heads, delta_key_heads, delta_head_dim: H (value heads), N, E of the Gated DeltaNet layers; 0 without any.
      conv_taps: J.
      experts, experts_used: X, and how many of them each position takes; 0 without. expert_width: F of each.
      shared_expert_width: F of the expert that all positions share; 0 without.
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
    delta_heads: int = 0
    delta_key_heads: int = 0
    delta_head_dim: int = 0
    conv_taps: int = 0
    gated: bool = True
    rope_interleaved: bool = False
    rope_factors: tuple[float, ...] = ()
    experts: int = 0
    experts_used: int = 0
    expert_width: int = 0
    shared_expert_width: int = 0
    dtype: str = "float32"
    cache_dtype: str = "float32"

    @property
    def conv_channels(self) -> int:
        """C: the q, k and v channels that pass through a delta layer's convolution."""
        return (2 * self.delta_key_heads + self.delta_heads) * self.delta_head_dim
