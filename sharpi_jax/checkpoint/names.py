"""The tensor-name table: which GGUF tensor fills which field, with which dimensions. Checked both ways in weights.py.

Our own, since gguf 0.19 lists no nextn tensors for qwen35. Dimensions are in GGUF order (input features
first), spelt with the letters of `sizes`.
"""

import dataclasses
import re
from collections.abc import Iterable
from typing import Literal

from sharpi_jax.model.config import ModelConfig

_BLOCK = re.compile(r"blk\.([0-9]{1,9})\.(nextn\.)?")


def block_of(name: str) -> tuple[int, bool]:
    """A tensor's block, -1 for one of the whole model, and whether it is of the kind that only an MTP head has."""
    match = _BLOCK.match(name)
    return (int(match[1]), match[2] is not None) if match else (-1, False)


def nextn_blocks(tensors: Iterable[str]) -> list[int]:
    """The blocks that hold tensors of an MTP head, in order."""
    return sorted({block for block, is_nextn in map(block_of, tensors) if is_nextn})


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One row of the table.

    Attributes:
      field: the field of the params dataclass. suffix: the tensor's name, less its block prefix.
      dims: letters of `sizes`, GGUF order, separated by spaces.
      kind: "matrix" stays packed; "vector" becomes float32.
      fallback: for an optional tensor, the whole names of those that stand in, the first that is there.
      fused: the suffix of a tensor that may hold this one and its neighbours in the table with the same entry, their
        rows one after the other.
      optional: the field is None where there is no such tensor.
    """

    field: str
    suffix: str
    dims: str
    kind: Literal["matrix", "vector"] = "matrix"
    fallback: tuple[str, ...] = ()
    fused: str = ""
    optional: bool = False


MODEL = (
    Tensor("embed", "token_embd.weight", "D V"),
    Tensor("final_norm", "output_norm.weight", "D", "vector"),
    Tensor("head", "output.weight", "D V", fallback=("token_embd.weight",)),
)
LAYER = (
    Tensor("mixer_norm", "attn_norm.weight", "D", "vector"),
    Tensor("ffn_norm", "ffn_norm.weight", "D", "vector"),
)
HYBRID_LAYER = (LAYER[0], Tensor("ffn_norm", "post_attention_norm.weight", "D", "vector"))
_KEYS_AND_VALUES = (
    Tensor("k", "attn_k.weight", "D NE", fused="attn_qkv.weight"),
    Tensor("v", "attn_v.weight", "D NE", fused="attn_qkv.weight"),
    Tensor("out", "attn_output.weight", "HE D"),
)
ATTENTION = (Tensor("q", "attn_q.weight", "D HE", fused="attn_qkv.weight"), *_KEYS_AND_VALUES)
HEAD_NORMS = (
    Tensor("q_norm", "attn_q_norm.weight", "E", "vector"),
    Tensor("k_norm", "attn_k_norm.weight", "E", "vector"),
)
GATED_ATTENTION = (Tensor("q", "attn_q.weight", "D 2HE", fused="attn_qkv.weight"), *_KEYS_AND_VALUES, *HEAD_NORMS)
BIASES = (
    Tensor("q_bias", "attn_q.bias", "HE", "vector"),
    Tensor("k_bias", "attn_k.bias", "NE", "vector"),
    Tensor("v_bias", "attn_v.bias", "NE", "vector"),
)
OPTIONAL_BIASES = tuple(dataclasses.replace(row, optional=True) for row in BIASES)
DELTA = (
    Tensor("qkv", "attn_qkv.weight", "D C"),
    Tensor("gate", "attn_gate.weight", "D dHE"),
    Tensor("alpha", "ssm_alpha.weight", "D dH"),
    Tensor("beta", "ssm_beta.weight", "D dH"),
    Tensor("a", "ssm_a", "dH", "vector"),
    Tensor("dt", "ssm_dt.bias", "dH", "vector"),
    Tensor("conv", "ssm_conv1d.weight", "J C", "vector"),
    Tensor("norm", "ssm_norm.weight", "dE", "vector"),
    Tensor("out", "ssm_out.weight", "dHE D"),
)
FEED_FORWARD = (
    Tensor("gate", "ffn_gate.weight", "D F"),
    Tensor("up", "ffn_up.weight", "D F"),
    Tensor("down", "ffn_down.weight", "F D"),
)
EXPERTS = (
    Tensor("router", "ffn_gate_inp.weight", "D X"),
    Tensor("gate", "ffn_gate_exps.weight", "D FX X", fused="ffn_gate_up_exps.weight"),
    Tensor("up", "ffn_up_exps.weight", "D FX X", fused="ffn_gate_up_exps.weight"),
    Tensor("down", "ffn_down_exps.weight", "FX D X"),
)
SHARED_GATE = (Tensor("shared_gate", "ffn_gate_inp_shexp.weight", "D", "vector"),)
SHARED_EXPERT = (
    Tensor("gate", "ffn_gate_shexp.weight", "D FS"),
    Tensor("up", "ffn_up_shexp.weight", "D FS"),
    Tensor("down", "ffn_down_shexp.weight", "FS D"),
)
MTP = (
    Tensor("proj", "nextn.eh_proj.weight", "2D D"),
    Tensor("embed_norm", "nextn.enorm.weight", "D", "vector"),
    Tensor("hidden_norm", "nextn.hnorm.weight", "D", "vector"),
    Tensor("head_norm", "nextn.shared_head_norm.weight", "D", "vector", fallback=("output_norm.weight",)),
    Tensor("embed", "nextn.embed_tokens.weight", "D V", fallback=("token_embd.weight",)),
    Tensor("head", "nextn.shared_head_head.weight", "D V", fallback=("output.weight", "token_embd.weight")),
)


def sizes(cfg: ModelConfig) -> dict[str, int]:
    """What each letter of the table stands for; a leading d marks the Gated DeltaNet's own heads."""
    return {
        "D": cfg.width,
        "2D": 2 * cfg.width,
        "V": cfg.vocab_size,
        "F": cfg.ffn_width,
        "X": cfg.experts,
        "FX": cfg.expert_width,
        "FS": cfg.shared_expert_width,
        "E": cfg.head_dim,
        "HE": cfg.heads * cfg.head_dim,
        "2HE": 2 * cfg.heads * cfg.head_dim,
        "NE": cfg.key_heads * cfg.head_dim,
        "C": cfg.conv_channels,
        "J": cfg.conv_taps,
        "dH": cfg.delta_heads,
        "dE": cfg.delta_head_dim,
        "dHE": cfg.delta_heads * cfg.delta_head_dim,
    }
