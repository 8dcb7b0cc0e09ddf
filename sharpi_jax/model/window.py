"""The stretch of positions that one forward pass covers, per row."""

import jax
import jax.numpy as jnp
from flax import struct


@struct.dataclass
class Window:
    """T consecutive positions of each of B rows.

    Attributes:
      positions: [B, T] int32, position of each entry in its row (padding included).
      valid: [B, T] bool; an entry that is not valid is padding: it writes nothing and advances no state.
      used: no row has more than its first `used` entries valid; the rest only fill up the window.
      row_exact: True for decode windows, where a row's bits must not depend on T; False for prompts.
    """

    positions: jax.Array
    valid: jax.Array
    used: int = struct.field(pytree_node=False)
    row_exact: bool = struct.field(pytree_node=False)


def window_at(start: jax.Array, count: jax.Array, width: int, *, row_exact: bool, used: int | None = None) -> Window:
    """The window of `width` entries from `start` [B], of which the first `count` [B], at most `used`, are valid."""
    offsets = jnp.arange(width, dtype=jnp.int32)[None, :]
    return Window(start[:, None] + offsets, offsets < count[:, None], used or width, row_exact)
