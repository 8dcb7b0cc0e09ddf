"""Speculative decoding over a Markov chain, so small that its outputs' exact distribution is known; for many seeds.

The loop is that of decode/step.py in miniature, with the real rules, keys and draws; its own are only the two tables.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from sharpi_jax.decode.acceptance import Evidence, rule_params
from sharpi_jax.decode.sampling import DRAFT, TARGET, Distribution, draw, random_keys, window_keys
from sharpi_jax.decode.target import target_of

V = 6
START = 0  # the certain token of position 0
SEEDS = 200_000


def rows_of(table, tokens, scale):
    """The distributions after tokens [W], as [1, W, V]: not normalised, so that a rule that forgets the total shows."""
    weights = scale * table[tokens][None]
    return Distribution(weights, jnp.sum(weights, axis=-1))


def window(rule, K, p, q, seed, last, position, proposed):
    """One step of one row -> (drafts [K], passed, next token)."""

    def draft(token, key):
        token = draw(q[token][None, None], key[None, None])[0, 0]
        return token, token

    keys = window_keys(seed[None], position[None], 0, K, DRAFT)[0]
    tokens = jnp.concatenate([last[None], jax.lax.scan(draft, last, keys)[1]])
    at = position + 1 + jnp.arange(K + 1)
    p_rows = rows_of(p, tokens, 3.0)
    target = target_of(jnp.log(p_rows.weights))
    evidence = Evidence(
        target=target,
        choice=draw(p_rows.weights, random_keys(seed[None], at[None], TARGET)),
        drafts=tokens[None, 1:],
        proposed=jnp.minimum(proposed, K)[None],
        p=p_rows,
        q=rows_of(q, tokens[:-1], 0.7),
        temperature=jnp.ones(1),
        seed=seed[None],
        position=position[None],
        sampled=True,
    )
    found = rule(evidence, rule_params(1))
    return tokens[1:], found.passed[0], found.next_token[0]


@functools.partial(jax.jit, static_argnames=("rule", "K", "n"))
def decode(rule, K, n, p, q, seeds, limit, ragged):
    """The n tokens [seeds, n] after START, and how many drafts the first step passes [seeds].

    rule: (Evidence, RuleParams) -> Judgement. A step proposes `limit` of the K drafts, or where ragged is 1 between 0
    and `limit` of them, another number each time.
    """

    def row(seed):
        def step(carry, index):
            output, last, position = carry
            proposed = limit - ragged * ((seed + index).astype(jnp.int32) % (limit + 1))
            drafts, passed, following = window(rule, K, p, q, seed, last, position, proposed)
            emitted = jnp.where(jnp.arange(K + 1) < passed, jnp.append(drafts, 0), following)
            places = jnp.where(jnp.arange(K + 1) <= passed, position + jnp.arange(K + 1), n)
            return (output.at[places].set(emitted, mode="drop"), following, position + passed + 1), passed

        start = (jnp.zeros(n, jnp.int32), jnp.int32(START), jnp.int32(0))
        (output, _, _), passed = jax.lax.scan(step, start, jnp.arange(n, dtype=jnp.uint32))
        return output, passed[0]

    return jax.vmap(row)(seeds)


def exact(p, n):
    """Probability of each output, [V] * n, float64."""
    found = np.asarray(p, np.float64)[START]
    for _ in range(n - 1):
        found = found[..., None] * np.asarray(p, np.float64)
    return found


def chi_square(outputs, expected, least=5.0):
    """p-value of outputs [N, n] against probabilities [V] * n; cells expected fewer than 5 times are one cell."""
    from scipy.stats import chi2

    shape = expected.shape
    counts = np.bincount(np.ravel_multi_index(outputs.T, shape), minlength=expected.size).astype(float)
    wanted = expected.reshape(-1) * len(outputs)
    if counts[wanted == 0].any():
        return 0.0  # what cannot come came
    rare = wanted < least
    counts = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(wanted[~rare], wanted[rare].sum())
    counts, wanted = counts[wanted > 0], wanted[wanted > 0]
    return float(chi2.sf(((counts - wanted) ** 2 / wanted).sum(), len(counts) - 1))
