"""The gated delta rule in decode windows as calls of the C++ kernel, through XLA's foreign function interface (CPU).

Both calls advance a state by the same function (kernel/delta.h), so `replay` gives the bits that `window` went through.
"""

import jax
import jax.numpy as jnp

from sharpi_jax import kernel


def window(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    decay: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    *,
    path: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`delta_rule.recurrent_delta_rule`, for any head width; the state is only read.

    Args:
      path: one of kernel.PATHS that the processor can run; the best unless given.
    """
    result = jax.ShapeDtypeStruct(v.shape, jnp.float32)
    call = jax.ffi.ffi_call(kernel.target("delta_window", path=path), (result, result))
    o, d = call(q, k, v, decay, beta, state)
    return o, d


def replay(
    state: jax.Array, k: jax.Array, d: jax.Array, decay: jax.Array, count: jax.Array, *, path: str | None = None
) -> jax.Array:
    """`delta_rule.replay`, in the state's own buffer where nobody else needs it."""
    result = jax.ShapeDtypeStruct(state.shape, jnp.float32)
    call = jax.ffi.ffi_call(kernel.target("delta_replay", path=path), result, input_output_aliases={0: 0})
    out: jax.Array = call(state, k, d, decay, count)
    return out
