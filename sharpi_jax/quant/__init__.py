"""Packed weights and the doors to them: `matmul`, `take_rows`, `take_matrix`. No other room unpacks a weight.

WORKSPACE.md says how to add a block format; a faster kernel goes behind `matmul`.
"""

from sharpi_jax.quant.formats import FORMATS, BlockFormat
from sharpi_jax.quant.matmul import matmul, rows_dot, take_matrix, take_rows
from sharpi_jax.quant.packed import Packed, dequantise, pack

__all__ = ["FORMATS", "BlockFormat", "Packed", "dequantise", "matmul", "pack", "rows_dot", "take_matrix", "take_rows"]
