"""Products of few rows by tiled weights in XLA alone: what decodes where there is no C++ compiler (CPU).

A decode window has few rows, so a product takes as long as reading its weight does, and a weight that is written out in
float32 first is read many times over. Here one elementwise loop over [tile, chunk of K, row, lane] does it all in
registers. For XLA to make vectors of the lanes, the sum over a chunk must be no `sum` but written out term by term; a
second loop adds up the chunks. Of one row and one chunk of inputs k, in groups g:

    y += scale[g] * (sum over k of x[k] q[k]) - minimum[g] * (sum over k of x[k])

A code is not shifted to the low end of its word but taken where it is, 2^place times as large, and x[k] is made as much
smaller beforehand: powers of two change no digit. So a weight costs a mask, an offset, a conversion, and a product.

**A row's bits do not depend on how many rows there are**: each output is the same expression of its own row, in the
same order. LLVM joins a product and a sum into one operation that rounds once, and of two products that are added it
may join the one or the other, for one row another than for two. So no two products are ever added: every sum begins
with a zero that is read from memory, where the compiler cannot see it.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata

from sharpi_jax.quant.formats import BlockFormat, half, power
from sharpi_jax.quant.tiles import LANES, PLANES, Tiled, picked

MOST_ROWS = 16  # that share one pass over the weight
_CHUNK = 32  # inputs: with 64, 4 bits are a seventh faster, 8 bits slower, and compiling takes half as long again


def matmul(x: jax.Array, weight: Tiled) -> jax.Array:
    """x W^T on the exact weights: x [rows, K] float32 -> [rows, N] float32."""
    rows, K = x.shape
    if rows > MOST_ROWS:
        blocks = jnp.pad(x, ((0, -rows % MOST_ROWS), (0, 0))).reshape(-1, MOST_ROWS, K)
        done: jax.Array = lax.map(lambda block: matmul(block, weight), blocks)
        return done.reshape(-1, weight.out_features)[:rows]
    # The fences keep each part a program of its own: XLA neither moves any of it out of the decode loop nor joins it
    # with its neighbours, and products of one shape are one kernel, compiled once.
    with set_xla_metadata(inlineable="false"):
        y = _added_up(_products(*_inputs(x, weight.block_format), weight))
    columns: jax.Array = y[:, : weight.out_features]
    return columns


@functools.partial(jax.jit, static_argnums=1)
def _inputs(x: jax.Array, fmt: BlockFormat) -> tuple[jax.Array, jax.Array]:
    """x [rows, K] as the terms want it: the inputs of each chunk [32, C, rows, 1]; sums of its groups and a zero,
    [groups + 1, C, rows, 1]."""
    smaller = np.asarray([2.0 ** -_taken_at(fmt, k)[1] for k in range(_CHUNK)], np.float32)
    chunks = x.reshape(x.shape[0], -1, _CHUNK)
    sums = _sum(chunks.reshape(*chunks.shape[:2], -1, fmt.group), axis=3)[..., 0]
    sums = jnp.pad(sums, ((0, 0), (0, 0), (0, 1)))
    return _chunks_last(chunks * smaller[None, None]), _chunks_last(sums)


def _chunks_last(field: jax.Array) -> jax.Array:
    return field.transpose(2, 1, 0)[..., None]


@jax.jit
def _products(x: jax.Array, sums: jax.Array, weight: Tiled) -> jax.Array:
    """Each chunk's part of the product, [T, C, rows, 16]."""
    fmt, C = weight.block_format, x.shape[1]
    fields = jax.tree.map(lambda field: _by_chunk(field, C), picked(weight))
    zero = sums[-1][None]
    total = zero
    for g in range(_CHUNK // fmt.group):
        inner = _codes_times_x(fmt, fields.planes, x, g, zero)
        if fmt.exponent:  # in two steps, as in formats.values
            e = fields.d[:, :, g * fmt.group // fmt.block_size]
            total = total + inner * power(e >> 1) * power(e - (e >> 1))
        else:
            total = total + _factor(fmt, fields.d, fields.small, g) * inner
        if fields.m is not None:
            total = total - _factor(fmt, fields.m, fields.small_m, g) * sums[g][None]
    return total


def _by_chunk(field: jax.Array, C: int) -> jax.Array:
    """[T, n, 16] for all inputs -> [T, C, n / C, 1, 16] by chunks; a number that serves several is repeated."""
    T, n, _ = field.shape
    if n < C:
        field = jnp.broadcast_to(field[:, :, None], (T, n, C // n, LANES))
    return field.reshape(T, C, -1, 1, LANES)


def _codes_times_x(fmt: BlockFormat, planes: tuple[jax.Array, ...], x: jax.Array, g: int, zero: jax.Array) -> jax.Array:
    """The sum over group g of x times q, [T, C, rows, 16]."""
    offset = -min(fmt.table) if fmt.table else fmt.offset
    total, word = zero, planes[0]
    for k in range(g * fmt.group, (g + 1) * fmt.group):
        if k % 4 == 0:
            word = _four_codes(fmt, planes, k)
        place, taken_at, mask = _taken_at(fmt, k)
        code = lax.bitcast_convert_type(word & mask if taken_at == place else word >> np.uint32(place), jnp.int32)
        q = code - np.int32(offset << taken_at) if offset else code
        total = total + x[k][None] * q.astype(jnp.float32)
    return total


def _factor(fmt: BlockFormat, whole: jax.Array, small: jax.Array | None, g: int) -> jax.Array:
    factor = half(whole[:, :, g * fmt.group // fmt.block_size])
    return factor if small is None else factor * small[:, :, g].astype(jnp.float32)


@jax.jit
def _added_up(products: jax.Array) -> jax.Array:
    """[T, C, rows, 16] -> [rows, 16 T]."""
    y = _sum(products, axis=1)[:, 0]
    return jnp.swapaxes(y, 0, 1).reshape(y.shape[1], -1)


def _in_bytes(fmt: BlockFormat) -> bool:
    """Whether codes are put together, a byte each, before they are taken: where they lie in two planes or a table."""
    return len(PLANES[fmt.bits]) > 1 or bool(fmt.table)


def _taken_at(fmt: BlockFormat, k: int) -> tuple[int, int, np.uint32]:
    """Where input k's code begins in its word, where once it is taken (0 for the uppermost), and the mask for it."""
    bits = 8 if _in_bytes(fmt) else fmt.bits
    place = k % (32 // bits) // 4 * bits + 8 * (k % 4)
    return place, 0 if place + bits == 32 else place, np.uint32(((1 << bits) - 1) << place)


def _four_codes(fmt: BlockFormat, planes: tuple[jax.Array, ...], k: int) -> jax.Array:
    """The word in which the codes of inputs k to k + 3 lie where `_taken_at` says, [T, C, 1, 16]."""
    if not _in_bytes(fmt):
        return planes[0][:, :, k * fmt.bits // 32]
    codes, low = None, 0
    for plane, bits in zip(planes, PLANES[fmt.bits], strict=True):
        word, move = plane[:, :, k * bits // 32], low - k % (32 // bits) // 4 * bits
        moved = word << np.uint32(move) if move > 0 else word >> np.uint32(-move)
        moved = moved & np.uint32(0x01010101 * (((1 << bits) - 1) << low))
        codes, low = moved if codes is None else codes | moved, low + bits
    assert codes is not None
    return _looked_up(fmt, codes) if fmt.table else codes


def _looked_up(fmt: BlockFormat, codes: jax.Array) -> jax.Array:
    """The table's numbers, less its least, for four codes at once, a byte each: a tree of choices."""
    choices: list = [np.uint32(0x01010101 * (value - min(fmt.table))) for value in fmt.table]  # type: ignore[type-arg]
    for bit in range(fmt.bits):
        ones = (codes >> np.uint32(bit)) & np.uint32(0x01010101)
        chosen = (ones << np.uint32(8)) - ones  # 255 in the bytes where the bit is set
        choices = [a ^ (chosen & (a ^ b)) for a, b in zip(choices[::2], choices[1::2], strict=True)]
    number: jax.Array = choices[0]
    return number


def _sum(a: jax.Array, axis: int) -> jax.Array:
    """The sum over an axis, which stays, by halves: in one order whatever the other axes."""
    count = a.shape[axis]
    if count == 1:
        return a
    middle, even = count // 2, count // 2 * 2
    halves = lax.slice_in_dim(a, 0, middle, axis=axis) + lax.slice_in_dim(a, middle, even, axis=axis)
    total = _sum(halves, axis)
    return total if even == count else total + lax.slice_in_dim(a, even, count, axis=axis)
