"""Types without a decoder on the device: gguf's own dequantiser expands them to bfloat16, on the host."""

import functools

import jax.numpy as jnp
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

_AT_ONCE = 1 << 22  # weights: the float32 numbers in between take a few times 16 MB, whatever the tensor's size


@functools.cache
def can_expand(type_name: str) -> bool:
    """Whether gguf can dequantise the type, found by asking it for a block of zeros."""
    kind = GGMLQuantizationType[type_name]
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def expand(raw: np.ndarray, type_name: str) -> np.ndarray:
    """The weights rounded to the nearest bfloat16, ties to even.

    Args:
      raw: [..., bytes per row] uint8. type_name: a type that `can_expand`.

    Returns:
      [..., K] bfloat16.
    """
    kind = GGMLQuantizationType[type_name]
    block, block_bytes = GGML_QUANT_SIZES[kind]
    K = raw.shape[-1] // block_bytes * block
    rows = raw.reshape(-1, raw.shape[-1])
    out = np.empty((len(rows), K), jnp.bfloat16)
    step = max(_AT_ONCE // K, 1)
    for at in range(0, len(rows), step):
        out[at : at + step] = dequantize(rows[at : at + step], kind)
    return out.reshape(*raw.shape[:-1], K)
