"""Random weights of every block format, as the bytes of a file, and gguf's own dequantiser for them."""

import ml_dtypes
import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from sharpi_jax.quant import FORMATS

BLOCKS = [name for name, fmt in FORMATS.items() if not fmt.is_plain]
# Where a block's float16 fields begin: its scale, then the minimum's factor. A new format needs its line here.
HALVES = {
    "Q8_0": (0,),
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "MXFP4": (),  # its scale is a byte, the exponent
}


def from_gguf(raw, name):
    with np.errstate(all="ignore"):  # infinite scales times zero, among random ones
        return dequantize(raw, GGMLQuantizationType[name])


def random_raw(name, rows, K, seed=0):
    """Random bytes of a whole matrix [rows, bytes of K weights], scales of ordinary size."""
    fmt, rng = FORMATS[name], np.random.default_rng(seed)
    if fmt.is_plain:
        weights = rng.standard_normal((rows, K), np.float32)
        kind = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}[name]
        return weights.astype(kind).view(np.uint8)
    raw = rng.integers(0, 256, (rows, K // fmt.block_size, fmt.block_bytes), np.uint8)
    for at in HALVES[name]:
        scales = (rng.standard_normal(raw.shape[:2]) * 0.01).astype(np.float16)
        raw[..., at : at + 2] = scales[..., None].view(np.uint8)
    if name == "MXFP4":
        raw[..., 0] = rng.integers(115, 125, raw.shape[:2])
    return raw.reshape(rows, -1)
