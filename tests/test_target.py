"""What is read off the target's logits, against NumPy in float64, and its promise about a row's bits."""

import dataclasses

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
import synthetic

from sharpi_jax.decode.acceptance import Evidence, rule_params
from sharpi_jax.decode.controls import make_controls
from sharpi_jax.decode.decoder import Decoder
from sharpi_jax.decode.rules import judge
from sharpi_jax.decode.target import argmax, target_of

# Below a segment, around one, with common factors of 64 to 512 with it and without.
SIZES = (1, 2, 16, 63, 64, 511, 512, 513, 1000, 4160, 32000, 50257)
LARGE = (151_936, 248_320)


@pytest.mark.parametrize("size", SIZES)
def test_argmax_is_numpys_and_a_nan_counts_as_infinity(size):
    rng = np.random.default_rng(size)
    logits = rng.standard_normal((13, size)).astype(np.float32)
    logits[1] = 0.0
    logits[2] = np.where(rng.random(size) < 0.5, 0.0, -0.0)
    logits[3] = -np.inf
    logits[4, rng.integers(0, size, 3)] = np.inf
    logits[5, rng.integers(0, size, 3)] = np.nan
    logits[6, [size // 2, -1]] = np.nan, np.inf
    logits[7, :] = np.nan
    logits[8, [size // 3, size // 2, -1]] = 9.0
    logits[9, -1] = 9.0
    logits[10, 0] = 9.0
    logits[11] = np.round(logits[11])  # many ties
    logits[12, [0, -1]] = np.inf, np.nan
    found = np.asarray(jax.jit(argmax)(logits))
    assert found.tolist() == np.where(np.isnan(logits), np.inf, logits).argmax(-1).tolist()
    assert found.dtype == np.int32


@pytest.mark.parametrize("size", [16, 1000, 50257])
def test_probabilities_are_those_of_float64(size):
    rng = np.random.default_rng(size)
    logits = (4 * rng.standard_normal((2, 3, size))).astype(np.float32)
    ids = rng.integers(0, size, (2, 3)).astype(np.int32)
    exact = np.exp(logits.astype(np.float64))
    exact = np.take_along_axis(exact, ids[..., None], -1)[..., 0] / exact.sum(-1)
    found = jax.jit(lambda logits, ids: target_of(logits).probability(ids))(logits, ids)
    np.testing.assert_allclose(np.asarray(found), exact, rtol=3e-6)


@pytest.mark.parametrize("size", [512, 50257, *LARGE])
def test_a_rows_bits_do_not_depend_on_the_window_or_the_batch(size):
    rng = np.random.default_rng(size)
    table = (4 * rng.standard_normal((9, size))).astype(np.float32)
    table[:, 7] = 12.0
    ids = rng.integers(0, size, 9).astype(np.int32)

    @jax.jit
    def read(logits, ids):
        found = target_of(logits)
        return found.argmax, found.peak, found.log_sum, found.probability(ids)

    alone = [np.asarray(x)[0] for x in read(table[None], ids[None])]
    for shape in ((1, 1), (1, 2), (1, 4), (2, 2), (4, 2), (3, 3), (8, 1)):
        count = shape[0] * shape[1]
        found = read(table[:count].reshape(*shape, size), ids[:count].reshape(shape))
        for ours, reference in zip(found, alone, strict=True):
            assert models.same_bits(np.asarray(ours).reshape(-1), reference[:count]), shape


def test_without_the_sum_the_rule_is_that_of_p_min_one():
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((3, 4, 64)).astype(np.float32)
    drafts = np.where(rng.random((3, 3)) < 0.5, logits[:, :3].argmax(-1), 5).astype(np.int32)
    numbers = {"temperature": jnp.zeros(3), "seed": jnp.zeros(3, jnp.uint32), "position": jnp.zeros(3, jnp.int32)}
    numbers |= {"drafts": jnp.asarray(drafts), "proposed": jnp.full(3, 3, jnp.int32)}

    @jax.jit
    def rule(asked, p_min):
        target = target_of(jnp.asarray(logits), with_sum=asked)
        evidence = Evidence(target=target, choice=target.argmax, p=None, q=None, sampled=False, **numbers)
        return judge("greedy_p_min", evidence, rule_params(3, p_min=p_min))

    unasked, exact = rule(False, jnp.full(3, 1e-9)), rule(True, jnp.ones(3))
    assert np.asarray(unasked.passed).tolist() == np.asarray(exact.passed).tolist()
    assert (np.asarray(rule(True, jnp.full(3, 1e-9)).passed) == 3).all()
    assert np.isnan(unasked.probability).all()
    assert np.isfinite(exact.probability).all()


@pytest.mark.parametrize(
    ("p_min", "traced", "wanted"),
    [
        *((p, False, False) for p in (1.0, 0.0, -1.0, np.nan)),
        *((p, False, True) for p in (0.7, 0.1)),
        (1.0, True, True),
    ],
)
def test_probabilities_are_worked_out_where_they_decide_or_are_shown(p_min, traced, wanted):
    assert bool(make_controls([1.0, p_min], [], traced=traced).wants_probabilities) == wanted


def test_in_the_loop_ids_and_counts_are_the_same_with_and_without_probabilities():
    decoder = models.decoder("qwen35-tiny-f32")
    prompt = models.reference("qwen35-tiny")["prompt"].tolist()
    states = []
    for traced in (False, True):
        controls = make_controls([1.0], [], traced=traced)
        state = decoder.prefill([prompt], [40], 128, controls, K=3)
        states.append(jax.device_get(decoder.advance(state, controls, 10**6)))
    assert np.isnan(states[0].last.probability).all()
    assert np.isfinite(states[1].last.probability).all()
    assert states[0].tokens.tolist() == states[1].tokens.tolist()
    assert states[0].counters.accepted_per_position.tolist() == states[1].counters.accepted_per_position.tolist()


def test_probabilities_in_the_loop_have_the_same_bits_in_every_window_and_batch():
    """Over a vocabulary of a real size: a row's sum is compared with p_min."""
    cfg = dataclasses.replace(
        synthetic.REAL_LAYERS, width=64, vocab_size=LARGE[0], ffn_width=64, heads=2, key_heads=1, head_dim=32
    )
    cfg = dataclasses.replace(cfg, rope_dims=16, delta_heads=2, delta_key_heads=2, delta_head_dim=32)
    decoder = Decoder(synthetic.random_model(cfg), cfg)
    seen: dict[tuple[int, int, int], set[bytes]] = {}
    prompts = [[5, 6, 7], [90_000, 3], [8]]
    for rows, K in ((1, 1), (1, 2), (1, 5), (3, 1), (3, 3)):
        controls = make_controls([1.0] * rows, [])
        state = decoder.prefill(prompts[:rows], [12] * rows, 128, controls, K=K)
        while bool(state.active.any()):
            state = decoder.advance(state, controls, int(state.emitted[state.active].min()) + 1)
            last = jax.device_get(state.last)
            for row in range(rows):
                if last.proposed[row]:  # the first draft: its window's prefix is the row's own output in every run
                    where = (row, int(last.position[row]), int(last.drafts[row, 0]))
                    seen.setdefault(where, set()).add(last.probability[row, 0].tobytes())
    shared = [bits for (row, *_), bits in seen.items() if row == 0]
    assert len(shared) >= 8
    assert all(len(bits) == 1 for bits in seen.values())
