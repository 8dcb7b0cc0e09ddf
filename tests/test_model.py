"""Whole models against llama.cpp, transformers and NumPy float64; and against themselves, cut into other windows."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from models import same_bits
from reference import numpy_model as nm

from sharpi_jax.decode import decoder as decoder_module
from sharpi_jax.decode import prefill
from sharpi_jax.decode.decoder import Decoder
from sharpi_jax.decode.score import Scores, score
from sharpi_jax.model.cache import DeltaState, DeltaWindow, TrunkCache, init_kv_cache
from sharpi_jax.model.delta import state_after
from sharpi_jax.model.mtp import mtp_block
from sharpi_jax.model.params import DeltaParams
from sharpi_jax.model.rope import rope_table
from sharpi_jax.model.trunk import head, trunk
from sharpi_jax.model.window import window_at

TINY = "qwen35-tiny-f32"
BASES = ["qwen35-tiny", "qwen35-tiny256", "qwen35moe-tiny", "qwen35moe-tiny256"]
FLOAT32 = {f"{base}-f32": base for base in BASES}  # file: its reference arrays
DEQUANTISED = models.quantised(*FLOAT32.values())


@functools.cache
def scores(name, tokens_of=None) -> Scores:
    """A fixture's scores over the tokens of its reference arrays."""
    arrays = models.reference(tokens_of or name)
    return score(models.decoder(name), arrays["dequant_tokens" if "dequant_tokens" in arrays else "tokens"].tolist())


@functools.cache
def exact(name):
    """The float64 reference of a float32 fixture, its trunk's results and its MTP block's, over the same tokens."""
    tokens = models.reference(FLOAT32[name])["tokens"]
    reference = nm.load(models.fixture(name))
    own = reference.trunk(tokens)
    return reference, own, reference.mtp(tokens, own["hidden"])


def assert_close(got, want, tolerance):
    assert got.dtype == np.float32
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= tolerance


def assert_same_choice(got, want):
    assert (got.argmax(axis=-1) == want.argmax(axis=-1)).all()


def with_params(name, **changes):
    """A decoder on changed weights of the same shapes: it shares the fixture's compiled programs."""
    decoder = models.decoder(name)
    return Decoder(decoder.params.replace(**changes), decoder.cfg, decoder.programs)


# --- against other engines --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FLOAT32)
def test_float32_models_are_llama_cpps_transformers_and_float64s(name):
    found, arrays = scores(name, FLOAT32[name]), models.reference(FLOAT32[name])
    for got, want in (
        (found.logits, arrays["logits"]),
        (found.hidden, arrays["hidden"]),
        (found.mtp_logits, arrays["mtp_logits"]),
        (found.logits, arrays["hf_logits"]),
        (found.mtp_logits, arrays["hf_mtp_logits"]),
        (found.logits, exact(name)[1]["logits"]),
        (found.hidden, exact(name)[1]["hidden"]),
        (found.mtp_logits, exact(name)[2]["logits"]),
    ):
        assert_close(got, want, 2e-5)
        assert_same_choice(got, want)


@pytest.mark.parametrize("name", DEQUANTISED)
def test_other_weight_types_are_exact_arithmetic_on_their_dequantised_weights(name):
    found, arrays = scores(name), models.reference(name)
    for kind in ("logits", "mtp_logits"):
        got, gap = getattr(found, kind), arrays[f"dequant_{kind}_gap"]
        assert_close(got[:, ::2], arrays[f"dequant_{kind}_even"], 5e-5)
        top = np.sort(got, axis=-1)[:, -2:]
        assert_close(top[:, 1] - top[:, 0], gap, 1e-4)
        assert gap.min() > 1e-4  # so that both must choose alike
        assert (got.argmax(axis=-1) == arrays[f"dequant_{kind}_argmax"]).all()
    P = len(arrays["prompt"])
    assert (found.logits[P - 1 : -1].argmax(axis=-1) == arrays["dequant_tokens"][P:]).all()


def test_fused_tensors_are_split_at_load():
    """ffn_gate_up_exps, and attn_qkv in the attention layers, against NumPy float64 on the fused file."""
    name, tokens = "qwen35moe-tiny-fused-f16", models.reference("qwen35moe-tiny")["tokens"]
    reference = nm.load(models.fixture(name))
    own = reference.trunk(tokens)
    found = score(models.decoder(name), tokens.tolist())
    assert_close(found.logits, own["logits"], 5e-5)
    assert_close(found.mtp_logits, reference.mtp(tokens, own["hidden"])["logits"], 5e-5)


def test_a_file_without_mtp_has_the_trunk_of_the_one_with():
    without, with_mtp = scores("qwen35-tiny-nomtp-f16", "qwen35-tiny-f16"), scores("qwen35-tiny-f16")
    assert without.mtp_logits is None
    assert same_bits(without.logits, with_mtp.logits)
    assert same_bits(without.hidden, with_mtp.hidden)


# --- wrong wirings, which must show -----------------------------------------------------------------------------------


def test_repeated_instead_of_tiled_heads_show():
    """Value heads in the Hugging Face order (head h uses key head h // 2) load without complaint."""
    cfg = models.decoder(TINY).cfg
    H, N, E = cfg.delta_heads, cfg.delta_key_heads, cfg.delta_head_dim
    order = np.arange(H).reshape(N, H // N).T.ravel()  # the head that now stands at each place
    inner = (order[:, None] * E + np.arange(E)).ravel()
    channels = np.concatenate([np.arange(2 * N * E), 2 * N * E + inner])

    def take(weight, rows):
        return weight.replace(blocks=weight.blocks[rows])

    def moved(layer):
        p = layer.mixer
        if not isinstance(p, DeltaParams):
            return layer
        rows = {"qkv": channels, "gate": inner, "alpha": order, "beta": order}
        changes = {name: take(getattr(p, name), index) for name, index in rows.items()}
        changes |= {"a": p.a[order], "dt": p.dt[order], "conv": p.conv[channels]}
        return layer.replace(mixer=p.replace(out=p.out.replace(blocks=p.out.blocks[:, inner]), **changes))

    layers = tuple(moved(layer) for layer in models.decoder(TINY).params.layers)
    arrays = models.reference("qwen35-tiny")
    wrong = score(with_params(TINY, layers=layers), arrays["tokens"].tolist())
    assert np.abs(wrong.logits - arrays["logits"]).max() > 0.1


@pytest.mark.parametrize("name", FLOAT32)
def test_swapped_halves_of_the_mtp_input_show(name):
    mtp, arrays = models.decoder(name).params.mtp, models.reference(FLOAT32[name])
    embedding, hidden = jnp.split(mtp.proj.blocks, 2, axis=1)
    swapped = mtp.proj.replace(blocks=jnp.concatenate([hidden, embedding], axis=1))
    wrong = score(with_params(name, mtp=mtp.replace(proj=swapped)), arrays["tokens"].tolist())
    assert np.abs(wrong.mtp_logits - arrays["mtp_logits"]).max() > 1
    assert same_bits(wrong.logits, scores(name, FLOAT32[name]).logits)


@pytest.mark.parametrize("name", FLOAT32)
def test_the_hidden_before_the_final_norm_shows(name):
    """Handing over the hidden from before the norm moves the MTP logits; from after it, they are llama.cpp's."""
    decoder, arrays = models.decoder(name), models.reference(FLOAT32[name])
    reference, own, _ = exact(name)
    tokens, T = arrays["tokens"], len(arrays["tokens"])

    @jax.jit
    def mtp_logits(params, hidden, rope):
        shifted = jnp.concatenate([jnp.zeros_like(hidden[:1]), hidden[:-1]])[None]
        window = window_at(jnp.zeros(1, jnp.int32), jnp.full(1, T), T, row_exact=False)
        cache = init_kv_cache(decoder.cfg, 1, T)
        out, _ = mtp_block(params, decoder.cfg, jnp.asarray(tokens)[None], shifted, cache, window, rope)
        return head(params.head, decoder.cfg, out)[0]

    table = rope_table(T, decoder.cfg.rope_dims, decoder.cfg.rope_base)
    right, wrong = (
        np.asarray(mtp_logits(decoder.params.mtp, own[key].astype(np.float32), table))
        for key in ("hidden", "pre_norm_hidden")
    )
    assert_close(right, arrays["mtp_logits"], 2e-5)
    assert np.abs(wrong - arrays["mtp_logits"]).max() > 0.1
    assert_close(wrong, reference.mtp(tokens, own["pre_norm_hidden"])["logits"], 2e-5)


# --- the same positions in other windows ------------------------------------------------------------------------------


@pytest.mark.parametrize("widths", [[16] * 7, [64, 64], [16, 64, 16, 16]])
def test_chunked_prefill_is_whole_prefill(monkeypatch, widths):
    """106 tokens take one chunk of 256 by default."""
    starts = np.cumsum([0, *widths[:-1]]).tolist()
    monkeypatch.setattr(decoder_module, "chunk_plan", lambda length: list(zip(starts, widths, strict=True)))
    chunked = score(models.decoder(TINY), models.reference("qwen35-tiny")["tokens"].tolist())
    whole = scores(TINY, "qwen35-tiny")
    for got, want in zip(dataclasses.astuple(chunked), dataclasses.astuple(whole), strict=True):
        assert_close(got, want, 1e-5)
        assert_same_choice(got, want)


def committed(cache, after, count):
    """The trunk's states after `count` tokens of a decode window."""

    def roll(old, new):
        if not isinstance(new, DeltaWindow):
            return new
        assert isinstance(old, DeltaState)
        return state_after(old, new, jnp.full(1, count), 4)

    return TrunkCache(tuple(map(roll, cache.layers, after.layers)), cache.rope)


@pytest.mark.parametrize(("width", "kept"), [(4, 4), (4, 2), (2, 1)])
def test_prefill_and_decode_windows_are_one_full_forward(width, kept):
    """The prompt, then windows of `width` positions of which `kept` are committed; the others are run again."""
    decoder, arrays = models.decoder(TINY), models.reference("qwen35-tiny")
    tokens, P = arrays["tokens"], len(arrays["prompt"])
    padded, lengths = decoder.rows_of([tokens[:P].tolist()], 128)
    (chunk,) = decoder.chunks(padded, lengths, drafting=False)
    cache, hiddens = chunk.trunk, [chunk.hidden[0, :P]]

    @jax.jit
    def step(params, cache, window_tokens, start):
        window = window_at(start, jnp.full(1, width), width, row_exact=True)
        hidden, after = trunk(params, decoder.cfg, window_tokens, cache, window)
        return hidden[0, :kept], committed(cache, after, kept)

    for start in range(P, len(tokens) - width + 1, kept):
        window_tokens = jnp.asarray(tokens[None, start : start + width])
        hidden, cache = step(decoder.params, cache, window_tokens, jnp.full(1, start))
        hiddens.append(hidden)
    hidden = np.concatenate(hiddens)
    assert len(hidden) >= len(tokens) - width
    assert_close(hidden, scores(TINY, "qwen35-tiny").hidden[: len(hidden)], 1e-5)
    logits = np.asarray(head(decoder.params.head, decoder.cfg, jnp.asarray(hidden)))
    assert_close(logits, scores(TINY, "qwen35-tiny").logits[: len(hidden)], 1e-5)
    assert_same_choice(logits, arrays["logits"][: len(hidden)])


def prefilled(rows):
    """Prompts run together: of each row the trunk's and the MTP block's hiddens [length, D] and the newest one [D]."""
    decoder = models.decoder(TINY)
    tokens, lengths = decoder.rows_of(rows, 128)
    chunks = [jax.device_get(c) for c in decoder.chunks(tokens, lengths, drafting=True)]
    hidden, mtp_hidden = (np.concatenate([getattr(c, kind) for c in chunks], 1) for kind in ("hidden", "mtp_hidden"))
    return [(hidden[i, :n], mtp_hidden[i, :n], chunks[-1].last[i]) for i, n in enumerate(lengths)]


def test_rows_of_unequal_lengths_are_each_that_row_alone(monkeypatch):
    """Bit for bit, since the chunks have the same width; 106 tokens take two of them, in which short rows are idle."""
    monkeypatch.setattr(prefill, "CHUNKS", (64,))
    tokens = models.reference("qwen35-tiny")["tokens"].tolist()
    rows = [tokens, tokens[:1], tokens[40:104], tokens[7:10], tokens[5:70]]
    batch = prefilled(rows)
    for row, together in zip(rows, batch, strict=True):
        (alone,) = prefilled([row])
        for a, b in zip(together, alone, strict=True):
            assert same_bits(a, b)
    monkeypatch.undo()
    for row, together in zip(rows, batch, strict=True):
        assert_close(together[0], score(models.decoder(TINY), row).hidden, 1e-5)
