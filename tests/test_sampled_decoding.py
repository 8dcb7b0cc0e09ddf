"""Sampling in the loop: with a seed the tokens are those of decoding without drafts, and nothing is ignored."""

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from reference.numpy_sampling import probabilities

from sharpi_jax.decode.controls import make_controls, method_of
from sharpi_jax.decode.options import DecodeOptions
from sharpi_jax.errors import OptionError

NAME = "qwen35-tiny-f32"
PROMPT = models.reference("qwen35-tiny")["prompt"].tolist()
SEEDS = 50
SHAPED = {"top_k": 40, "top_p": 0.9, "min_p": 0.02, "repeat_penalty": 1.2, "logit_bias": ((258, -2.0), (13, 1.5))}


def generate(name=NAME, prompt=PROMPT, **options):
    return models.model(name).generate(prompt, DecodeOptions(**{"max_tokens": 24} | options))


def rows_of_seeds(K, seeds, **options):
    """One row for each seed; its output ids."""
    decoder, options = models.decoder(NAME), DecodeOptions(temperature=0.8, **options)
    controls = make_controls([1.0] * len(seeds), [], options=options, method=method_of(options, drafting=K > 0))
    controls = controls.replace(sampling=controls.sampling.replace(seed=jnp.asarray(seeds, jnp.uint32)))
    state = decoder.prefill([PROMPT] * len(seeds), [24] * len(seeds), 128, controls, K=K)
    state = jax.device_get(decoder.advance(state, controls, 24))
    accepted = int(state.counters.accepted_per_position.sum())
    return state.tokens[:, len(PROMPT) : len(PROMPT) + 24].tolist(), accepted


# --- exact ------------------------------------------------------------------------------------------------------------


def test_with_a_seed_the_tokens_are_those_without_drafts():
    """At temperature 0.8, seeds 0 to 49 and each K; and a row of a batch is that row alone."""
    plain, _ = rows_of_seeds(0, range(SEEDS))
    assert len({tuple(ids) for ids in plain}) > SEEDS // 2
    for K in (1, 2, 3, 4):
        drafted, accepted = rows_of_seeds(K, range(SEEDS))
        assert drafted == plain
        assert accepted > SEEDS  # there were drafts to tell apart
    for seed in (0, 17):
        assert list(generate(temperature=0.8, seed=seed, ignore_eos=False).output_ids) == plain[seed]


@pytest.mark.parametrize("name", ["qwen35-tiny-q4_0", "qwen35moe-tiny-f32"])
def test_all_that_shapes_the_distribution_keeps_it_exact(name):
    """Filters, penalties, biases, log-probabilities and an early end of drafting, all at once."""
    runs = [
        generate(name, temperature=0.9, seed=seed, logprobs=4, spec_type=spec, **SHAPED, **drafts)
        for seed in (1, 2)
        for spec, drafts in (("none", {}), ("mtp", {}), ("mtp", {"spec_draft_stop_p": 0.3, "spec_draft_n_max": 5}))
    ]
    for plain, *drafted in (runs[:3], runs[3:]):
        for found in drafted:
            assert found.output_ids == plain.output_ids
            assert found.logprobs == plain.logprobs
            assert found.stats.drafted > 0
    assert runs[0].output_ids != runs[3].output_ids


@pytest.mark.parametrize("K", [1, 3])
def test_penalties_see_the_window_before_a_position(K):
    """Greedily, where nothing but the penalty decides: as without drafts, and otherwise than without a penalty."""
    options = {"repeat_penalty": 6.0, "repeat_last_n": -1, "max_tokens": 48}
    plain, drafted = generate(spec_type="none", **options), generate(spec_draft_n_max=K, **options)
    assert drafted.output_ids == plain.output_ids
    assert drafted.stats.accepted > 3
    assert generate(max_tokens=48).output_ids != plain.output_ids


def test_a_bias_is_added_once():
    """To the second likeliest token: three quarters of what it lacks change nothing, five quarters do."""
    logits = models.model(NAME).score(PROMPT).logits[-1]
    first, second = np.argsort(-logits)[:2].tolist()
    lacks = float(logits[first] - logits[second])
    chosen = [generate(max_tokens=1, logit_bias=((second, share * lacks),)).output_ids for share in (0.75, 1.25)]
    assert chosen == [(first,), (second,)]


def test_draws_follow_the_distribution_of_the_models_logits():
    """The first token of 2,000 seeds against float64 probabilities of what `score` says."""
    options = {"temperature": 1.3, "top_k": 12, "top_p": 0.95, "min_p": 0.01}
    logits = models.model(NAME).score(PROMPT).logits[-1].astype(np.float64)
    expected, _ = probabilities(logits, logits.argmax(), **options)
    decoder = models.decoder(NAME)
    chosen = DecodeOptions(**options)
    counts = np.zeros(len(expected))
    for first in range(0, 2000, 50):
        controls = make_controls([1.0] * 50, [], options=chosen, method=method_of(chosen, drafting=False))
        seeds = jnp.arange(first, first + 50, dtype=jnp.uint32)
        controls = controls.replace(sampling=controls.sampling.replace(seed=seeds))
        state = decoder.prefill([PROMPT] * 50, [1] * 50, 128, controls, K=0)
        counts += np.bincount(np.asarray(state.next_token), minlength=len(expected))
    assert counts[expected == 0].sum() == 0
    seen = expected > 0
    chi = ((counts[seen] - 2000 * expected[seen]) ** 2 / (2000 * expected[seen])).sum()
    assert chi < seen.sum() + 5 * np.sqrt(2 * seen.sum())


# --- other rules ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["rejection", "block", "threshold", "typical"])
def test_rules_that_draw_run_in_the_loop(rule):
    """A seed gives the same tokens again, in a batch too; another seed gives others."""
    found = generate(temperature=0.8, seed=5, accept_rule=rule)
    again = generate(temperature=0.8, seed=5, accept_rule=rule)
    assert found.output_ids == again.output_ids
    assert found.stats.accepted > 0
    assert generate(temperature=0.8, seed=6, accept_rule=rule).output_ids != found.output_ids
    rows, _ = rows_of_seeds(3, [5, 9, 6], accept_rule=rule)
    assert rows[0] == list(found.output_ids)


@pytest.mark.parametrize(
    ("rule", "exact"),
    [
        ("typical", {"typical_epsilon": 1.0, "typical_alpha": 1e9}),
        ("relaxed", {"relaxed_top_k": 1}),
        ("threshold", {}),
        ("sample_match", {}),
    ],
)
def test_at_temperature_0_the_exact_limit_is_greedy(rule, exact):
    greedy = generate(max_tokens=40)
    found = generate(max_tokens=40, accept_rule=rule, **exact)
    assert found.output_ids == greedy.output_ids
    assert found.stats == greedy.stats


def test_a_shortlist_leaves_rejection_its_distribution():
    """Drafts come from a few tokens alone; what they leave out comes from the correction."""
    options = DecodeOptions(temperature=1.0, accept_rule="rejection", max_tokens=3)
    decoder = models.decoder(NAME)
    shortlist = np.array([258, 258 + 50, 300, 302, 302], np.int32)
    drafter = decoder.drafter(shortlist)
    counts, plain = (np.zeros(512) for _ in range(2))
    for first in range(0, 500, 100):
        for K, into in ((2, counts), (0, plain)):
            method = method_of(options, drafting=K > 0)
            controls = make_controls([1.0] * 100, [], options=options, method=method)
            seeds = jnp.arange(first, first + 100, dtype=jnp.uint32)
            controls = controls.replace(sampling=controls.sampling.replace(seed=seeds))
            state = decoder.prefill([PROMPT] * 100, [3] * 100, 128, controls, K=K)
            state = jax.device_get(decoder.advance(state, controls, 3, drafter))
            into += np.bincount(state.tokens[:, len(PROMPT) + 2], minlength=512)
    both = counts + plain
    cells = both >= 10
    chi = ((counts - plain)[cells] ** 2 / both[cells]).sum()
    assert chi < cells.sum() + 5 * np.sqrt(2 * cells.sum())


# --- log-probabilities ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "seed": 3, "logit_bias": ((13, 2.0),)}])
def test_log_probabilities_are_the_models_own(options):
    """Those of its logits before biases and temperature, for every token and the likeliest ones, in float64."""
    found = generate(logprobs=5, **options)
    ids = [*PROMPT, *found.output_ids]
    logits = models.model(NAME).score(ids).logits[len(PROMPT) - 1 : -1].astype(np.float64)
    expected = logits - logits.max(-1, keepdims=True)
    expected -= np.log(np.exp(expected).sum(-1, keepdims=True))
    assert [entry.token for entry in found.logprobs] == list(found.output_ids)
    for entry, row in zip(found.logprobs, expected, strict=True):
        assert entry.logprob == pytest.approx(row[entry.token], abs=2e-4)
        assert [i for i, _ in entry.top] == np.argsort(-row)[:5].tolist()
        assert [value for _, value in entry.top] == pytest.approx(np.sort(row)[::-1][:5].tolist(), abs=2e-4)
    assert generate(logprobs=5, spec_type="none", **options).logprobs == found.logprobs
    assert generate(logprobs=0, **options).logprobs[0].top == ()
    assert generate(**options).logprobs == ()


# --- ends and constraints ---------------------------------------------------------------------------------------------


def test_no_stop_token_before_min_tokens(monkeypatch):
    """A stop token that would come early is held back, at any K; from then on it ends the text."""
    model = models.model(NAME)
    greedy = generate(max_tokens=40).output_ids
    stop = greedy[3]
    monkeypatch.setattr(model.tokenizer, "stop_ids", (stop,))
    assert generate(max_tokens=40).output_ids == greedy[: greedy.index(stop)]
    first = greedy.index(stop)  # as many tokens are out before it
    assert generate(max_tokens=40, min_tokens=first).output_ids == greedy[:first]
    assert len(generate(max_tokens=40, min_tokens=first + 1).output_ids) > first
    for least in (5, 12):
        runs = [generate(max_tokens=40, min_tokens=least, spec_type=s) for s in ("none", "mtp")]
        assert runs[0].output_ids == runs[1].output_ids
        assert len(runs[0].output_ids) >= least
        assert stop not in runs[0].output_ids
    assert len(generate(max_tokens=9, min_tokens=30).output_ids) == 9


def test_no_stop_string_before_min_tokens():
    whole = generate(max_tokens=40)
    text = models.model(NAME).tokenizer.decode(whole.output_ids[:3])
    stop, pieces = text[-2:], []
    model = models.model(NAME)
    early = model.generate(PROMPT, DecodeOptions(max_tokens=40), stop=[stop])
    assert len(early.output_ids) <= 3
    later = model.generate(PROMPT, DecodeOptions(max_tokens=40, min_tokens=6), stop=[stop], on_text=pieces.append)
    assert len(later.output_ids) >= 6
    assert "".join(pieces) == later.text
    assert whole.text.startswith(later.text)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "seed": 4}])
def test_thinking_ends_where_its_budget_does(options):
    """The opening token stands in the prompt, or comes in the text; the closing one is forced, at any K alike."""
    opening, closing = (models.model(NAME).tokenizer.encode(text)[0] for text in ("<think>", "</think>"))
    for prompt in ([*PROMPT, opening], [*PROMPT[:5], opening, closing, *PROMPT[5:], opening]):
        for most in (0, 1, 5, 9):
            runs = [
                generate(prompt=prompt, max_thinking_tokens=most, spec_type=spec, **options) for spec in ("none", "mtp")
            ]
            ids = runs[0].output_ids
            assert runs[1].output_ids == ids
            assert ids.index(closing) <= most
            assert ids.count(closing) == 1
    free = generate(prompt=[*PROMPT, opening, closing], max_thinking_tokens=0, **options)
    assert free.output_ids == generate(prompt=[*PROMPT, opening, closing], **options).output_ids
    biased = ((opening, 100.0),)  # opens again wherever it may
    again = generate(max_thinking_tokens=2, logit_bias=biased, max_tokens=9, **options)
    assert again.output_ids == (opening, opening, opening, closing) * 2 + (opening,)


def test_thinking_tokens_that_are_not_there_are_said():
    with pytest.raises(OptionError, match="has none; leave it out"):
        models.demo().generate("In", DecodeOptions(max_thinking_tokens=3))


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"temperature": 0.5, "spec_draft_p_min": 0.3}, "spec_draft_p_min below 1 is a rule for greedy decoding"),
        ({"temperature": 0.5, "accept_rule": "relaxed"}, "relaxed is defined for greedy decoding alone"),
        ({"temperature": 0.5, "accept_rule": "greedy_p_min"}, "greedy_p_min is defined for greedy decoding alone"),
        ({"accept_rule": "rejection"}, "rejection draws tokens, which takes a temperature above 0"),
        ({"accept_rule": "typical", "spec_draft_p_min": 0.3}, "spec_draft_p_min has no meaning under accept_rule"),
        ({"accept_rule": "medusa"}, "accept_rule must be one of auto, greedy_p_min"),
        ({"temperature": float("nan")}, "temperature must be a number of at least 0, not nan"),
        ({"temperature": -1}, "temperature must be a number of at least 0, not -1"),
        ({"top_k": 2.5}, "top_k must be an integer"),
        ({"top_p": 1.5}, "top_p must be a number from 0 to 1"),
        ({"seed": 2**32}, "seed must be an integer"),
        ({"repeat_penalty": 0}, "repeat_penalty must be a number above 0"),
        ({"logit_bias": ((3, float("inf")),)}, "logit_bias must be pairs"),
        ({"logit_bias": ((512, 1.0),)}, "logit_bias: token id 512 is outside the vocabulary of 512"),
        ({"spec_draft_n_min": 4}, "spec_draft_n_min is 4, more than the 3 drafts"),
        ({"logprobs": 101}, "logprobs must be 0 to 100"),
        ({"threshold_acc": 0}, "threshold_acc must be a number above 0"),
    ],
)
def test_refused_in_a_sentence(options, says):
    with pytest.raises(OptionError, match=says):
        generate(**options)
