"""Every acceptance rule against its plain NumPy form, and what each of them promises."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import numpy_rules

from sharpi_jax.decode.acceptance import DEFAULTS, Evidence, RuleParams, sum_over_vocabulary
from sharpi_jax.decode.acceptance import rule_params as library_params
from sharpi_jax.decode.rules import RULES, judge
from sharpi_jax.decode.sampling import ACCEPT, DRAFT, RESIDUAL, Distribution, uniform, window_keys
from sharpi_jax.decode.target import target_of

B, K, V = 3, 3, 16
LOSSY_GREEDY = [name for name, rule in RULES.items() if rule.lossy and rule.greedy]
CASES = [(name, kind) for name, rule in RULES.items() for kind in ("greedy", "sampled") if getattr(rule, kind)]
# For each parameter, values from strict to loose.
LOOSER = {
    "p_min": ("greedy_p_min", [1.0, 0.5, 0.3, 0.1, 0.01, 1e-6]),
    "typical_epsilon": ("typical", [1.0, 0.5, 0.2, 0.09, 0.01, 1e-6]),
    "typical_alpha": ("typical", [np.inf, 4.0, 1.0, 0.3, 0.05, 1e-6]),
    "relaxed_top_k": ("relaxed", [1, 2, 3, 5, 10, 16]),
    "relaxed_delta": ("relaxed", [-1.0, 0.1, 0.6, 1.5, 4.0, np.inf]),
    "threshold_single": ("threshold", [1.0, 0.5, 0.3, 0.1, 0.01, 1e-6]),
    "threshold_acc": ("threshold", [1.0, 0.7, 0.4, 0.2, 0.05, 1e-6]),
}
EXACT = {
    "greedy_p_min": {"p_min": 1.0},
    "typical": {"typical_epsilon": 1.0, "typical_alpha": np.inf},
    "relaxed": {"relaxed_top_k": 1},
    "threshold": {"threshold_single": 1.0},
}
# With these a parameter of a rule decides alone.
ALONE = {
    "typical_epsilon": {"typical_alpha": np.inf},
    "typical_alpha": {"typical_epsilon": 1.0},
    "relaxed_top_k": {"relaxed_delta": np.inf},
    "relaxed_delta": {"relaxed_top_k": V},
}
JUDGE = jax.jit(judge, static_argnums=0)
TARGET_OF = jax.jit(target_of)
NUMBERS = jax.jit(lambda seed, position: uniform(window_keys(seed, position, 0, K, ACCEPT)))


def rule_params(rows, **values):
    """As the library's, in NumPy: the tests build many."""
    kind = {name: np.int32 if name == "relaxed_top_k" else np.float32 for name in DEFAULTS}
    return RuleParams(
        **{name: np.broadcast_to(np.asarray(value, kind[name]), (rows,)) for name, value in (DEFAULTS | values).items()}
    )


def state(seed, sampled, rows=B, drafts=K, size=V, scale=2.0):
    """Evidence of `rows` windows with likely drafts; in sampled ones the last row is greedy."""
    rng = np.random.default_rng(seed)
    logits = (scale * rng.standard_normal((rows, drafts + 1, size))).astype(np.float32)
    likely = np.argsort(-logits[:, :drafts], axis=-1)[..., :3]
    ids = np.take_along_axis(likely, rng.choice(3, (rows, drafts, 1), p=[0.6, 0.2, 0.2]), -1)[..., 0]
    target = jax.device_get(TARGET_OF(logits))
    temperature = np.zeros(rows, np.float32)
    choice = logits.argmax(-1)
    p = q = None
    if sampled:
        temperature[: max(rows - 1, 1)] = 0.8
        p = spread(logits / 0.8, temperature)
        q = spread(0.3 * logits[:, :drafts] + rng.standard_normal((rows, drafts, size)), temperature)
        drawn = (rng.random((rows, drafts + 1, 1)) > np.cumsum(numpy_rules.softmax(logits / 0.8), -1)).sum(-1)
        choice = np.where(temperature[:, None] > 0, np.minimum(drawn, size - 1), choice)
    return Evidence(
        target=target,
        choice=choice.astype(np.int32),
        drafts=ids.astype(np.int32),
        proposed=rng.integers(1, drafts + 1, rows).astype(np.int32),
        p=p,
        q=q,
        temperature=temperature,
        seed=rng.integers(0, 2**32, rows).astype(np.uint32),
        position=rng.integers(0, 10**6, rows).astype(np.int32),
        sampled=sampled,
    )


def spread(logits, temperature):
    """A distribution with totals other than 1, one-hot where a row is greedy."""
    weights = 5 * np.exp(logits - logits.max(-1, keepdims=True))
    one_hot = np.eye(logits.shape[-1])[logits.argmax(-1)]
    weights = np.where(temperature[:, None, None] > 0, weights, one_hot).astype(np.float32)
    return Distribution(weights, weights.sum(-1))


def normalised(distribution):
    weights = np.asarray(distribution.weights, np.float64)
    return weights / weights.sum(-1, keepdims=True)


def expected(name, evidence, b, params):
    """The NumPy rule on row b -> (passed, what follows if not all pass or None where it is the choice)."""
    n = int(evidence.proposed[b])
    drafts = np.asarray(evidence.drafts[b, :n]).tolist()
    choice = np.asarray(evidence.choice[b]).tolist()
    is_greedy = float(evidence.temperature[b]) <= 0
    value = {field: float(getattr(params, field)[b]) for field in DEFAULTS}
    p = numpy_rules.softmax(evidence.target.logits[b]) if is_greedy else normalised(evidence.p)[b]
    u = np.asarray(NUMBERS(evidence.seed, evidence.position), np.float64)[b]
    if name in ("greedy_p_min", "sample_match") or (name == "threshold" and is_greedy):
        least = {"greedy_p_min": "p_min", "threshold": "threshold_single"}.get(name)
        least = value[least] if least else np.inf
        return numpy_rules.prefix(
            d == c or p[i][d] >= least for i, (d, c) in enumerate(zip(drafts, choice, strict=False))
        ), None
    if name == "typical":
        return numpy_rules.typical(p, drafts, choice, value["typical_epsilon"], value["typical_alpha"]), None
    if name == "relaxed":
        return numpy_rules.relaxed(p, drafts, choice, int(value["relaxed_top_k"]), value["relaxed_delta"]), None
    if name == "threshold":
        return numpy_rules.threshold(p, drafts, u, value["threshold_single"], value["threshold_acc"])
    if is_greedy:  # p is one-hot
        return numpy_rules.prefix(d == c for d, c in zip(drafts, choice, strict=False)), None
    return getattr(numpy_rules, name)(p, normalised(evidence.q)[b], drafts, u)


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_rule_equals_its_plain_form(name, kind):
    seen = set()
    for seed in range(40):
        evidence = state(seed, kind == "sampled")
        rng = np.random.default_rng(seed)
        values = {field: rng.choice(steps, B) for field, (_, steps) in LOOSER.items()}
        params = rule_params(B, **values)
        found = jax.device_get(JUDGE(name, evidence, params))
        for b in range(B):
            passed, follows = expected(name, evidence, b, params)
            assert int(found.passed[b]) == passed, (seed, b)
            if follows is None:
                assert int(found.next_token[b]) == int(evidence.choice[b, passed])
            else:
                assert follows[int(found.next_token[b])] > 0
            seen.add((passed, int(evidence.proposed[b])))
        _check_what_is_reported(evidence, found)
    assert {(0, 3), (1, 3), (3, 3), (1, 1), (0, 1)} <= seen


def _check_what_is_reported(evidence, found):
    p = numpy_rules.softmax(evidence.target.logits)
    if evidence.sampled:
        p = np.where(np.asarray(evidence.temperature)[:, None, None] > 0, normalised(evidence.p), p)
    drafts = np.asarray(evidence.drafts)
    np.testing.assert_allclose(
        found.probability, np.take_along_axis(p[:, :K], drafts[..., None], -1)[..., 0], rtol=1e-5
    )
    assert (np.asarray(found.is_argmax) == (np.asarray(evidence.target.logits)[:, :K].argmax(-1) == drafts)).all()


@pytest.mark.parametrize("name", ["threshold", "rejection", "block"])
def test_a_correction_follows_the_residual(name):
    """One state, many positions: what follows a rejection, by how many drafts passed before it."""
    n = 20_000
    one = state(119, True, rows=1)  # rejects at two places by each rule
    repeat = functools.partial(jax.tree.map, lambda x: jnp.repeat(x, n, axis=0))
    # Vectorised over the rows, as the rules go through them one at a time.
    many = dataclasses.replace(repeat(one), position=jnp.arange(n, dtype=jnp.int32), proposed=jnp.full(n, K, jnp.int32))
    alone = jax.jit(jax.vmap(lambda row: judge(name, jax.tree.map(lambda x: x[None], row), rule_params(1))))
    found = jax.tree.map(lambda x: np.asarray(x)[:, 0], alone(many))
    u = np.asarray(NUMBERS(many.seed, many.position), np.float64)
    p, q, drafts = normalised(one.p)[0], normalised(one.q)[0], np.asarray(one.drafts[0]).tolist()
    follows = {}
    for i in range(n):
        args = (p, drafts, u[i], 1.0, 1.0) if name == "threshold" else (p, q, drafts, u[i])
        passed, residual = getattr(numpy_rules, name)(*args)
        assert found.passed[i] == passed
        if residual is not None:
            follows.setdefault(passed, (residual, []))[1].append(found.next_token[i])
    assert len(follows) >= 2
    for residual, tokens in follows.values():
        share = np.bincount(tokens, minlength=V) / len(tokens)
        assert share[residual == 0].sum() == 0
        assert np.abs(share - residual).max() < 4.5 * np.sqrt(0.25 / len(tokens))


@pytest.mark.parametrize("parameter", LOOSER)
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), pair=st.tuples(st.integers(0, 5), st.integers(0, 5)), alone=st.booleans())
def test_a_looser_parameter_never_rejects_what_a_stricter_one_passes(parameter, seed, pair, alone):
    name, steps = LOOSER[parameter]
    strict, loose = sorted(pair)
    rest = ALONE.get(parameter, {}) if alone else {}
    for sampled in (False, True):
        if sampled and not RULES[name].sampled:
            continue
        evidence = state(seed, sampled)
        passed = [
            np.asarray(JUDGE(name, evidence, rule_params(B, **{parameter: steps[i]}, **rest)).passed)
            for i in (strict, loose)
        ]
        assert (passed[0] <= passed[1]).all()


@pytest.mark.parametrize("parameter", LOOSER)
def test_every_parameter_decides_and_is_per_row(parameter):
    name, steps = LOOSER[parameter]
    sampled = parameter == "threshold_acc"
    gained = np.zeros(B, int)
    for seed in range(20):
        evidence = state(seed, sampled)
        ends = [np.full(B, steps[i]) for i in (0, -1)]
        mixed = np.where(np.arange(B) % 2, ends[0], ends[1])
        rest = ALONE.get(parameter, {})
        strict, loose, either = (
            np.asarray(JUDGE(name, evidence, rule_params(B, **{parameter: values}, **rest)).passed)
            for values in (*ends, mixed)
        )
        assert (either == np.where(np.arange(B) % 2, strict, loose)).all()
        gained += loose - strict
    assert (gained[: B - sampled] > 0).all()  # the last row of a sampled state is greedy


@pytest.mark.parametrize("name", LOSSY_GREEDY)
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), scale=st.floats(0.01, 30))
def test_the_exact_limit_is_the_lossless_rule(name, seed, scale):
    for sampled in (False, True):
        if sampled and (not RULES[name].sampled or name == "threshold"):
            continue  # threshold's limit is lossless in distribution: test_rules_lossless.py
        evidence = state(seed, sampled, scale=scale)
        limit = JUDGE(name, evidence, rule_params(B, **EXACT[name]))
        lossless = JUDGE("sample_match" if sampled else "greedy_p_min", evidence, rule_params(B))
        assert np.asarray(limit.passed).tolist() == np.asarray(lossless.passed).tolist()
        assert np.asarray(limit.next_token).tolist() == np.asarray(lossless.next_token).tolist()


@pytest.mark.parametrize("name", LOSSY_GREEDY)
def test_the_argmax_passes_at_temperature_zero_whatever_the_parameters(name):
    """Also where the rule's own condition refuses it."""
    strictest = {field: steps[0] for field, (_, steps) in LOOSER.items()} | {
        "relaxed_top_k": 0,
        "threshold_single": 2.0,
    }
    evidence = state(3, False)
    evidence = dataclasses.replace(evidence, drafts=evidence.target.argmax[:, :K])
    assert (np.asarray(JUDGE(name, evidence, rule_params(B, **strictest)).passed) == evidence.proposed).all()


def test_typicals_own_condition_can_refuse_the_argmax():
    """Of a flat distribution exp(-H) = p, so that alpha = 2 asks for more than any token has."""
    flat = target_of(jnp.zeros((B, K + 1, V)).at[..., 5].set(1e-3))
    evidence = dataclasses.replace(state(0, False), target=flat, choice=flat.argmax, drafts=flat.argmax[:, :K])
    params = rule_params(B, typical_epsilon=1.0, typical_alpha=2.0)
    p = numpy_rules.softmax(flat.logits[0])
    assert numpy_rules.typical(p, [5], [-1], 1.0, 2.0) == 0
    assert (np.asarray(JUDGE("typical", evidence, params).passed) == evidence.proposed).all()


@pytest.mark.parametrize("name", LOSSY_GREEDY)
def test_nothing_passes_by_a_nan_or_with_probability_zero(name):
    loosest = {field: steps[-1] for field, (_, steps) in LOOSER.items()}
    loosest |= {"typical_epsilon": -1.0, "threshold_single": 0.0}
    evidence = state(4, False)
    other = (evidence.target.argmax[:, :K] + 1) % V
    for value in (-jnp.inf, jnp.nan):
        logits = jnp.asarray(evidence.target.logits).at[:, :K].set(value).at[:, :K, 0].set(1.0)
        if value == -jnp.inf:
            target = target_of(logits)
        else:
            target = target_of(jnp.asarray(evidence.target.logits).at[:, :, 3].set(jnp.nan))
            other = jnp.full((B, K), 4)
        given = dataclasses.replace(evidence, target=target, choice=target.argmax, drafts=jnp.maximum(other, 1))
        assert (np.asarray(JUDGE(name, given, rule_params(B, **loosest)).passed) == 0).all(), value


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_bits_do_not_depend_on_the_batch_or_the_number_of_drafts(name, kind):
    whole = state(5, kind == "sampled", rows=3, drafts=4, size=1000)
    whole = dataclasses.replace(whole, temperature=np.full(3, whole.temperature[0]))
    whole = dataclasses.replace(whole, proposed=jnp.asarray([1, 2, 4], jnp.int32))
    everything = JUDGE(name, whole, rule_params(3))
    for rows, drafts in ((1, 1), (1, 3), (2, 2), (3, 3)):
        part = JUDGE(name, _part(whole, rows, drafts), rule_params(rows))
        fits = np.asarray(whole.proposed[:rows]) <= drafts
        for field in ("passed", "next_token", "probability", "is_argmax"):
            ours, theirs = (np.asarray(getattr(x, field))[:rows] for x in (part, everything))
            if ours.ndim == 1:
                ours, theirs = ours[fits], theirs[fits]
            else:
                theirs = theirs[:, :drafts]
            assert models.same_bits(ours, theirs), (rows, drafts, field)


def _part(evidence, rows, drafts):
    def cut(path, x):
        if x.ndim == 1:
            return x[:rows]
        of_window = path[0].name in ("target", "choice", "p")
        return x[:rows, : drafts + of_window]

    return jax.tree_util.tree_map_with_path(cut, evidence)


@pytest.mark.parametrize("size", [16, 1000, 50257])
def test_a_sum_over_the_vocabulary_has_the_same_bits_in_every_batch(size):
    rng = np.random.default_rng(size)
    table = rng.standard_normal((12, size)).astype(np.float32)
    factor = rng.standard_normal(12).astype(np.float32)
    add = jax.jit(lambda table, factor: sum_over_vocabulary(lambda x, f: jnp.maximum(x * f - 0.3, 0.0), table, factor))
    exact = np.maximum(table.astype(np.float64) * factor[:, None] - 0.3, 0).sum(-1)
    alone = np.concatenate([np.asarray(add(table[i][None, None], factor[i][None, None])).reshape(1) for i in range(12)])
    np.testing.assert_allclose(alone, exact, rtol=2e-6)
    for shape in ((1, 1), (1, 2), (1, 5), (2, 1), (2, 3), (3, 4)):
        n = shape[0] * shape[1]
        found = add(table[:n].reshape(*shape, size), factor[:n].reshape(shape))
        assert models.same_bits(np.asarray(found).reshape(-1), alone[:n]), shape


def test_windows_share_no_numbers():
    """Neither overlapping windows, nor the places of one, nor purposes; far out, past the sign, neither."""
    seed = jnp.zeros(6, jnp.uint32)
    position = jnp.asarray([0, 1, 2, 3, 2**23 - 1, 2**23], jnp.int32)
    keys = [window_keys(seed, position, 0, 16, purpose) for purpose in (DRAFT, ACCEPT, RESIDUAL)]
    numbers = np.concatenate([np.asarray(jax.random.key_data(k)).reshape(-1, 2) for k in keys])
    assert len(np.unique(numbers, axis=0)) == len(numbers) == 6 * 16 * 3


@pytest.mark.parametrize("name", RULES)
def test_without_drafts_the_targets_choice_follows(name):
    evidence = state(8, not RULES[name].greedy, drafts=1)
    evidence = _part(dataclasses.replace(evidence, proposed=jnp.zeros(B, jnp.int32)), B, 0)
    found = JUDGE(name, evidence, rule_params(B))
    assert np.asarray(found.passed).tolist() == [0] * B
    assert np.asarray(found.next_token).tolist() == np.asarray(evidence.choice[:, 0]).tolist()


def test_a_rule_where_it_is_not_defined_is_refused():
    for name, rule in RULES.items():
        for sampled in (False, True):
            if not (rule.sampled if sampled else rule.greedy):
                with pytest.raises(ValueError, match=f"the acceptance rule {name} is not defined for"):
                    judge(name, state(0, sampled), rule_params(B))


def test_parameters_are_named_as_their_defaults_and_never_recompile():
    assert set(DEFAULTS) == {field.name for field in dataclasses.fields(RuleParams)}
    evidence = state(1, False)
    for name in LOSSY_GREEDY:
        JUDGE(name, evidence, rule_params(B))
        before = JUDGE._cache_size()
        for loose in (0, -1):
            JUDGE(name, evidence, rule_params(B, **{field: steps[loose] for field, (_, steps) in LOOSER.items()}))
        assert JUDGE._cache_size() == before


def test_the_librarys_parameters_are_those_of_the_tests():
    given = {"p_min": 0.25, "relaxed_top_k": [1, 2, 3], "typical_alpha": np.array([0.5, np.inf, 2.0])}
    for ours, theirs in zip(*(jax.tree.leaves(f(3, **given)) for f in (library_params, rule_params)), strict=True):
        assert models.same_bits(np.asarray(ours), np.asarray(theirs))
