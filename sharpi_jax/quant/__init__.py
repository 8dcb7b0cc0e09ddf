"""Packed weights and the doors to them: `matmul`, `take_rows`, `take_matrix`. No other room unpacks a weight.

WORKSPACE.md says how to add a block format; a faster kernel goes behind `matmul`.
"""

from sharpi_jax.quant.formats import FORMATS, BlockFormat
from sharpi_jax.quant.load import ENGINES, choose_engine, lays_out, pack
from sharpi_jax.quant.matmul import (
    Weight,
    dequantise,
    for_few_rows,
    matmul,
    rows_dot,
    select_rows,
    take_matrix,
    take_rows,
)
from sharpi_jax.quant.packed import Packed
from sharpi_jax.quant.tiles import Tiled

__all__ = [
    "ENGINES",
    "FORMATS",
    "BlockFormat",
    "Packed",
    "Tiled",
    "Weight",
    "choose_engine",
    "dequantise",
    "for_few_rows",
    "lays_out",
    "matmul",
    "pack",
    "rows_dot",
    "select_rows",
    "take_matrix",
    "take_rows",
]
