"""Products of a few rows by tiled weights on a GPU: one Pallas kernel, compiled by Triton, for every block format.

A program takes TILES tiles of columns and ROWS rows of x through a share of K, UNITS units of 16 inputs at a step. In
every format the inputs of a unit have one scale, so all that a step handles is of shape [TILES, UNITS, 16 lanes]:

    for i = 0 .. 15:    dots[row]   += x[row, 16 * unit + i] * q,    q = the codes of each unit's i-th input
                        totals[row] += x[row, 16 * unit + i]
    sums[row] += scale * dots[row] - minimum * totals[row]

Units are added up at the end of the share, and the shares after the kernel. What must not be got wrong: a row's bits do
not depend on how many rows there are. Rows are filled up to blocks of ROWS, and each block is a program of its own, the
same one however many there are; shares are added in a written order, since XLA may choose that of a reduction.

Numbers chosen here come from counting the loads, instructions and registers of the code that is compiled for an H100,
not from measurements.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pallas_triton

from sharpi_jax.quant.formats import BlockFormat
from sharpi_jax.quant.tiles import LANES, PLANES, Tiled

ROWS, TILES, UNITS, WARPS = 4, 2, 32, 4
UNIT = 16
PROGRAMS, MOST_SHARES = 512, 8  # K is shared out until there is work for a large GPU
_SHAPE = (TILES, UNITS, LANES)

_Fma = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
# A number of each unit: (field, inputs that have one, which of the unit's where there are several) -> _SHAPE.
_Read = Callable[[str, int, int], jax.Array]


def matmul(x: jax.Array, weight: Tiled, *, interpret: bool = False) -> jax.Array:
    """x W^T in float32.

    Args:
      x: [rows, K] float32.
      weight: [N, K]; of a stack, the matrix at its index is read where it lies, without a copy.
      interpret: run the kernel as operations of XLA, on any device: slow, for tests.

    Returns:
      [rows, N] float32.
    """
    rows = x.shape[0]
    y: jax.Array = _matmul(jnp.pad(x, ((0, -rows % ROWS), (0, 0))), weight, interpret)
    return y[:rows]


@functools.partial(jax.jit, static_argnums=2)  # so that a program traces and lowers it once for all of the same shapes
def _matmul(x: jax.Array, weight: Tiled, interpret: bool) -> jax.Array:
    """x W^T for whole blocks of ROWS rows."""
    fmt, (rows, K) = weight.block_format, x.shape
    tiles, units = -(-weight.out_features // LANES), K // UNIT
    blocks, steps = -(-tiles // TILES), -(-units // UNITS)
    shares = max(1, min(MOST_SHARES, steps, PROGRAMS // blocks))
    steps = -(-steps // shares)
    # [rows, 16, units], so that a step's inputs lie side by side; zeros up to whole shares.
    x = jnp.swapaxes(x.reshape(rows, units, UNIT), 1, 2)
    x = jnp.pad(x, ((0, 0), (0, 0), (0, shares * steps * UNITS - units)))
    fields = {
        "index": jnp.zeros((), jnp.int32) if weight.index is None else weight.index,
        "table": jnp.asarray(fmt.table, jnp.float32) if fmt.table else None,
        "d": weight.d,
        "small": weight.small,
        "m": weight.m,
        "small_m": weight.small_m,
        **{f"plane{i}": plane for i, plane in enumerate(weight.planes)},
    }
    flat = {name: field.reshape(-1) for name, field in fields.items() if field is not None}
    fma = _multiply_add if interpret else _fma
    sums = pl.pallas_call(
        functools.partial(_kernel, fmt=fmt, names=tuple(flat), tiles=tiles, units=units, steps=steps, fma=fma),
        out_shape=jax.ShapeDtypeStruct((shares, rows, blocks * TILES * LANES), jnp.float32),
        grid=(blocks, rows // ROWS, shares),
        compiler_params=pallas_triton.CompilerParams(num_warps=WARPS),
        interpret=interpret,
        name=f"matmul_{fmt.name}",
    )(x, *flat.values())
    y: jax.Array = functools.reduce(jnp.add, [sums[share] for share in range(shares)])
    return y[:, : weight.out_features]


def _kernel(  # type: ignore[no-untyped-def]
    x_ref, *refs, fmt: BlockFormat, names: tuple[str, ...], tiles: int, units: int, steps: int, fma: _Fma
) -> None:
    """One program. `tiles` and `units` are those of one matrix; all operands but x are flat."""
    fields, out_ref = dict(zip(names, refs[:-1], strict=True)), refs[-1]
    block, row_block, share = (pl.program_id(axis) for axis in range(3))
    tile, unit, lane = (lax.broadcasted_iota(jnp.int32, _SHAPE, axis) for axis in range(3))
    # Past the last tile the last one is taken once more, into columns that are cut off.
    tile = jnp.minimum(block * TILES + tile, tiles - 1) + fields["index"][0] * tiles

    def step(n: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        first = (share * steps + n) * UNITS
        here = jnp.minimum(first + unit, units - 1)  # likewise: there x is 0

        def read(name: str, inputs: int, place: int = 0) -> jax.Array:
            at = here * (UNIT // inputs) + place if inputs <= UNIT else lax.div(here, jnp.int32(inputs // UNIT))
            number: jax.Array = fields[name][(tile * (units * UNIT // inputs) + at) * LANES + lane]
            return number

        codes = _codes(fmt, fields, read, here)
        totals, dots = [jnp.zeros(UNITS, jnp.float32)] * ROWS, [jnp.zeros(_SHAPE, jnp.float32)] * ROWS
        for i, q in enumerate(codes):
            for r in range(ROWS):
                x = x_ref[row_block * ROWS + r, i, pl.ds(first, UNITS)]
                totals[r], dots[r] = totals[r] + x, fma(_over_units(x), q, dots[r])
        *factors, scale = _scale(fmt, fields, read)
        dots = [functools.reduce(jnp.multiply, factors, dot) for dot in dots]
        sums = tuple(fma(dot, scale, s) for dot, s in zip(dots, sums, strict=True))
        if "m" in fields:
            minus = -_factor("m", "small_m", fmt, fields, read)
            sums = tuple(fma(_over_units(total), minus, s) for total, s in zip(totals, sums, strict=True))
        return sums

    zeros = jnp.zeros(_SHAPE, jnp.float32)
    for r, sums in enumerate(lax.fori_loop(0, steps, step, (zeros,) * ROWS)):
        tile, lane = (lax.broadcasted_iota(jnp.int32, (TILES, LANES), axis) for axis in range(2))
        out_ref[share, row_block * ROWS + r, (block * TILES + tile) * LANES + lane] = jnp.sum(sums, axis=1)


def _over_units(x: jax.Array) -> jax.Array:
    """A number of each unit for all of its tiles and lanes."""
    return jnp.broadcast_to(x[None, :, None], _SHAPE)


def _codes(fmt: BlockFormat, fields, read: _Read, unit: jax.Array) -> list[jax.Array]:  # type: ignore[no-untyped-def]
    """What the 16 codes of each unit stand for, float32, one after the other."""
    codes, low = [jnp.zeros((), jnp.uint32)] * UNIT, 0
    for plane, bits in enumerate(PLANES[fmt.bits]):
        codes = [code | (field << low) for code, field in zip(codes, _plane(read, plane, bits, unit), strict=True)]
        low += bits
    if fmt.table:
        return [fields["table"][code.astype(jnp.int32)] for code in codes]
    # A code below 2^23 in the low bits of 2^23 is their sum: exact, and cheaper on a GPU than a conversion.
    sums = (lax.bitcast_convert_type(code | 0x4B000000, jnp.float32) for code in codes)
    return [s - float(2**23 + fmt.offset) for s in sums]


def _plane(read: _Read, plane: int, bits: int, unit: jax.Array) -> list[jax.Array]:
    """One plane's bits of the 16 codes of each unit, uint32; quant/tiles.py draws the words."""
    inputs = 32 // bits
    words = [read(f"plane{plane}", inputs, place) for place in range(max(UNIT // inputs, 1))]
    if inputs > UNIT:  # a word serves several units
        part = lax.rem(unit, jnp.int32(inputs // UNIT))
        words = [words[0] >> (part * (bits * UNIT // 4)).astype(jnp.uint32)]
    shifts = [8 * byte + bits * p for p in range(min(inputs, UNIT) // 4) for byte in range(4)]
    return [(word >> shift) & ((1 << bits) - 1) for word in words for shift in shifts]


def _scale(fmt: BlockFormat, fields, read: _Read) -> tuple[jax.Array, ...]:  # type: ignore[no-untyped-def]
    """The factors of each unit's scale."""
    if not fmt.exponent:
        return (_factor("d", "small", fmt, fields, read),)
    e = read("d", fmt.block_size, 0).astype(jnp.int32)
    return _power(e >> 1), _power(e - (e >> 1))  # as in formats.values


def _factor(whole: str, small: str, fmt: BlockFormat, fields, read: _Read) -> jax.Array:  # type: ignore[no-untyped-def]
    factor = lax.bitcast_convert_type(read(whole, fmt.block_size, 0), jnp.float16).astype(jnp.float32)
    return factor * read(small, fmt.group, 0).astype(jnp.float32) if small in fields else factor


def _power(exponent: jax.Array) -> jax.Array:
    """2^(exponent - 64) for an exponent of at most 128."""
    return lax.bitcast_convert_type((exponent + (127 - 64)) << 23, jnp.float32)


def _fma(a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
    """a * b + c in the one instruction that a GPU has for it: XLA lets Triton join nothing by itself."""
    shape = jax.ShapeDtypeStruct(c.shape, c.dtype)
    (out,) = pallas_triton.elementwise_inline_asm(
        "fma.rn.f32 $0, $1, $2, $3;", args=[a, b, c], constraints="=f,f,f,f", pack=1, result_shape_dtypes=[shape]
    )
    return out


def _multiply_add(a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
    return a * b + c
