"""Rows of a running batch that take one prompt after another: free rows, and a fresh row put in the place of one.

What must not go wrong here: a row that is put in brings all of its state with it, and touches no other row. So nothing
is listed: every leaf of the state has a row axis in front, but the rope table, which all rows share.
"""

import jax
import jax.numpy as jnp
import numpy as np

from sharpi_jax.decode.decoder import Decoder
from sharpi_jax.decode.state import LENGTH, DecodeState
from sharpi_jax.model.cache import TrunkCache


def free_rows(decoder: Decoder, fresh: DecodeState, rows: int) -> DecodeState:
    """A batch of rows that are finished from the start, and so never change; of the shapes of `fresh`, a single row."""
    state: DecodeState = decoder.programs.run(_free_rows, fresh, rows=rows)
    return state


def replace_row(decoder: Decoder, state: DecodeState, row: int, fresh: DecodeState) -> DecodeState:
    """The batch with `fresh`, a single row just prefilled, at `row`. Takes over `state`'s buffers, not `fresh`'s.

    One program serves every row.
    """
    after: DecodeState = decoder.programs.run(_replace_row, state, np.int32(row), fresh, donate=(0,))
    return after


def _free_rows(fresh: DecodeState, *, rows: int) -> DecodeState:
    bare = _without_rope(fresh)
    free = jax.tree.map(lambda x: jnp.zeros((rows, *x.shape[1:]), x.dtype), bare)
    return _with_rope(free.replace(finish=jnp.full(rows, LENGTH, jnp.int32)), fresh)


def _replace_row(state: DecodeState, row: jax.Array, fresh: DecodeState) -> DecodeState:
    old, new = _without_rope(state), _without_rope(fresh)
    return _with_rope(jax.tree.map(lambda a, b: a.at[row].set(b[0], mode="drop"), old, new), state)


def _without_rope(state: DecodeState) -> DecodeState:
    """Only what is per row."""
    return state.replace(trunk=TrunkCache(state.trunk.layers, None))  # type: ignore[attr-defined, no-any-return, arg-type]


def _with_rope(state: DecodeState, source: DecodeState) -> DecodeState:
    return state.replace(trunk=TrunkCache(state.trunk.layers, source.trunk.rope))  # type: ignore[attr-defined, no-any-return]
