"""The gated delta rule, recurrent and chunked (Yang, Kautz & Hatamizadeh 2024, arXiv 2412.06464).

Per head, with state S [E, E] (key dimension first), log decay g and write strength beta:
  A  S' = exp(g) S                 decay
  B  d  = beta (v - S'^T k)        what the memory lacks
  C  S  = S' + k d^T               write
  D  o  = S^T q                    read

What must not be got wrong: in the recurrent form a row's bits depend neither on the window's width nor on the number of
rows. The body is the same for every width, and it reads the state by dots, never by reductions (see norms.py). One dot
does for both reads: with r = S^T [k, q] of the old state, S'^T k = exp(g) r_k and o = exp(g) r_q + (k . q) d.
"""

import jax
import jax.numpy as jnp
from jax import lax

from sharpi_jax.model.norms import row_sum

CHUNK = 64
_PRECISION = lax.Precision.HIGHEST


def recurrent_delta_rule(
    q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One position after the other, keeping every state on the way.

    Args:
      q, k, v: [B, T, H, E]; g, beta: [B, T, H]; state: [B, H, E, E]. All float32, T >= 2.

    Returns:
      outputs [B, T, H, E] and states [T, B, H, E, E], entry t after position t.
    """

    qk = row_sum(q * k)[..., 0]

    def step(S: jax.Array, x: tuple[jax.Array, ...]) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        q_t, k_t, v_t, g_t, beta_t, qk_t = x
        decay = jnp.exp(g_t)[..., None]
        read = _mm("bhre,bhef->bhrf", jnp.stack([k_t, q_t], axis=2), S)
        d = beta_t[..., None] * (v_t - decay * read[:, :, 0])
        S = decay[..., None] * S + k_t[..., None] * d[..., None, :]
        return S, (decay * read[:, :, 1] + qk_t[..., None] * d, S)

    _, (outputs, states) = lax.scan(step, state, tuple(jnp.moveaxis(a, 1, 0) for a in (q, k, v, g, beta, qk)))
    return jnp.moveaxis(outputs, 0, 1), states


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
