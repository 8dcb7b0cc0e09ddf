"""Drafts chosen from a shortlist: the text stays that of an exact rule, and the drafts are exactly the right ones."""

import lzma

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
import vocabularies
from gguf import GGMLQuantizationType, GGUFReader, TokenType
from gguf.quants import dequantize
from reference import numpy_model
from reference.numpy_decode import decode as plain_decode

import sharpi_jax
from sharpi_jax.decode.candidates import pick
from sharpi_jax.decode.controls import make_controls
from sharpi_jax.decode.options import AUTO_DRAFT_VOCAB, DecodeOptions
from sharpi_jax.decode.shortlist import BUCKET, shortlist_ids
from sharpi_jax.model import trunk
from sharpi_jax.quant import FORMATS, pack, select_rows

MODEL = "qwen35-tiny-f32"
REFERENCE = models.reference("qwen35-tiny")
PROMPT = REFERENCE["prompt"].tolist()


def allowed(name, N, prompt):
    """What may be drafted, from the file by gguf's own reader."""
    kinds = GGUFReader(models.fixture(name)).fields["tokenizer.ggml.token_type"].contents()
    marks = (TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN)
    return {*range(N), *prompt, *(i for i, kind in enumerate(kinds) if kind in marks)}


# --- the list ---------------------------------------------------------------------------------------------------------


def test_ids_are_ascending_and_filled_up_with_the_last():
    ids = shortlist_ids([5, 3, 9000], [[9, 3], [7, 90_000, 7]], 248_320)
    assert ids.dtype == np.int32
    assert len(ids) == BUCKET
    assert ids[:6].tolist() == [3, 5, 7, 9, 9000, 90_000]
    assert set(ids[6:].tolist()) == {90_000}


def test_lengths_are_few():
    lengths = {len(shortlist_ids(range(32_768), [range(200_000, 200_000 + n)], 248_320)) for n in range(1, 2000, 97)}
    assert lengths == {32_768 + BUCKET}
    assert len(shortlist_ids(range(40), [], 470)) == 470  # never more than the vocabulary


@pytest.mark.parametrize("common", [range(470), range(500), [*range(100, 470), *range(100)]])
def test_the_whole_vocabulary_is_no_shortlist(common):
    assert shortlist_ids(common, [[1]], 470) is None
    assert shortlist_ids(range(469), [[469]], 470) is None
    assert shortlist_ids(range(469), [[1]], 470) is not None


@pytest.mark.parametrize("format_name", ["F32", "F16", "BF16", "Q8_0", "Q4_K", "Q6_K"])
def test_selected_rows_are_the_files_rows(format_name):
    fmt, rng = FORMATS[format_name], np.random.default_rng(3)
    width = 512 // fmt.block_size * fmt.block_bytes
    raw = rng.integers(0, 60, (40, width), dtype=np.uint8)  # no byte that would make an infinity
    ids = np.array([0, 3, 4, 17, 39, 39], np.int32)
    chosen = select_rows(pack(raw, format_name, "t"), ids)
    expected = dequantize(raw[ids], GGMLQuantizationType[format_name])
    x = rng.standard_normal((2, 512)).astype(np.float32)
    assert (chosen.out_features, chosen.in_features, chosen.format) == (6, 512, format_name)
    found = np.asarray(sharpi_jax.quant.matmul(jnp.asarray(x), chosen))
    scale = np.abs(x.astype(np.float64)) @ np.abs(expected.astype(np.float64)).T
    assert (np.abs(found - x.astype(np.float64) @ expected.astype(np.float64).T) <= 1e-6 * scale).all()


def test_ties_go_to_the_lowest_id_and_what_fills_up_is_never_another():
    rng = np.random.default_rng(4)
    rows = rng.standard_normal((300, 64)).astype(np.float32)
    rows[[250, 77, 120]] = rows[41]  # the likeliest, but 41 itself is not in the list
    rows[0] = 100 * rows[41]  # likelier still, and not in it either
    cfg = models.decoder(MODEL).cfg
    ids = shortlist_ids([250, 120, 77, 5], [[6, 299]], 300)
    head = select_rows(pack(rows.view(np.uint8), "F32", "t"), ids)
    controls = make_controls([1.0], [])

    @jax.jit
    def choose(hidden):
        logits = trunk.head(head, cfg, hidden)
        return pick(logits, jnp.asarray(ids), 300, jnp.zeros(1, jnp.int32), jnp.int32(0), controls).token

    assert choose(rows[41][None, None]).tolist() == [77]
    assert choose(rows[299][None, None]).tolist() == [299]  # the one that fills up
    for hidden in rng.standard_normal((50, 64)).astype(np.float32):
        logits = rows.astype(np.float64) @ hidden
        likely = sorted({5, 6, 77, 299}, key=lambda i: -logits[i])
        assert choose(hidden[None, None]).tolist() == likely[:1]


# --- which tokens are common ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["qwen35", "llama-bpe", "gpt-2"])
def test_byte_level_vocabularies_give_their_first_ids_and_all_special_tokens(kind):
    tokenizer = vocabularies.tokenizer(kind)
    types = vocabularies.metadata(kind)["tokenizer.ggml.token_type"]
    found = set(tokenizer.draft_ids(1000).tolist())
    marks = {i for i, kind in enumerate(types) if kind in (2, 3, 4)}
    assert found == {*range(1000), *marks} | set(tokenizer.stop_ids)
    assert max(found) > 1000
    assert {tokenizer.eos_id, *tokenizer.stop_ids} <= found


def test_sentencepiece_vocabularies_give_characters_then_the_best_scores():
    """Its first ids are control tokens and bytes, and its characters, among the most frequent, come last."""
    tokenizer = vocabularies.tokenizer("llama-spm")
    scores = vocabularies.metadata("llama-spm")["tokenizer.ggml.scores"]
    by_text = {tokenizer.token_bytes(i).decode(errors="replace"): i for i in range(259, tokenizer.vocab_size)}
    found = set(tokenizer.draft_ids(4000).tolist())
    assert {by_text[text] for text in (" ", "e", "t", ".", " the", " of", "ing")} <= found
    assert {0, 1, 2} <= found
    merged = [i for text, i in by_text.items() if len(text) > 1]
    kept = [scores[i] for i in merged if i in found]
    assert 1000 < len(kept) < len(merged)
    assert min(kept) >= max(scores[i] for i in merged if i not in found)


def test_most_of_a_text_is_made_of_what_auto_chooses():
    """Why the default is what it is: of English prose 94% of the tokens, and more with the prompt's own."""
    tokenizer = vocabularies.tokenizer("qwen35")
    text = lzma.decompress((models.DATA / "text" / "alice29.txt.xz").read_bytes()).decode()
    ids = tokenizer.encode(text)
    common = set(tokenizer.draft_ids(AUTO_DRAFT_VOCAB).tolist())
    assert np.mean([i in common for i in ids]) > 0.94
    common |= set(ids[:1000])
    assert np.mean([i in common for i in ids[1000:3000]]) > 0.95


# --- decoding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("N", [1, 40, 300])
@pytest.mark.parametrize("K", [1, 3])
def test_the_text_is_greedy_and_the_drafts_are_the_references(N, K, monkeypatch):
    """Against the plain decoder whose MTP logits are masked outside the list: each draft, and so each count."""
    reference = numpy_model.load(models.fixture(MODEL))
    within = sorted(allowed(MODEL, N, PROMPT))
    unmasked = numpy_model.Reference.mtp_rows

    def masked(*args, **kwargs):
        out = unmasked(*args, **kwargs)
        logits = np.full_like(out["logits"], -np.inf)
        logits[:, within] = out["logits"][:, within]
        return {**out, "logits": logits}

    monkeypatch.setattr(numpy_model.Reference, "mtp_rows", masked)
    expected = plain_decode(reference, PROMPT, max_tokens=40, K=K)
    options = DecodeOptions(max_tokens=40, spec_draft_n_max=K, spec_draft_vocab=N)
    found = models.model(MODEL).generate(PROMPT, options, trace=True)
    assert list(found.output_ids) == REFERENCE["greedy"][:40].tolist()
    assert [list(step.drafts) for step in found.steps] == [step.drafts for step in expected.steps]
    assert [step.accepted for step in found.steps] == [step.accepted for step in expected.steps]
    assert found.draft_vocab == len(within) < models.model(MODEL).config.vocab_size


@pytest.mark.parametrize("name", ["qwen35moe-tiny-f32", "qwen35-tiny-q8_0"])
def test_other_models_give_the_same_text(name):
    prompt = PROMPT[:20]
    plain = models.model(name).generate(prompt, DecodeOptions(max_tokens=40, spec_type="none"))
    for K in (1, 3):
        options = DecodeOptions(max_tokens=40, spec_draft_n_max=K, spec_draft_vocab=25)
        found = models.model(name).generate(prompt, options)
        assert found.output_ids == plain.output_ids
        assert found.draft_vocab < 100
    assert plain.draft_vocab is None


def test_the_demo_model_gives_the_same_text_and_loses_drafts_only():
    model = models.demo()
    prompt = sharpi_jax.assets.DEMO_PROMPT
    runs = [
        model.generate(prompt, DecodeOptions(max_tokens=63, spec_draft_vocab=size, ignore_eos=True))
        for size in ("full", model.config.vocab_size, "auto", 1000, 300, 1)
    ]
    assert len({run.output_ids for run in runs}) == 1
    assert runs[0].stats == runs[1].stats == runs[2].stats, "auto is all of a small vocabulary"
    rates = [run.stats.acceptance_rate for run in runs[2:]]
    assert rates[0] > rates[2] > rates[3]
    assert [run.draft_vocab for run in runs[:3]] == [model.config.vocab_size] * 3


def test_rows_of_a_batch_share_a_list_and_give_the_ids_of_each_alone():
    decoder = models.decoder(MODEL)
    prompts = [PROMPT, PROMPT[5:12], [3]]
    together = decoder.drafter(shortlist_ids(range(30), prompts, decoder.cfg.vocab_size))
    controls = make_controls([1.0] * 3, [])
    state = decoder.advance(decoder.prefill(prompts, [30] * 3, 128, controls, K=3), controls, 10**6, together)
    for row, prompt in enumerate(prompts):
        alone = models.model(MODEL).generate(prompt, DecodeOptions(max_tokens=30, spec_draft_vocab=30))
        tokens = np.asarray(state.tokens)[row, len(prompt) : len(prompt) + 30]
        emitted = len(alone.output_ids)  # it ends at a stop token, the batch does not
        assert tokens[:emitted].tolist() == list(alone.output_ids)


def test_prompts_of_many_lengths_share_one_program():
    model = sharpi_jax.load(models.fixture(MODEL))
    rng = np.random.default_rng(0)
    for length in [1, 2, 15, 16, 17, 63, 64, 65, 255, 256, 257, *rng.integers(1, 320, 9).tolist()]:
        options = DecodeOptions(max_tokens=4, ctx_size=512, spec_draft_vocab=50)
        model.generate(rng.integers(0, 470, length).tolist(), options)
    assert model.decoder.programs.count == 9 + 1, "one more than without: what gathers the head's rows"


# --- what is chosen ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chosen", "p_min", "vocab", "size"),
    [
        ("auto", 1.0, 248_320, AUTO_DRAFT_VOCAB),
        ("auto", 0.0, 248_320, AUTO_DRAFT_VOCAB),  # 0 means 1
        ("auto", 0.3, 248_320, None),
        ("auto", 0.9, 248_320, None),
        ("auto", 1.0, 2 * AUTO_DRAFT_VOCAB, AUTO_DRAFT_VOCAB),
        ("auto", 1.0, 2 * AUTO_DRAFT_VOCAB - 1, None),
        ("full", 1.0, 248_320, None),
        (1, 1.0, 470, 1),
        (469, 0.3, 470, 469),
        (470, 1.0, 470, None),
        (10**9, 1.0, 470, None),
    ],
)
def test_options(chosen, p_min, vocab, size):
    assert DecodeOptions(spec_draft_vocab=chosen, spec_draft_p_min=p_min).draft_vocab(vocab) == size


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "most", "", None])
def test_options_refused(wrong):
    with pytest.raises(sharpi_jax.OptionError, match="spec_draft_vocab must be auto, full or an integer of at least 1"):
        DecodeOptions(spec_draft_vocab=wrong)
