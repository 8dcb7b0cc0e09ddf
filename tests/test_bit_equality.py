"""The promise of p_min = 1: ids and every committed cache position have the bits of decoding without drafts."""

import dataclasses

import jax
import models
import numpy as np
import pytest
import synthetic
from scripted import ScriptedDrafter

from sharpi_jax.decode.controls import make_controls
from sharpi_jax.decode.decoder import Decoder

ROWS, SLOTS, PROMPTS, LONGEST = 8, 128, 200, 40
MODEL = "qwen35-tiny-f32"


def random_prompts(seed: int, count: int = PROMPTS) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 470, rng.integers(1, LONGEST)).tolist() for _ in range(count)]


def run(decoder, prompts, budgets, K, drafter=None, p_min=1.0):
    controls = make_controls([p_min] * len(prompts), [])
    state = decoder.prefill(prompts, budgets, SLOTS, controls, K=K)
    return decoder.advance(state, controls, SLOTS, drafter)


def script(plain, rng, K):
    """Forces a random accepted count in every step, 0 and K included."""
    truth = np.asarray(plain.tokens)
    return ScriptedDrafter(truth, rng.integers(0, K + 1, truth.shape, np.int32), (truth + 1) % 470)


def assert_same(plain, drafted, rows=ROWS):
    plain, drafted = jax.device_get((plain, drafted))
    for row in range(rows):
        length = plain.length[row]
        assert drafted.length[row] == length
        assert models.same_bits(drafted.tokens[row, :length], plain.tokens[row, :length])
        assert drafted.next_token[row] == plain.next_token[row]
        for a, b in zip(models.committed(plain, row), models.committed(drafted, row), strict=True):
            assert models.same_bits(a, b)


@pytest.fixture(scope="module")
def plain_runs():
    """Plain decoding of 200 random prompts of 1 to 39 tokens, 1 to 40 tokens each, in batches of 8 rows."""
    rng = np.random.default_rng(1)
    prompts = random_prompts(0)
    runs = []
    for first in range(0, PROMPTS, ROWS):
        batch = prompts[first : first + ROWS]
        budgets = rng.integers(1, 41, ROWS).tolist()
        runs.append((batch, budgets, run(models.decoder(MODEL), batch, budgets, 0)))
    return runs


@pytest.mark.parametrize("K", range(1, 9))
def test_scripted_counts_leave_the_bits_of_plain_decoding(plain_runs, K):
    rng = np.random.default_rng(K)
    counts = np.zeros(K + 1, int)
    for prompts, budgets, plain in plain_runs:
        drafted = run(models.decoder(MODEL), prompts, budgets, K, script(plain, rng, K))
        assert_same(plain, drafted)
        per_position = np.asarray(drafted.counters.accepted_per_position).sum(0)
        full = np.concatenate([[int(np.asarray(drafted.counters.steps).sum())], per_position])
        counts += full - np.append(per_position, 0)
    assert (counts > 0).all(), f"steps by accepted count: {counts}"


@pytest.mark.parametrize("K", range(1, 9))
def test_mtp_drafts_leave_the_bits_of_plain_decoding(plain_runs, K):
    for prompts, budgets, plain in plain_runs:
        assert_same(plain, run(models.decoder(MODEL), prompts, budgets, K))


@pytest.mark.parametrize(
    ("name", "dtype", "cache_dtype"),
    [
        ("qwen35-tiny-bf16", "float32", "float32"),
        ("qwen35-tiny-q4_0", "float32", "float32"),
        ("qwen35-tiny256-q8_0", "float32", "float16"),
        ("qwen35-tiny256-f32", "bfloat16", "bfloat16"),
        ("qwen35moe-tiny-f32", "bfloat16", "bfloat16"),
    ],
)
def test_every_format_and_type_keeps_the_bits(name, dtype, cache_dtype):
    read = models.read(name)
    decoder = Decoder(read.params, dataclasses.replace(read.config, dtype=dtype, cache_dtype=cache_dtype))
    rng = np.random.default_rng(5)
    prompts = random_prompts(6, 16)
    for first in (0, ROWS):
        batch, budgets = prompts[first : first + ROWS], [24] * ROWS
        plain = run(decoder, batch, budgets, 0)
        for K in (1, 4):
            assert_same(plain, run(decoder, batch, budgets, K, script(plain, rng, K)))
            assert_same(plain, run(decoder, batch, budgets, K))


def test_layers_of_a_real_model_keep_the_bits():
    """The layer shapes of Qwen3.5-0.8B: XLA chooses its kernels by size."""
    cfg = synthetic.REAL_LAYERS
    decoder = Decoder(synthetic.random_model(cfg), cfg)
    rng = np.random.default_rng(7)
    for rows in (1, 3):
        batch, budgets = random_prompts(8, rows), [20] * rows
        plain = run(decoder, batch, budgets, 0)
        for K in (1, 3, 8):
            assert_same(plain, run(decoder, batch, budgets, K, script(plain, rng, K)), rows)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("K", [1, 3])
def test_a_mixture_of_experts_keeps_the_bits(K, ties):
    """With `ties` every second expert has its neighbour's router row, so that choices are between equals."""
    decoder = models.decoder("qwen35moe-tiny-f32")
    if ties:
        decoder = Decoder(with_ties(decoder.params), decoder.cfg, decoder.programs)
    prompts, rng = random_prompts(10, ROWS), np.random.default_rng(11)
    budgets = rng.integers(10, 41, ROWS).tolist()
    plain = run(decoder, prompts, budgets, 0)
    assert_same(plain, run(decoder, prompts, budgets, K))
    assert_same(plain, run(decoder, prompts, budgets, K, script(plain, rng, K)))


def with_ties(params):
    def tie(layer):
        router = layer.ffn.router
        blocks = router.blocks.at[1::2].set(router.blocks[::2])
        return layer.replace(ffn=layer.ffn.replace(router=router.replace(blocks=blocks)))

    mtp = params.mtp.replace(layer=tie(params.mtp.layer))
    return params.replace(layers=tuple(map(tie, params.layers)), mtp=mtp)


@pytest.mark.parametrize("K", [0, 3])
def test_a_row_in_a_batch_has_the_bits_of_that_row_alone(K):
    decoder = models.decoder(MODEL)
    rng = np.random.default_rng(9)
    prompts = [rng.integers(0, 470, rng.integers(17, 60)).tolist() for _ in range(8)]
    alone = [run(decoder, [p], [20], K) for p in prompts]
    for rows in (2, 3, 5, 8):
        together = jax.device_get(run(decoder, prompts[:rows], [20] * rows, K))
        for row in range(rows):
            single = jax.device_get(alone[row])
            assert models.same_bits(single.tokens[0], together.tokens[row])
            assert single.counters.steps[0] == together.counters.steps[row]
            for a, b in zip(models.committed(single, 0), models.committed(together, row), strict=True):
                assert models.same_bits(a, b)
