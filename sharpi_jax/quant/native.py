"""Products by tiled weights as calls of the C++ kernel, through XLA's foreign function interface (CPU).

Its rows do not depend on how many there are, by construction: kernel/products.h.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from sharpi_jax import kernel
from sharpi_jax.quant.formats import FORMATS, BlockFormat
from sharpi_jax.quant.tiles import PLANES, Tiled


def matmul(x: jax.Array, weight: Tiled, *, int8: bool, path: str | None = None) -> jax.Array:
    """x W^T.

    Args:
      x: [rows, K] float32.
      weight: [N, K]; of a stack, the matrix at its index is read where it lies, without a copy.
      int8: whether activations are taken as int8 in blocks of 32 with a float32 scale, as llama.cpp does.
      path: one of kernel.PATHS that the processor can run; the best unless given.

    Returns:
      [rows, N] float32.
    """
    fmt = weight.block_format
    rest = (weight.small, weight.m, weight.small_m)
    call = jax.ffi.ffi_call(
        kernel.target("matmul", _numbers(fmt), path=path),
        jax.ShapeDtypeStruct((x.shape[0], weight.out_features), jnp.float32),
    )
    return call(
        x,
        jnp.zeros((), jnp.int32) if weight.index is None else weight.index,
        *weight.planes,
        weight.d,
        *(field for field in rest if field is not None),
        block_size=np.int32(fmt.block_size),
        offset=np.int32(-min(fmt.table) if fmt.table else fmt.offset),
        table=np.asarray(fmt.table, np.int32),
        exponent=fmt.exponent,
        has_small=weight.small is not None,
        has_small_m=weight.small_m is not None,
        int8=int8,
    )


@functools.cache
def compile_ahead(name: str) -> None:
    """Begins to compile the kernel of a block format, a key of FORMATS, while its weights are read."""
    kernel.compile_ahead(("matmul", _numbers(FORMATS[name])))


def _numbers(fmt: BlockFormat) -> str:
    """The format as `Format` in kernel/weight.h wants it."""
    low, high = (*PLANES[fmt.bits], 0)[:2]
    return f"SHARPI_FORMAT={low},{high},{fmt.group},{int(fmt.minimum)},{int(bool(fmt.table))}"
