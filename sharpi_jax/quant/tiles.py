"""The layout that products read: tiles of 16 output columns, side by side in 16 lanes.

A file keeps each row of a weight by itself, and a product would have to add along it. In a tile sixteen rows (output
columns of x W^T) lie next to each other, so one vector of the machine holds the same input feature of all sixteen, and
sums stay in their lanes. For column n and input k:

    tile n // 16, lane n % 16
    plane word [tile, k // (32 / bits), lane], uint32: byte b holds inputs 4p + b of the word, p-th from its low end

                 byte 3      byte 2      byte 1      byte 0
      8 bits   [   3    ]  [   2    ]  [   1    ]  [   0    ]        4 inputs a word
      4 bits   [ 7 |  3 ]  [ 6 |  2 ]  [ 5 |  1 ]  [ 4 |  0 ]        8
      2 bits   [15 11 7 3] [14 10 6 2] [13  9 5 1] [12  8 4 0]      16
      1 bit    ...                                                  32

so that `(word >> p * bits) & mask` has four consecutive inputs of every lane in its four bytes, whatever the number of
bits. Codes of 6, 5 and 3 bits lie in two planes, the low bits and the high ones. Scales are arrays of their own,
[tile, block or group, lane]. Columns are filled up to 16 with zeros.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from sharpi_jax.quant.formats import FORMATS, BlockFormat, Parts, values
from sharpi_jax.quant.packed import Packed

LANES = 16
PLANES = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (8,)}  # bits of a code: bits of its planes, low first


@struct.dataclass
class Tiled:
    """A weight matrix [N, K] in tiles; leading axes are allowed. T = ceil(N / 16).

    Attributes:
      planes: uint32 [T, K * bits / 32, 16] for each plane of the format.
      d: uint16 [T, K / block_size, 16]. small: int8 or uint8 [T, K / group, 16], or None. m, small_m: likewise.
      index: int32 scalar, which matrix of a stack [X, ...] is meant; None where it is one matrix, or all of them.
      format: a key of FORMATS. out_features: N. engine: what multiplies by it, one of load.ENGINES.
    """

    planes: tuple[jax.Array, ...]
    d: jax.Array
    small: jax.Array | None
    m: jax.Array | None
    small_m: jax.Array | None
    index: jax.Array | None
    format: str = struct.field(pytree_node=False)
    out_features: int = struct.field(pytree_node=False)
    engine: str = struct.field(pytree_node=False, default="xla")

    @property
    def block_format(self) -> BlockFormat:
        return FORMATS[self.format]

    @property
    def in_features(self) -> int:
        """K."""
        return int(self.d.shape[-2]) * self.block_format.block_size


def tile(weight: Packed) -> Tiled:
    """The same weight of a block format in tiles."""
    fmt = weight.block_format
    assert fmt.split is not None
    *lead, N, width = weight.blocks.shape
    parts = fmt.split(weight.blocks.reshape(*lead, N, width // fmt.block_bytes, fmt.block_bytes))
    parts = jax.tree.map(lambda field: _lanes(field.reshape(*lead, N, -1)), parts)
    planes, shift = [], 0
    for bits in PLANES[fmt.bits]:
        planes.append(_words((parts.codes >> shift) & ((1 << bits) - 1), bits))
        shift += bits
    return Tiled(tuple(planes), parts.d, parts.small, parts.m, parts.small_m, None, weight.format, N)


def tile_rows(weight: Tiled, ids: jax.Array) -> Parts:
    """Columns of a weight [N, K], taken apart: ids [...] -> Parts of [..., n] each."""
    tiles, lanes = ids // LANES, ids % LANES
    assert weight.index is None
    return _parts(jax.tree.map(lambda field: field.at[tiles, :, lanes].get(mode="clip"), weight))


def select_tile_rows(weight: Tiled, ids: jax.Array) -> Tiled:
    """The weight [n, K] of some columns only, ids [n]."""
    assert weight.index is None
    tiles, lanes = ids // LANES, ids % LANES
    taken: Tiled = jax.tree.map(lambda field: _lanes(field.at[tiles, :, lanes].get(mode="clip")), weight)
    return taken.replace(out_features=ids.shape[0])  # type: ignore[attr-defined, no-any-return]


def untile(weight: Tiled) -> jax.Array:
    """All of a weight as float32 [..., N, K], bit-exact (see formats.py)."""
    dense = values(weight.block_format, _parts(jax.tree.map(lambda field: jnp.swapaxes(field, -1, -2), picked(weight))))
    *lead, tiles, lanes, K = dense.shape
    return dense.reshape(*lead, tiles * lanes, K)[..., : weight.out_features, :]


def picked(weight: Tiled) -> Tiled:
    """The matrix that `index` means, by itself."""
    if weight.index is None:
        return weight
    index, stack = weight.index, weight.replace(index=None)  # type: ignore[attr-defined]
    one: Tiled = jax.tree.map(lambda field: lax.dynamic_index_in_dim(field, index, axis=0, keepdims=False), stack)
    return one


def _parts(fields: Tiled) -> Parts:
    """Fields [..., n] that are no longer in tiles, as Parts."""
    return Parts(_codes(fields.block_format, fields.planes), fields.d, fields.small, fields.m, fields.small_m)


def _lanes(field: jax.Array) -> jax.Array:
    """[..., N, n] -> [..., T, n, 16]."""
    *lead, N, n = field.shape
    field = jnp.pad(field, (*((0, 0),) * len(lead), (0, -N % LANES), (0, 0)))
    return jnp.swapaxes(field.reshape(*lead, -1, LANES, n), -1, -2)


def _words(codes: jax.Array, bits: int) -> jax.Array:
    """[..., K, 16] codes below 2^bits -> [..., K * bits / 32, 16] words."""
    *lead, K, lanes = codes.shape
    fields = codes.reshape(*lead, K * bits // 32, 32 // bits, lanes).astype(jnp.uint32)
    return jnp.sum(fields << _shifts(bits).reshape(*(1,) * (len(lead) + 1), -1, 1), axis=-2, dtype=jnp.uint32)


def _codes(fmt: BlockFormat, planes: tuple[jax.Array, ...]) -> jax.Array:
    """Planes [..., words] each -> uint8 codes [..., K]."""
    codes: jax.Array | None = None
    low = 0
    for words, bits in zip(planes, PLANES[fmt.bits], strict=True):
        fields = (words[..., None] >> _shifts(bits).reshape(*(1,) * words.ndim, -1)) & ((1 << bits) - 1)
        part = fields.astype(jnp.uint8).reshape(*words.shape[:-1], -1) << low
        codes = part if codes is None else codes | part
        low += bits
    assert codes is not None
    return codes


def _shifts(bits: int) -> jax.Array:
    """Where in a word its 32 / bits inputs lie, in their order."""
    return (8 * jnp.arange(4)[None, :] + bits * jnp.arange(8 // bits)[:, None]).reshape(-1).astype(jnp.uint32)
