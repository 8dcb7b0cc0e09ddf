"""The architectures that run: for each, what tells it from the others and its tables of tensors.

Adding one is an entry here, as long as its layers are of a kind that `model/` has.
"""

import dataclasses
from typing import Literal

from sharpi_jax.checkpoint import names


@dataclasses.dataclass(frozen=True)
class Architecture:
    """One value of `general.architecture`.

    Attributes:
      layer: norms of a layer. attention: tensors of an attention mixer.
      hybrid: Qwen3.5's: Gated DeltaNet layers among the attention layers, attention with an output gate, maybe an MTP
        block. Where false all layers are plain attention.
      experts: what a layer's feed-forward part is.
      rope_interleaved: see ModelConfig. rope_factors: whether a tensor may give them (Llama 3).
    """

    layer: tuple[names.Tensor, ...]
    attention: tuple[names.Tensor, ...]
    hybrid: bool = False
    experts: Literal["none", "routed", "routed and shared"] = "none"
    rope_interleaved: bool = False
    rope_factors: bool = False


ARCHITECTURES = {
    "qwen35": Architecture(names.HYBRID_LAYER, names.GATED_ATTENTION, hybrid=True),
    "qwen35moe": Architecture(names.HYBRID_LAYER, names.GATED_ATTENTION, hybrid=True, experts="routed and shared"),
    "llama": Architecture(
        names.LAYER, names.ATTENTION + names.OPTIONAL_BIASES, rope_interleaved=True, rope_factors=True
    ),
    "qwen2": Architecture(names.LAYER, names.ATTENTION + names.BIASES),
    "qwen3": Architecture(names.LAYER, names.ATTENTION + names.HEAD_NORMS),
    "qwen3moe": Architecture(names.LAYER, names.ATTENTION + names.HEAD_NORMS, experts="routed"),
}
