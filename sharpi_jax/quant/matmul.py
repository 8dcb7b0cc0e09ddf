"""`matmul`, `take_rows` and `take_matrix`: the only ways in which the model touches a weight.

What must not be got wrong: **a row's bits do not depend on how many rows there are.** Exact speculative decoding rests
on it, since a verify window of K+1 rows must reproduce what K+1 windows of one row give. XLA's CPU dots keep that
promise from two rows up in float32 and from three in bfloat16, and for two or more output columns; a single row or
column takes another code path with another order of summation (tests/test_quant.py measures it). So fewer are padded.
"""

from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from sharpi_jax.quant import fused, native
from sharpi_jax.quant.formats import values
from sharpi_jax.quant.packed import Packed, dequantise_packed
from sharpi_jax.quant.tiles import Tiled, select_tile_rows, tile_rows, untile

WeightT = TypeVar("WeightT", Packed, Tiled)
Params = TypeVar("Params")

_MIN_ROWS = {"float32": 2, "bfloat16": 3}
_MIN_COLUMNS = {"float32": 2, "bfloat16": 4}
# On a GPU: the kernel unpacks the weight for every four rows anew, and a library product of many rows once.
MOST_KERNEL_ROWS = 32

Weight = Packed | Tiled


def matmul(x: jax.Array, weight: Weight, dtype: str = "float32", used: int | None = None) -> jax.Array:
    """x W^T on dequantised weights.

    Args:
      x: [..., K] activations.
      weight: [N, K].
      dtype: type of the operands; sums are always float32. "int8" means that the activations, in blocks of 32 with a
        float32 scale, meet the codes of block formats as whole numbers (llama.cpp's practice); plain floats are
        multiplied in float32 then.
      used: of x [..., T, K] only the first `used` positions matter: the others may be left out, and give 0.

    Returns:
      [..., N] float32. Each row's bits are the same whatever the number of rows.
    """
    if isinstance(weight, Packed):
        return rows_dot(x, dequantise_packed(_tied_to(x, weight)), "float32" if dtype == "int8" else dtype)
    engine = weight.engine if dtype != "bfloat16" else "xla"
    if engine == "native" and used is not None and used < x.shape[-2]:
        y = matmul(x[..., :used, :], weight, dtype)
        return jnp.pad(y, ((0, 0),) * (y.ndim - 2) + ((0, x.shape[-2] - used), (0, 0)))
    rows = x.reshape(-1, x.shape[-1])
    if engine == "native":
        y = native.matmul(rows, weight, int8=dtype == "int8")
    else:
        rows, dtype = (rounded_to_int8(rows), "float32") if dtype == "int8" else (rows, dtype)
        match engine:
            case "fused":
                y = fused.matmul(rows, weight)
            case "triton" if len(rows) <= MOST_KERNEL_ROWS:
                y = _by_triton(rows, weight)
            case _:
                y = _plainly(rows, weight, dtype)
    return y.reshape(*x.shape[:-1], weight.out_features)


def _by_triton(rows: jax.Array, weight: Tiled) -> jax.Array:
    """By the GPU's kernel where the program is compiled for one, else plainly."""
    from sharpi_jax.quant import triton  # here, not above: jaxlib need not have Triton where there is no GPU

    y: jax.Array = lax.platform_dependent(rows, weight, cuda=triton.matmul, default=_plainly)
    return y


def _plainly(rows: jax.Array, weight: Tiled, dtype: str = "float32") -> jax.Array:
    return rows_dot(rows, untile(_tied_to(rows, weight)), dtype)


def for_few_rows(params: Params) -> Params:
    """The same weights for the products of a decode window: what XLA multiplies by, on a CPU, goes to quant/fused.py.

    A program multiplies all its rows by the one or the other form, since their sums differ in the last bits: decode
    windows, of whatever width and number of rows, by this, prompts by the dense one, which unpacks once for all
    their rows (and whose program is the same with and without drafting).
    """
    if jax.default_backend() != "cpu":
        return params

    def one(leaf: object) -> object:
        return leaf.replace(engine="fused") if isinstance(leaf, Tiled) and leaf.engine == "xla" else leaf  # type: ignore[attr-defined]

    marked: Params = jax.tree.map(one, params, is_leaf=lambda leaf: isinstance(leaf, Tiled))
    return marked


def rounded_to_int8(x: jax.Array) -> jax.Array:
    """x [..., K] as `dtype="int8"` sees it: blocks of 32, each a multiple of its largest magnitude / 127."""
    blocks = x.reshape(*x.shape[:-1], -1, 32)
    most = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True)
    inverse = jnp.where(most > 0, 127 / most, 0)
    return (jnp.round(blocks * inverse) * (most / 127)).reshape(x.shape)


def _tied_to(x: jax.Array, weight: WeightT) -> WeightT:
    """The same weight, as far as the compiler can tell a function of x.

    Unpacking is invariant in the decode loop, and XLA moves what is invariant in front of a loop: every weight would be
    kept unpacked, in float32, while it runs. (XLA's CPU passes drop an `optimization_barrier` before that.) No number
    both equals and differs from itself, so no byte ever changes; XLA does not see through that, and LLVM, which does,
    comes after the loop is settled.
    """
    first = x.reshape(-1)[0]
    flip = (first != first) & (first == first)
    return jax.tree.map(lambda x: x if x.dtype == jnp.float32 else x ^ flip.astype(x.dtype), weight)  # type: ignore[no-any-return]


def rows_dot(x: jax.Array, dense: jax.Array, dtype: str = "float32") -> jax.Array:
    """x dense^T for x [..., K] and a dense [N, K], row by row: the promise above is made here."""
    lead, (columns, width) = x.shape[:-1], dense.shape
    rows = x.reshape(-1, width).astype(dtype)
    y = _dot(_at_least(rows, _MIN_ROWS[dtype]), _at_least(dense.astype(dtype), _MIN_COLUMNS[dtype]))
    return y[: rows.shape[0], :columns].reshape(*lead, columns)


def take_rows(weight: Weight, ids: jax.Array) -> jax.Array:
    """Rows of a packed table (an embedding), dequantised after the gather: ids [...] -> [..., K] float32."""
    if isinstance(weight, Tiled):
        return values(weight.block_format, tile_rows(weight, ids))
    return dequantise_packed(Packed(jnp.take(weight.blocks, ids, axis=0, mode="clip"), weight.format))


def select_rows(weight: Weight, ids: jax.Array) -> Weight:
    """The weight [n, K] of some output features only, ids [n], still packed."""
    if isinstance(weight, Tiled):
        return select_tile_rows(weight, ids)
    return Packed(jnp.take(weight.blocks, ids, axis=0, mode="clip"), weight.format)


def dequantise(weight: Weight) -> jax.Array:
    """All of a weight as float32 [..., N, K], bit-exact (see formats.py)."""
    return untile(weight) if isinstance(weight, Tiled) else dequantise_packed(weight)


def take_matrix(weight: Weight, index: jax.Array) -> Weight:
    """One matrix of a packed stack [X, N, K], still packed."""
    if isinstance(weight, Tiled):
        return weight.replace(index=index)  # type: ignore[attr-defined, no-any-return]
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
