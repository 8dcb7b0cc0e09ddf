"""Losslessness: what comes out of a loop with drafts follows the target alone, and wrong rules are found out.

200,000 seeds of a Markov chain decide; the seeds are fixed, so a test that passes keeps passing.
"""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
import toy_chain
from toy_chain import SEEDS, V, chi_square, exact

from sharpi_jax.decode import rejection, target
from sharpi_jax.decode.acceptance import accepted_prefix, judgement
from sharpi_jax.decode.rules import RULES, judge
from sharpi_jax.decode.sampling import RESIDUAL, draw, window_keys

K, N = 3, 3
LOSSLESS = ("rejection", "block", "sample_match", "threshold")  # the last with both thresholds 1, its default
JUDGES = {name: functools.partial(judge, name) for name in LOSSLESS}


@pytest.fixture(scope="module", autouse=True)
def _two_segments():
    """A vocabulary of 6 in segments of 3, not one that is filled up to 512."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, "SEGMENT", 3)
        yield


def tables():
    """The target's table and the drafter's, [V, V] each: row t follows token t."""
    rng = np.random.default_rng(7)
    p = rng.dirichlet(np.ones(V), V)
    peaked = np.full((V, V), 0.02) + 0.88 * np.eye(V)[(np.arange(V) + 2) % V]
    low, high = np.arange(V) < 4, np.arange(V) >= 4
    pairs = {
        "peaked": (p, peaked),
        "disjoint": (p * low, p * high),
        "equal": (p, p),
    }
    normal = {name: [x / x.sum(-1, keepdims=True) for x in pair] for name, pair in pairs.items()}
    return {name: tuple(jnp.asarray(x, jnp.float32) for x in pair) for name, pair in normal.items()}


TABLES = tables()


@functools.cache
def outputs(rule, pair, limit, ragged):
    """Tokens [SEEDS, N] and the first step's passed drafts [SEEDS]."""
    p, q = TABLES[pair]
    found = toy_chain.decode(rule, K, N, p, q, jnp.arange(SEEDS, dtype=jnp.uint32), limit, ragged)
    return tuple(np.asarray(x) for x in found)


def p_values(rule, pair, limit=K, ragged=0):
    """Of the outputs of 2 and of 3 tokens."""
    tokens, _ = outputs(rule, pair, limit, ragged)
    p, _ = TABLES[pair]
    return [chi_square(tokens[:, :n], exact(p, n)) for n in (2, 3)]


@pytest.mark.parametrize("rule", LOSSLESS)
def test_the_output_follows_the_target_whatever_the_drafter(rule):
    for pair, limit, ragged in (
        ("peaked", 3, 0),
        ("peaked", 2, 0),
        ("peaked", 3, 1),
        ("disjoint", 3, 0),
        ("equal", 3, 0),
    ):
        assert min(p_values(JUDGES[rule], pair, limit, ragged)) > 1e-3, (pair, limit, ragged)


def test_the_rules_said_to_be_lossless_are_those_tested():
    assert {name for name, rule in RULES.items() if not rule.lossy} == set(LOSSLESS) - {"threshold"}


def resampling_from_p(evidence, params):
    """Wrong: at a rejection it draws from p, not from the positive part of p - q."""
    found = judge("rejection", evidence, params)
    at = jnp.minimum(found.passed, K - 1)
    keys = window_keys(evidence.seed, evidence.position, 0, 1, RESIDUAL)
    wrong = draw(evidence.p.at(at).weights, keys)[:, 0]
    return found.replace(next_token=jnp.where(found.passed < evidence.proposed, wrong, found.next_token))


def accepting_the_wrong_way_round(evidence, params):
    """Wrong: it passes a draft with probability min(1, q / p)."""
    u = rejection._acceptance_numbers(evidence)
    accept = u * evidence.p.probability(evidence.drafts) <= evidence.q.probability(evidence.drafts)
    passed = accepted_prefix(accept, evidence.proposed)
    return judgement(evidence, passed, rejection._correction(evidence, passed, jnp.ones(1)))


@pytest.mark.parametrize("wrong", [resampling_from_p, accepting_the_wrong_way_round])
def test_wrong_rules_are_found_out(wrong):
    assert max(p_values(wrong, "peaked")) < 1e-6


def test_block_passes_at_least_as_many_drafts_as_rejection():
    noise = 4 * K / np.sqrt(SEEDS)
    gains = {}
    for pair in TABLES:
        means = [outputs(JUDGES[rule], pair, K, 0)[1].mean() for rule in ("block", "rejection")]
        gains[pair] = means[0] - means[1]
    assert min(gains.values()) > -noise, gains
    assert gains["equal"] == gains["disjoint"] == 0, gains  # all pass, none passes
    assert max(gains.values()) > noise, gains


def test_the_example_of_the_paper():
    """Two tokens, target (1/3, 2/3), drafter (2/3, 1/3), two drafts: 11/9 of them pass, 10/9 token by token."""
    p, q = (jnp.zeros((V, V)).at[:, :2].set(jnp.asarray(row) / 3) for row in ([1.0, 2.0], [2.0, 1.0]))
    for rule, passed in (("block", 11 / 9), ("rejection", 10 / 9)):
        found = toy_chain.decode(JUDGES[rule], K, N, p, q, jnp.arange(SEEDS, dtype=jnp.uint32), 2, 0)
        assert abs(float(found[1].mean()) - passed) < 4 / np.sqrt(SEEDS), rule
