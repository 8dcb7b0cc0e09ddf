"""Tokens and counts against llama.cpp's, and the lossy rule against the plain NumPy decoder."""

import json

import models
import numpy as np
import pytest
from reference import numpy_model
from reference.numpy_decode import decode as plain_decode
from reference.numpy_decode import simulate_from_drafts

import sharpi_jax
from sharpi_jax.decode.options import DecodeOptions

# ORACLE figures: llama-server's accepted / drafted at n_predict 64, which are ours at max_tokens 63.
LLAMA_COUNTS = {
    "qwen35-tiny": {1: (28, 34), 2: (36, 54), 3: (38, 74)},
    "qwen35-tiny256": {1: (27, 35), 2: (35, 53), 3: (38, 70)},
    "qwen35moe-tiny": {1: (27, 36), 2: (34, 58), 3: (38, 75)},
    "qwen35moe-tiny256": {1: (30, 32), 2: (36, 53), 3: (40, 65)},
}


def generate(name, prompt, *, K, max_tokens, **options):
    spec = {"spec_type": "none"} if K == 0 else {"spec_draft_n_max": K}
    return models.model(name).generate(list(prompt), DecodeOptions(max_tokens=max_tokens, **spec, **options))


@pytest.mark.parametrize("K", [0, 1, 2, 3, 5, 8])
def test_greedy_tokens_are_llama_cpps(K):
    reference = models.reference("qwen35-tiny")
    found = generate("qwen35-tiny-f32", reference["prompt"], K=K, max_tokens=64)
    assert list(found.output_ids) == reference["greedy"].tolist()
    assert found.finish_reason == "length"
    assert found.drafting == (K > 0)


@pytest.mark.parametrize("name", LLAMA_COUNTS)
@pytest.mark.parametrize("K", [1, 2, 3])
def test_counts_at_63_tokens_are_llama_servers(name, K):
    reference = models.reference(name)
    found = generate(f"{name}-f32", reference["prompt"], K=K, max_tokens=63)
    assert list(found.output_ids) == reference["greedy"][:63].tolist()
    assert (found.stats.accepted, found.stats.drafted) == LLAMA_COUNTS[name][K]
    spec = json.loads((models.DATA / f"{name}.spec.json").read_text())["spec_f32kv"][f"n{K}"]
    assert (found.stats.accepted, found.stats.drafted) == (spec["draft_n_accepted"], spec["draft_n"])


@pytest.mark.parametrize("max_tokens", [1, 2, 7, 40, 64])
@pytest.mark.parametrize("K", [1, 2, 3])
def test_counts_are_those_of_the_rule_on_the_reference_drafts(K, max_tokens):
    reference = models.reference("qwen35-tiny")
    found = generate("qwen35-tiny-f32", reference["prompt"], K=K, max_tokens=max_tokens)
    tokens, drafts = reference["tokens"], reference["draft_ids"]
    expected = simulate_from_drafts(tokens, len(reference["prompt"]), drafts, K, max_tokens)
    assert (found.stats.drafted, found.stats.accepted) == expected


@pytest.mark.parametrize("K", [1, 2, 3])
@pytest.mark.parametrize("name", models.quantised(*LLAMA_COUNTS))
def test_quantised_files_give_what_exact_arithmetic_gives(name, K):
    """The tokens, and the counts that the rule has on the reference's drafts."""
    reference = models.reference(name)
    tokens, P = reference["dequant_tokens"], len(reference["prompt"])
    found = generate(name, reference["prompt"], K=K, max_tokens=len(tokens) - P)
    assert list(found.output_ids) == tokens[P:].tolist()
    expected = simulate_from_drafts(tokens, P, reference["dequant_draft_ids"], K, len(tokens) - P)
    assert (found.stats.drafted, found.stats.accepted) == expected


@pytest.mark.parametrize("name", ["qwen35-tiny-f16", "qwen35-tiny-bf16"])
def test_half_precision_files_give_llama_cpps_tokens(name):
    reference = models.reference(name)
    expected = reference["llama_tokens"][len(reference["prompt"]) :]
    found = generate(name, reference["prompt"], K=3, max_tokens=len(expected))
    assert list(found.output_ids) == expected.tolist()


# Values at which no draft's probability lies near the threshold, so that float32 and float64 must decide alike.
@pytest.mark.parametrize(("name", "p_min"), [("qwen35-tiny", 0.05), ("qwen35-tiny256", 0.05), ("qwen35-tiny256", 0.02)])
@pytest.mark.parametrize("K", [1, 3])
def test_lossy_runs_equal_the_plain_decoder_step_by_step(name, p_min, K):
    prompt = models.reference(name)["prompt"].tolist()
    expected = plain_decode(numpy_model.load(models.fixture(f"{name}-f32")), prompt, max_tokens=63, K=K, p_min=p_min)
    options = DecodeOptions(max_tokens=63, spec_draft_n_max=K, spec_draft_p_min=p_min)
    found = models.model(f"{name}-f32").generate(prompt, options, trace=True)
    assert list(found.output_ids) == list(expected.tokens)
    assert found.stats.accepted_p_min == expected.accepted_p_min > 0
    assert found.stats.steps == len(expected.steps)
    for count in ("drafted", "accepted", "accepted_argmax"):
        assert getattr(found.stats, count) == getattr(expected, count)
    assert list(found.stats.drafted_per_position) == list(expected.drafted_per_position)
    assert list(found.stats.accepted_per_position) == list(expected.accepted_per_position)
    for ours, theirs in zip(found.steps, expected.steps, strict=True):
        assert list(ours.drafts) == list(theirs.drafts)
        assert (ours.accepted, ours.next_token) == (theirs.accepted, theirs.next_token)
        np.testing.assert_allclose(ours.probabilities, theirs.probs, rtol=1e-4, atol=1e-6)


def test_a_low_p_min_accepts_what_p_min_one_rejects():
    prompt = models.reference("qwen35-tiny")["prompt"].tolist()
    model = models.model("qwen35-tiny-f32")
    exact, lossy = (
        model.generate(prompt, DecodeOptions(max_tokens=40, spec_draft_p_min=p), trace=True) for p in (1.0, 0.05)
    )
    same = next(i for i, (a, b) in enumerate(zip(exact.steps, lossy.steps, strict=False)) if a.accepted != b.accepted)
    a, b = exact.steps[same], lossy.steps[same]
    assert (a.position, a.token, a.drafts) == (b.position, b.token, b.drafts)
    rejected = a.accepted
    assert b.accepted > rejected
    assert 0.05 <= b.probabilities[rejected] < 1
    assert not b.argmax[rejected]
    assert exact.output_ids != lossy.output_ids


def test_the_trunk_only_file_runs_without_mtp_and_refuses_to_draft():
    reference = models.reference("qwen35-tiny-f16")
    model = models.model("qwen35-tiny-nomtp-f16")
    found = model.generate(reference["prompt"].tolist(), DecodeOptions(max_tokens=64))
    assert list(found.output_ids) == reference["dequant_tokens"][len(reference["prompt"]) :].tolist()
    assert not found.drafting
    assert not model.has_mtp
    with pytest.raises(sharpi_jax.OptionError, match="no MTP head"):
        model.generate([1, 2], DecodeOptions(spec_type="mtp"))


def test_temperature_zero_is_the_same_three_times():
    """Field case 17."""
    prompt = models.reference("qwen35-tiny")["prompt"]
    for K in (0, 1, 3):
        runs = [generate("qwen35-tiny-f32", prompt, K=K, max_tokens=40) for _ in range(3)]
        assert len({(run.output_ids, run.stats) for run in runs}) == 1


def test_lengths_of_prompt_cause_a_bounded_number_of_compilations():
    """Field case 21, counted by JAX itself; p_min and the seed of the lengths change nothing."""
    import jax.monitoring

    compiled = []

    def listen(event, duration, **kwargs):
        if event.endswith("backend_compile_duration"):
            compiled.append(kwargs.get("fun_name", event))

    model = sharpi_jax.load(models.fixture("qwen35-tiny-f32"))
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        rng = np.random.default_rng(0)
        lengths = [1, 2, 3, 15, 16, 17, 63, 64, 65, 255, 256, 257, 300, *rng.integers(1, 320, 7).tolist()]
        for length in lengths:
            p_min = float(rng.uniform(0.01, 1))
            options = DecodeOptions(max_tokens=8, ctx_size=512, spec_draft_p_min=p_min)
            assert len(model.generate(rng.integers(0, 470, length).tolist(), options).output_ids) <= 8
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    # Empty caches, trunk and MTP in three chunk widths each, the loop's first state, the loop.
    assert model.decoder.programs.count == 9
    assert len(compiled) <= 9 + 8, compiled  # and a handful of JAX's own small ones (transfers of scalars)
