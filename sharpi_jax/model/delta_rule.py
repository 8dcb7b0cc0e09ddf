"""The gated delta rule, recurrent and chunked (Yang, Kautz & Hatamizadeh 2024, arXiv 2412.06464).

Per head, with state S [E, E] (key dimension first), log decay g and write strength beta:
  A  S' = exp(g) S                 decay
  B  d  = beta (v - S'^T k)        what the memory lacks
  C  S  = S' + k d^T               write
  D  o  = S^T q                    read

What must not be got wrong: in the recurrent form a row's bits depend neither on the window's width nor on the number of
rows. On a CPU a C++ kernel sees to that (delta_kernel.py). Elsewhere each position runs the same two compiled functions
and they read the state by dots, never by reductions (see norms.py). Both forms read it once per position: with
r = S^T [k, q] of the old state, S'^T k = exp(g) r_k and o = exp(g) r_q + (k . q) d.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata

from sharpi_jax import kernel
from sharpi_jax.model import delta_kernel
from sharpi_jax.model.norms import row_sum

CHUNK = 64
_PRECISION = lax.Precision.HIGHEST


def _fenced(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function compiled by itself: XLA may neither fuse its operations with those around a call nor move them.

    So its bits are the same wherever it is called, and a small result is not computed again for every element of a
    state. XLA documents neither; without it the products and sums of `_write` round otherwise in `replay`.
    """
    compiled = jax.jit(function)

    def call(*args: jax.Array) -> Any:
        with set_xla_metadata(inlineable="false"):
            return compiled(*args)

    return call


def recurrent_delta_rule(
    q: jax.Array, k: jax.Array, v: jax.Array, decay: jax.Array, beta: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One position after the other, for decode windows.

    Args:
      q, k, v: [B, T, H, E]; decay = exp(g), beta: [B, T, H]; state: [B, H, E, E]. All float32.

    Returns:
      outputs [B, T, H, E], and what was written, d [B, T, H, E]: with it `replay` gives the state after any position.
    """
    args = (q, k, v, decay, beta, state)
    if kernel.problem():
        return _window_by_xla(*args)
    out: tuple[jax.Array, jax.Array] = lax.platform_dependent(*args, cpu=delta_kernel.window, default=_window_by_xla)
    return out


def _window_by_xla(
    q: jax.Array, k: jax.Array, v: jax.Array, decay: jax.Array, beta: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """`recurrent_delta_rule` where there is no kernel."""
    qk = row_sum(q * k)[..., 0]
    every = jnp.ones(q.shape[0], bool)
    S = state
    outputs: list[jax.Array] = []
    written: list[jax.Array] = []
    for t in range(q.shape[1]):
        if t > 0:
            S = _write(S, k[:, t - 1], written[-1], decay[:, t - 1], every)
        o, d = _read(S, *(a[:, t] for a in (q, k, v, decay, beta, qk)))
        outputs.append(o)
        written.append(d)
    return jnp.stack(outputs, axis=1), jnp.stack(written, axis=1)


def replay(state: jax.Array, k: jax.Array, d: jax.Array, decay: jax.Array, count: jax.Array) -> jax.Array:
    """The state [B, H, E, E] after `count` [B] positions of a window, bit for bit that on the rule's own way.

    Args:
      k, d: [B, T, H, E], decay: [B, T, H], as `recurrent_delta_rule` had and gave them.
    """
    args = (state, k, d, decay, count)
    if kernel.problem():
        return _replay_by_xla(*args)
    out: jax.Array = lax.platform_dependent(*args, cpu=delta_kernel.replay, default=_replay_by_xla)
    return out


def _replay_by_xla(state: jax.Array, k: jax.Array, d: jax.Array, decay: jax.Array, count: jax.Array) -> jax.Array:
    """`replay` where there is no kernel."""

    def step(t: jax.Array, S: jax.Array) -> jax.Array:
        new: jax.Array = _write(S, *(_at(a, t) for a in (k, d, decay)), t < count)
        return new

    if k.shape[1] == 1:
        return step(jnp.int32(0), state)
    out: jax.Array = lax.fori_loop(0, jnp.max(count), step, state)
    return out


@_fenced
def _read(
    S: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, decay: jax.Array, beta: jax.Array, qk: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Steps B and D of one position, from the state before it: q, k, v [B, H, E] -> o, d [B, H, E]."""
    read = _mm("bhre,bhef->bhrf", jnp.stack([k, q], axis=2), S)
    d = beta[..., None] * (v - decay[..., None] * read[:, :, 0])
    return decay[..., None] * read[:, :, 1] + qk[..., None] * d, d


@_fenced
def _write(S: jax.Array, k: jax.Array, d: jax.Array, decay: jax.Array, kept: jax.Array) -> jax.Array:
    """Steps A and C where `kept` [B]: k, d [B, H, E], decay [B, H]."""
    new = decay[..., None, None] * S + k[..., None] * d[..., None, :]
    return jnp.where(kept[:, None, None, None], new, S)


def _at(a: jax.Array, t: jax.Array) -> jax.Array:
    out: jax.Array = lax.dynamic_index_in_dim(a, t, axis=1, keepdims=False)
    return out


def chunked_delta_rule(
    q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array, valid: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Chunks of CHUNK positions by matrix products: the form for prompts and for training (it is differentiable).

    Within a chunk, steps B and C unrolled give a unit lower-triangular system (I + L) d = beta (v - exp(G) k S), with
    G the running sum of g and L_ij = beta_i (k_i . k_j) exp(G_i - G_j) for j < i.

    Args:
      q, k, v: [B, T, H, E]; g, beta: [B, T, H]; valid: [B, T]; state: [B, H, E, E]. T must be at most CHUNK or a
        multiple of it.

    Returns:
      outputs [B, T, H, E] (meaningless where not valid) and the state [B, H, E, E] after each row's valid positions.
    """
    B, T, H, E = q.shape
    size = min(T, CHUNK)
    # g = beta = 0 makes a step the identity: padding neither decays nor writes.
    g = jnp.where(valid[..., None], g, 0.0)
    beta = jnp.where(valid[..., None], beta, 0.0)

    def chunks(a: jax.Array) -> jax.Array:  # [B, T, H, ...] -> [T/size, B, H, size, ...]
        a = a.reshape(B, T // size, size, H, *a.shape[3:])
        return jnp.moveaxis(jnp.moveaxis(a, 1, 0), 2, 3)

    final, outputs = lax.scan(_one_chunk, state, tuple(chunks(a) for a in (q, k, v, g, beta)))
    outputs = jnp.moveaxis(jnp.moveaxis(outputs, 3, 2), 0, 1)
    return outputs.reshape(B, T, H, E), final


def _one_chunk(S: jax.Array, x: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    """One chunk of c positions: q, k, v [B, H, c, E], g, beta [B, H, c]."""
    q, k, v, g, beta = x
    size = q.shape[2]
    G = jnp.cumsum(g, axis=-1)
    lower = jnp.tril(jnp.ones((size, size), bool))[None, None]
    # The exponent is masked before exp: above the diagonal G_i - G_j > 0 could overflow and poison gradients.
    decay = jnp.exp(jnp.where(lower, G[..., :, None] - G[..., None, :], -jnp.inf))
    strict = jnp.tril(jnp.ones((size, size), jnp.float32), -1)[None, None]
    L = strict * beta[..., None] * _mm("bhie,bhje->bhij", k, k) * decay
    right = beta[..., None] * (v - jnp.exp(G)[..., None] * _mm("bhie,bhef->bhif", k, S))
    d = lax.linalg.triangular_solve(L, right, left_side=True, lower=True, unit_diagonal=True)
    inside = _mm("bhij,bhjf->bhif", _mm("bhie,bhje->bhij", q, k) * decay, d)
    out = jnp.exp(G)[..., None] * _mm("bhie,bhef->bhif", q, S) + inside
    last = G[..., -1:]
    S = S * jnp.exp(last)[..., None] + _mm("bhie,bhif->bhef", k * jnp.exp(last - G)[..., None], d)
    return S, out


def _mm(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(spec, a, b, precision=_PRECISION)
