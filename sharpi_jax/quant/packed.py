"""The packed weight: one pytree leaf per tensor, with its block format beside it as static data."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from sharpi_jax.errors import CheckpointError
from sharpi_jax.quant.expand import can_expand, expand
from sharpi_jax.quant.formats import FORMATS, BlockFormat


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


def pack(raw: np.ndarray, type_name: str, tensor: str) -> Packed:
    """A tensor's bytes, put on the device as they are; of a type without a decoder here, expanded to bfloat16.

    Args:
      raw: [..., N, bytes per row] uint8, as it lies in the file. On CPU the device may take it over without a copy, so
        it must never change, and is best memory of its own rather than a view of a mapped file.
      type_name: ggml's name of its type.
      tensor: the tensor's name, for the message.

    Raises:
      CheckpointError: the type is not supported.
    """
    if type_name not in FORMATS:
        if not can_expand(type_name):
            raise CheckpointError(
                f"tensor {tensor} has type {type_name}, which is not supported; "
                f"convert the file to one of {', '.join(FORMATS)}."
            )
        raw, type_name = expand(raw, type_name), "BF16"
    return Packed(jax.device_put(raw.view(jnp.dtype(FORMATS[type_name].dtype))), type_name)


def dequantise(weight: Packed) -> jax.Array:
    """All of a weight as float32 [..., N, K], bit-exact (see formats.py)."""
    fmt = weight.block_format
    if fmt.is_plain:
        return fmt.decode(weight.blocks)
    *lead, width = weight.blocks.shape
    values = fmt.decode(weight.blocks.reshape(*lead, width // fmt.block_bytes, fmt.block_bytes))
    return values.reshape(*lead, weight.in_features)
