"""`matmul`, `take_rows` and `take_matrix`: the only ways in which the model touches a weight.

What must not be got wrong: **a row's bits do not depend on how many rows there are.** Exact speculative decoding rests
on it, since a verify window of K+1 rows must reproduce what K+1 windows of one row give. XLA's CPU dots keep that
promise from two rows up in float32 and from three in bfloat16, and for two or more output columns; a single row or
column takes another code path with another order of summation (tests/test_quant.py measures it). So fewer are padded.
"""

import jax
import jax.numpy as jnp
from jax import lax

from sharpi_jax.quant.packed import Packed, dequantise

_MIN_ROWS = {"float32": 2, "bfloat16": 3}
_MIN_COLUMNS = {"float32": 2, "bfloat16": 4}


def matmul(x: jax.Array, weight: Packed, dtype: str = "float32") -> jax.Array:
    """x W^T on dequantised weights.

    Args:
      x: [..., K] activations.
      weight: [N, K].
      dtype: type of the operands, "float32" or "bfloat16"; sums are always float32.

    Returns:
      [..., N] float32. Each row's bits are the same whatever the number of rows.
    """
    return rows_dot(x, dequantise(_tied_to(x, weight)), dtype)


def _tied_to(x: jax.Array, weight: Packed) -> Packed:
    """The same weight, as far as the compiler can tell a function of x.

    Unpacking is invariant in the decode loop, and XLA moves what is invariant in front of a loop: every weight would be
    kept unpacked, in float32, while it runs. (XLA's CPU passes drop an `optimization_barrier` before that.) No number
    both equals and differs from itself, so no byte ever changes; XLA does not see through that, and LLVM, which does,
    comes after the loop is settled.
    """
    if weight.format == "F32":
        return weight
    first = x.reshape(-1)[0]
    flip = (first != first) & (first == first)
    return Packed(weight.blocks ^ flip.astype(weight.blocks.dtype), weight.format)


def rows_dot(x: jax.Array, dense: jax.Array, dtype: str = "float32") -> jax.Array:
    """x dense^T for x [..., K] and a dense [N, K], row by row: the promise above is made here."""
    lead, (columns, width) = x.shape[:-1], dense.shape
    rows = x.reshape(-1, width).astype(dtype)
    y = _dot(_at_least(rows, _MIN_ROWS[dtype]), _at_least(dense.astype(dtype), _MIN_COLUMNS[dtype]))
    return y[: rows.shape[0], :columns].reshape(*lead, columns)


def take_rows(weight: Packed, ids: jax.Array) -> jax.Array:
    """Rows of a packed table (an embedding), dequantised after the gather: ids [...] -> [..., K] float32."""
    return dequantise(Packed(jnp.take(weight.blocks, ids, axis=0, mode="clip"), weight.format))


def take_matrix(weight: Packed, index: jax.Array) -> Packed:
    """One matrix of a packed stack [X, N, K], still packed."""
    return Packed(lax.dynamic_index_in_dim(weight.blocks, index, axis=0, keepdims=False), weight.format)


def _at_least(matrix: jax.Array, rows: int) -> jax.Array:
    missing = rows - matrix.shape[0]
    return jnp.pad(matrix, ((0, missing), (0, 0))) if missing > 0 else matrix


def _dot(rows: jax.Array, dense: jax.Array) -> jax.Array:
    # HIGHEST: on an accelerator a float32 product must not fall to bf16 passes or TF32.
    return lax.dot_general(
        rows,
        dense,
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
