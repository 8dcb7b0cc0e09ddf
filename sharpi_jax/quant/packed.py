"""A weight in the file's own encoding: what plain floats are multiplied in, and the plainest form of the others."""

import jax
from flax import struct

from sharpi_jax.quant.formats import FORMATS, BlockFormat, decode


@struct.dataclass
class Packed:
    """A weight matrix [N, K] of N output and K input features, in the file's own encoding.

    Attributes:
      blocks: [N, K] for plain floats, [N, bytes per row] uint8 for block formats; leading axes are allowed.
      format: name of the block format, a key of FORMATS.
    """

    blocks: jax.Array
    format: str = struct.field(pytree_node=False)

    @property
    def block_format(self) -> BlockFormat:
        return FORMATS[self.format]

    @property
    def in_features(self) -> int:
        """K."""
        fmt = self.block_format
        return int(self.blocks.shape[-1]) // (1 if fmt.is_plain else fmt.block_bytes) * fmt.block_size

    @property
    def out_features(self) -> int:
        """N."""
        return int(self.blocks.shape[-2])


def dequantise_packed(weight: Packed) -> jax.Array:
    """All of a weight as float32 [..., N, K], bit-exact (see formats.py)."""
    fmt = weight.block_format
    if fmt.is_plain:
        return decode(fmt, weight.blocks)
    *lead, width = weight.blocks.shape
    values = decode(fmt, weight.blocks.reshape(*lead, width // fmt.block_bytes, fmt.block_bytes))
    return values.reshape(*lead, weight.in_features)
