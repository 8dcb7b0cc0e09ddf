"""Perplexity and the head's agreement against NumPy float64, llama.cpp's outputs, and figures worked out by hand."""

import json
import math
import re

import models
import numpy as np
import pytest
from reference import numpy_model
from reference.numpy_evaluate import chained_drafts, scored_losses, token_losses

import sharpi_jax
from sharpi_jax import OptionError
from sharpi_jax.api import Model
from sharpi_jax.decode import decoder as decoder_module
from sharpi_jax.decode.decoder import Decoder
from sharpi_jax.evaluate import DEPTHS, Agreement, Perplexity, score_windows, text_windows
from sharpi_jax.evaluate import windows as windows_module

TINY = "qwen35-tiny-f32"


def tiny_tokens():
    return models.reference("qwen35-tiny")["tokens"].tolist()


def chunks_of(width):
    return lambda length: [(start, width) for start in range(0, length, width)]


# --- against NumPy float64 --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ctx_size", "width"), [(16, 16), (53, 64), (53, 16)])
def test_perplexity_is_float64s(monkeypatch, ctx_size, width):
    """Six windows in batches of four and two; two of an odd width, in one chunk and in four."""
    monkeypatch.setattr(decoder_module, "chunk_plan", chunks_of(width))
    reference, ids = numpy_model.load(models.fixture(TINY)), tiny_tokens()
    stages = []
    found = models.model(TINY).perplexity(ids, ctx_size=ctx_size, on_progress=lambda *stage: stages.append(stage))
    losses = scored_losses(reference, ids, ctx_size)
    count = len(ids) // ctx_size
    assert (found.windows, found.tokens) == (count, len(losses)) == (count, count * (ctx_size - 1 - ctx_size // 2))
    assert found.nats_per_token == pytest.approx(losses.mean(), abs=2e-5)
    assert found.nats_error == pytest.approx(losses.std() / math.sqrt(len(losses) - 1), abs=2e-5)
    assert found.perplexity == pytest.approx(np.exp(losses.mean()), rel=2e-5)
    assert found.perplexity_error == pytest.approx(np.exp(losses.mean()) * found.nats_error)
    assert [(stage.windows, total) for stage, total in stages] == [(w, count) for w in ([4, 6] if count == 6 else [2])]
    assert stages[-1][0] == found

    hits = np.zeros((DEPTHS, 0), bool)
    for begin in range(0, count * ctx_size, ctx_size):
        window = np.asarray(ids[begin : begin + ctx_size])
        choice = reference.trunk(window)["logits"].argmax(-1)
        drafts = chained_drafts(reference, window, DEPTHS)
        at = range(ctx_size // 2 + DEPTHS - 1, ctx_size)  # every chain begins in the second half
        rows = [[drafts[depth, t] == choice[t] for t in at] for depth in range(1, DEPTHS + 1)]
        hits = np.concatenate([hits, rows], axis=1)
    assert found.agreement == Agreement(tuple(hits.sum(axis=1).tolist()), hits.shape[1])


def test_perplexity_of_a_quantised_file_without_a_head():
    name = "qwen35-tiny-nomtp-f16"
    ids = tiny_tokens()
    found = models.model(name).perplexity(ids, ctx_size=53)
    losses = scored_losses(numpy_model.load(models.fixture(name)), ids, 53)
    assert found.nats_per_token == pytest.approx(losses.mean(), abs=5e-5)
    assert found.agreement is None
    assert found.as_dict()["mtp"] is None


# --- against llama.cpp ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", ["qwen35-tiny", "qwen35-tiny256"])
def test_choices_losses_and_drafts_are_llama_cpps(base):
    """Where the drafts before it are the text, a teacher-forced draft is the one that llama.cpp chained."""
    arrays = models.reference(base)
    tokens, drafts = arrays["tokens"], arrays["draft_ids"]
    found = score_windows(models.decoder(f"{base}-f32"), tokens[None])
    assert (found.choice[0] == arrays["logits"].argmax(-1)).all()
    assert np.abs(found.nll[0] - token_losses(arrays["logits"][:-1].astype(np.float64), tokens[1:])).max() < 4e-5
    assert (found.drafts[0, 0] == drafts[:, 0]).all()
    for depth in (2, 3):
        starts = [p for p in range(len(tokens) - 2) if (drafts[p, : depth - 1] == tokens[p + 1 : p + depth]).all()]
        assert len(starts) >= 25
        assert all(found.drafts[0, depth - 1, p + depth - 1] == drafts[p, depth - 1] for p in starts)
        assert (found.drafts[0, depth - 1, : depth - 1] == windows_module.NO_DRAFT).all()
    hits = drafts[2:, 0] == arrays["logits"][2:].argmax(-1)
    assert Agreement.of(found.draft_hits()).rate(1) == hits.mean()


# --- by hand ----------------------------------------------------------------------------------------------------------


def test_windows_are_consecutive_and_the_rest_is_dropped():
    ids = list(range(100, 121))
    assert text_windows(ids, 8).tolist() == [ids[0:8], ids[8:16]]
    assert text_windows(ids, 21).tolist() == [ids]
    assert text_windows(ids, 10, bos_id=7).tolist() == [[7, *ids[1:10]], [7, *ids[11:20]]]
    assert ids == list(range(100, 121))


@pytest.mark.parametrize(
    ("length", "ctx_size", "message"),
    [
        (21, 22, "the text has 21 tokens, but one window takes 22; give a longer text or lower ctx_size."),
        (0, 8, "the text has 0 tokens, but one window takes 8"),
        (21, 7, "ctx_size is 7, but a window of perplexity needs at least 8 tokens."),
        (6000, 5000, "ctx_size is 5000, but the model was made for at most 4096 tokens."),
    ],
)
def test_what_cannot_be_measured_is_refused(length, ctx_size, message):
    with pytest.raises(OptionError, match=re.escape(message)):
        models.model(TINY).perplexity([5] * length, ctx_size=ctx_size)
    with pytest.raises(OptionError, match="token id 512 is outside the vocabulary of 512"):
        models.model(TINY).perplexity([512] * 8, ctx_size=8)


def test_figures_from_sums():
    """Two tokens with losses of 1 and 3 nats: their mean is 2 with a standard error of 1."""
    found = Perplexity(8, 1, 2, 4, 4.0, 10.0, Agreement((8, 4, 0), 16))
    assert (found.nats_per_token, found.nats_error) == (2.0, 1.0)
    assert found.perplexity == found.perplexity_error == pytest.approx(7.38905609893)
    assert found.bits_per_byte == pytest.approx(1.44269504089)
    assert [found.agreement.rate(d) for d in (1, 2, 3)] == [0.5, 0.25, 0.0]
    assert found.agreement.standard_error(1) == 0.125
    assert found.as_dict()["mtp"]["agreement"][1] == {"depth": 2, "rate": 0.25, "standard_error": math.sqrt(3) / 16}


def test_figures_that_are_no_numbers_are_null_in_json():
    one = Perplexity(8, 1, 1, 0, 800.0, 640_000.0, None)
    found = json.loads(json.dumps(one.as_dict(), allow_nan=False))
    assert found["nats_per_token"] == 800
    assert [found[k] for k in ("perplexity", "perplexity_error", "nats_error", "bits_per_byte")] == [None] * 4


# --- text -------------------------------------------------------------------------------------------------------------


def test_text_is_encoded_without_special_tokens_and_its_bytes_are_counted():
    model = models.model(TINY)
    special = model.tokenizer.decode([model.tokenizer.eos_id])
    text = f"Why does the forest wait? {special} It is red, and the valley is far. " * 3
    ids = model.tokenizer.encode(text, parse_special=False)
    assert model.tokenizer.eos_id not in ids
    found = model.perplexity(text, ctx_size=32)
    assert found == model.perplexity(ids, ctx_size=32)
    halves = [ids[begin + 17 : begin + 32] for begin in range(0, len(ids) - 31, 32)]
    assert found.windows == len(halves) > 1
    assert found.size == sum(len(model.tokenizer.decode(half)) for half in halves)
    assert found.bits_per_byte == pytest.approx(found.nll / found.size * 1.4426950408889634)
    # Given as an id, a special token is scored, and stands for no text.
    with_special = model.perplexity([*ids[:30], model.tokenizer.eos_id, ids[31]], ctx_size=32)
    assert with_special.tokens == 15
    assert with_special.size == len(model.tokenizer.decode([*ids[17:30], ids[31]]))


def test_bos_stands_in_the_place_of_each_windows_first_token(monkeypatch):
    model = Model(models.read(TINY), "float32", "float32")
    model.decoder = models.decoder(TINY)
    monkeypatch.setattr(model, "tokenizer", model.tokenizer.__class__.__new__(model.tokenizer.__class__))
    model.tokenizer.__dict__ |= models.model(TINY).tokenizer.__dict__ | {"add_bos": True, "bos_id": 3}
    ids = tiny_tokens()
    text = model.tokenizer.decode(ids)
    plain = model.tokenizer.encode(text, parse_special=False)
    found = model.perplexity(text, ctx_size=8)  # so short that the first token is felt
    begun = np.asarray([3, *plain])  # one BOS begins the text, and shifts it by one
    replaced = begun.copy()
    replaced[::8] = 3
    once, always = (scored_losses(numpy_model.load(models.fixture(TINY)), ids, 8).mean() for ids in (begun, replaced))
    assert abs(once - always) > 1e-3
    assert found.nats_per_token == pytest.approx(always, abs=2e-5)


# --- memory -----------------------------------------------------------------------------------------------------------


def test_logits_are_made_a_few_positions_at_a_time(monkeypatch):
    """The same figures, in programs that never hold the logits of a whole chunk (64 positions, 512 tokens)."""
    tokens = np.asarray(tiny_tokens()[:60])[None]
    whole = score_windows(models.decoder(TINY), tokens)
    monkeypatch.setattr(windows_module, "_BLOCK_NUMBERS", 1 << 13)  # 16 positions, or one chain
    decoder = Decoder(models.decoder(TINY).params, models.decoder(TINY).cfg)
    few = score_windows(decoder, tokens)
    assert np.abs(few.nll - whole.nll).max() < 1e-5
    assert (few.choice == whole.choice).all()
    assert (few.drafts == whole.drafts).all()
    sizes = {name: compiled.memory_analysis().temp_size_in_bytes for name, compiled in decoder.programs.items()}
    assert sizes["_trunk_scores"] < 64 * 512 * 4 / 2
    assert sizes["_chains"] < 64 * 2 * 128 * 2 * 32 * 4 / 4


def test_a_long_text_compiles_nothing_more():
    model = sharpi_jax.load(models.fixture(TINY))
    counts = []
    model.perplexity(tiny_tokens(), ctx_size=16, on_progress=lambda *_: counts.append(model.decoder.programs.count))
    assert counts == [5, 5]  # empty caches, trunk, MTP block, scores, chains
