"""The tools that made the demo model: the loss is differentiable, and what is exported is what is read back."""

import dataclasses

import gguf
import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from models import is_weight
from reference import numpy_model
from reference.numpy_evaluate import chained_drafts

from sharpi_jax import checkpoint
from sharpi_jax.decode.decoder import Decoder
from sharpi_jax.decode.score import score
from sharpi_jax.evaluate import DEPTHS
from sharpi_jax.model.rope import rope_table
from sharpi_jax.quant import dequantise
from tools.demo_model import export, loss, measures, refine, train, vocabulary
from tools.demo_model.model import CONFIG, init_trainable, to_params

TEXT = "The king said to his servants, Go, and tell my people what you have seen.\n" * 40
WORDS = vocabulary.train_vocabulary([TEXT, " ".join(map(str, range(500)))], 300)
TINY = dataclasses.replace(
    CONFIG,
    width=64,
    ffn_width=96,
    vocab_size=300,
    head_dim=32,
    rope_dims=16,
    delta_head_dim=16,
    delta_heads=4,
    delta_key_heads=2,
    norm_eps=float(np.float32(1e-6)),  # as a GGUF holds it
)


@pytest.fixture(scope="module")
def trainable():
    return init_trainable(TINY, jax.random.key(1))


@pytest.mark.parametrize("part", ["trunk", "head"])
def test_the_gradient_is_the_slope_of_the_loss(trainable, part):
    """Along the gradient, through the chunked delta rule (trunk) and the chained depths (head).

    The trunk's distributions are the head's targets and are not differentiated through, so where the trunk moves it is
    the trunk's own loss that is compared, and where only the head moves the whole.
    """
    text = jax.random.randint(jax.random.key(2), (2, 129), 0, TINY.vocab_size)
    rope = rope_table(128, TINY.rope_dims, TINY.rope_base)

    @jax.jit
    def value(tree):
        total, parts = loss.losses(to_params(tree), TINY, text, rope)
        return parts["trunk"] if part == "trunk" else total

    gradient = jax.jit(jax.grad(value))(trainable)
    if part == "head":
        gradient = jax.tree.map(jnp.zeros_like, trainable).replace(mtp=gradient.mtp)
    slope = jnp.sqrt(sum(jnp.vdot(a, a) for a in jax.tree.leaves(gradient)))

    def at(step):
        return float(value(jax.tree.map(lambda a, g: a + step * g / slope, trainable, gradient)))

    assert (at(3e-4) - at(-3e-4)) / 6e-4 == pytest.approx(float(slope), rel=0.02)  # further off, the loss curves


def test_every_weight_has_a_gradient(trainable):
    text = jax.random.randint(jax.random.key(4), (2, 65), 0, TINY.vocab_size)
    rope = rope_table(64, TINY.rope_dims, TINY.rope_base)
    gradient = jax.jit(jax.grad(lambda tree: loss.losses(to_params(tree), TINY, text, rope)[0]))(trainable)
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
        assert np.isfinite(leaf).all(), path
        assert not leaf.size or np.abs(leaf).max() > 0, path


def test_unlikelihood_is_minus_log_of_what_is_left(trainable):
    """By the NumPy formula on the trunk's logits, over the unwanted tokens alone; and its gradient makes them rarer."""
    params, rope = to_params(trainable), rope_table(64, TINY.rope_dims, TINY.rope_base)
    text = jax.random.randint(jax.random.key(5), (2, 65), 0, TINY.vocab_size)
    unwanted = np.zeros((2, 64), bool)
    unwanted[0, 10], unwanted[1, 20:30] = True, True
    logits = np.asarray(loss.forward(params, TINY, text[:, :-1], rope)[0], np.float64)
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p = np.take_along_axis(p / p.sum(-1, keepdims=True), np.asarray(text)[:, 1:, None], -1)[..., 0]

    def value(tree):
        return loss.unlikelihood(to_params(tree), TINY, text, jnp.asarray(unwanted), rope)

    slope = jax.jit(jax.value_and_grad(value))
    found, gradient = slope(trainable)
    assert float(found) == pytest.approx(-np.log(1 - p[unwanted]).sum() / 128, rel=1e-4)
    assert float(slope(jax.tree.map(lambda a, g: a - 0.1 * g, trainable, gradient))[0]) < float(found)


@pytest.mark.parametrize("steps", [2, 50, 200, 1000, 2000])
def test_the_rate_rises_to_its_highest_and_ends_at_nothing(steps):
    rates = np.array([float(train.make_schedule(steps, 4e-3)(i)) for i in range(steps + 1)])
    assert rates[-1] == 0
    assert rates.max() > 0.9 * 4e-3
    assert (np.diff(rates[rates.argmax() :]) <= 0).all()


def test_repeats_end_a_run_that_was_there_before():
    row = np.array([1, 2, 3, 9, 1, 2, 3, 1, 2, 3, 9])
    assert np.flatnonzero(refine.repeats(row, 3)).tolist() == [6, 9, 10]
    assert not refine.repeats(np.arange(50), 3).any()
    assert np.flatnonzero(refine.repeats(np.ones(5, int), 2)).tolist() == [2, 3, 4]


def test_refining_writes_what_the_package_decodes(trainable):
    decoder = Decoder(to_params(trainable), TINY)
    prompts = np.random.default_rng(6).integers(0, 299, (2, refine.PROMPT))
    written = refine.write(decoder, prompts, end_id=7)
    assert written.shape == (2, refine.PROMPT + refine.WRITTEN)
    assert (written[:, : refine.PROMPT] == prompts).all()
    assert not (written[:, refine.PROMPT :] == 7).any()
    logits = score(decoder, written[1, :-1].tolist()).logits[refine.PROMPT - 1 :]
    logits[:, 7] = -np.inf
    assert (logits.argmax(-1) == written[1, refine.PROMPT :]).all()


def test_what_is_exported_is_what_is_read(trainable, tmp_path):
    params = to_params(trainable)
    files = {kind: tmp_path / f"{kind}.gguf" for kind in export.KINDS}
    for kind, path in files.items():
        export.write_gguf(path, TINY, params, WORDS, kind)
    read = {kind: checkpoint.read(path) for kind, path in files.items()}
    assert read["F32"].config == TINY
    assert read["F32"].tokenizer.encode(TEXT) == WORDS.tokenizer().encode(TEXT)
    assert read["F32"].tokenizer.stop_ids == (WORDS.end_id,)

    def dense(tree):
        packed = jax.tree.leaves(tree, is_leaf=is_weight)
        return [np.asarray(dequantise(x) if is_weight(x) else x) for x in packed]

    for written, found in zip(dense(params), dense(read["F32"].params), strict=True):
        np.testing.assert_array_equal(written, found)
    q8_0 = gguf.GGMLQuantizationType.Q8_0
    for exact, packed, unpacked in zip(*(dense(read[k].params) for k in ("F32", "Q8_0", "F32_OF_Q8_0")), strict=True):
        is_matrix = exact.ndim == 2 and exact.shape[1] > 4
        expected = gguf.quants.dequantize(gguf.quants.quantize(exact, q8_0), q8_0) if is_matrix else exact
        np.testing.assert_array_equal(packed, expected)
        np.testing.assert_array_equal(unpacked, expected)


def test_agreement_by_depth_is_that_of_decoding():
    """The measured agreement, and both of its controls, against chains made one by one with the NumPy reference."""
    name = "qwen35-tiny-f32"
    reference, decoder = numpy_model.load(models.fixture(name)), models.decoder(name)
    ids = models.reference("qwen35-tiny")["tokens"][:40]
    choice = reference.trunk(ids[:-1])["logits"].argmax(axis=-1)
    swapped, pre_norm = measures.swapped_halves(decoder.params), measures.without_final_norm(decoder.params)
    sides = (
        ({}, None, DEPTHS),
        ({"swap_halves": True}, measures.with_params(decoder, swapped), DEPTHS),
        # Here the reference chains on pre-norm hiddens as well, so only the first depth is the same thing.
        ({"pre_norm_hidden": True}, measures.with_params(decoder, pre_norm), 1),
    )
    seen = []
    for wrong, drafter, depths in sides:
        drafts = chained_drafts(dataclasses.replace(reference, **wrong), ids[:-1], DEPTHS)
        hits = measures.depth_hits(decoder, [ids], drafter)
        assert hits.shape == (DEPTHS, 39 - DEPTHS + 1)
        for depth in range(1, depths + 1):
            expected = [drafts[depth, at] == choice[at] for at in range(DEPTHS - 1, 39)]
            assert hits[depth - 1].tolist() == expected
        seen.append(hits.mean())
    assert seen[1] < 0.5 * seen[0]


def test_first_repeat_counts_to_the_end_of_the_second_gram():
    start = list(range(100, 112))
    assert measures.first_repeat([1, *start, 2, 3, *start, 4]) == 27
    assert measures.first_repeat([1] * 12) is None
    assert measures.first_repeat([1] * 13) == 13
