"""Which block format each tensor has in a file of a given type: llama.cpp's choices for a dense, tied qwen35 model.

From `llama_tensor_get_type_impl` in llama.cpp's src/llama-quant.cpp: without an importance matrix, and with four or
more query heads to a key head, as Qwen3.5 has.
"""

import gguf

# Type of a file: the format of most of its tensors, and its number in `general.file_type`.
TYPES = {
    "f32": ("F32", gguf.LlamaFileType.ALL_F32),
    "f16": ("F16", gguf.LlamaFileType.MOSTLY_F16),
    "bf16": ("BF16", gguf.LlamaFileType.MOSTLY_BF16),
    "q8_0": ("Q8_0", gguf.LlamaFileType.MOSTLY_Q8_0),
    "q4_0": ("Q4_0", gguf.LlamaFileType.MOSTLY_Q4_0),
    "q4_1": ("Q4_1", gguf.LlamaFileType.MOSTLY_Q4_1),
    "q5_0": ("Q5_0", gguf.LlamaFileType.MOSTLY_Q5_0),
    "q5_1": ("Q5_1", gguf.LlamaFileType.MOSTLY_Q5_1),
    "q2_k": ("Q2_K", gguf.LlamaFileType.MOSTLY_Q2_K),
    "q3_k_m": ("Q3_K", gguf.LlamaFileType.MOSTLY_Q3_K_M),
    "q4_k_s": ("Q4_K", gguf.LlamaFileType.MOSTLY_Q4_K_S),
    "q4_k_m": ("Q4_K", gguf.LlamaFileType.MOSTLY_Q4_K_M),
    "q5_k_s": ("Q5_K", gguf.LlamaFileType.MOSTLY_Q5_K_S),
    "q5_k_m": ("Q5_K", gguf.LlamaFileType.MOSTLY_Q5_K_M),
    "q6_k": ("Q6_K", gguf.LlamaFileType.MOSTLY_Q6_K),
    "iq4_nl": ("IQ4_NL", gguf.LlamaFileType.MOSTLY_IQ4_NL),
    "iq4_xs": ("IQ4_XS", gguf.LlamaFileType.MOSTLY_IQ4_XS),
}


def format_of(file_type: str, tensor: str, block: int, blocks: int) -> str:
    """The format of one matrix.

    Args:
      file_type: a key of TYPES. tensor: its name without `blk.N.` and `.weight`.
      block: N, of `blocks` blocks with the MTP block; any number for a tensor outside them.
    """
    base = TYPES[file_type][0]
    if file_type in ("f32", "f16", "bf16", "q8_0"):
        return base
    if tensor == "token_embd":  # the tied head
        return "Q6_K"
    is_first = block < blocks // 8
    more = is_first or block >= 7 * blocks // 8 or (block - blocks // 8) % 3 == 2
    # attn_v and attn_qkv are one kind, and every block has one of the two: their count is the block's number.
    values = {
        "q2_k": "Q4_K",
        "q3_k_m": "Q5_K" if block < 2 else "Q4_K",
        "q4_k_s": "Q5_K" if block < 4 else base,
        "q4_k_m": "Q6_K" if more else base,
        "q5_k_m": "Q6_K" if more else base,
        "iq4_nl": "Q5_K",
        "iq4_xs": "Q5_K",
    }
    down = {
        "q2_k": "Q3_K",
        "q3_k_m": "Q5_K" if block < blocks // 16 else "Q4_K",
        "q4_k_s": "Q5_K" if is_first else base,
        "q4_k_m": "Q6_K" if more else base,
        "q5_k_m": "Q6_K" if more else base,
        "iq4_nl": "Q5_K" if is_first else base,
        "iq4_xs": "Q5_K" if is_first else base,
    }
    output = {"q2_k": "Q3_K", "q3_k_m": "Q4_K"}
    rules = {"attn_v": values, "attn_qkv": values, "ffn_down": down, "attn_output": output}
    return rules.get(tensor, {}).get(file_type, base)
