"""The facade: streamed text, stop strings, notes, and refusals that are one clear sentence."""

import models
import numpy as np
import pytest

import sharpi_jax
from sharpi_jax.checkpoint.output_text import OutputText
from sharpi_jax.decode.options import DecodeOptions

NAME = "qwen35-tiny-f32"
PROMPT = models.reference("qwen35-tiny")["prompt"].tolist()


@pytest.mark.parametrize("K", [1, 3, 8])
@pytest.mark.parametrize("max_tokens", [1, 7, 40])
def test_streamed_text_is_the_whole_text(K, max_tokens):
    """Field case 15."""
    pieces = []
    options = DecodeOptions(max_tokens=max_tokens, spec_draft_n_max=K)
    found = models.model(NAME).generate(PROMPT, options, on_text=pieces.append)
    assert "".join(pieces) == found.text == models.read(NAME).tokenizer.decode(found.output_ids)
    assert len(found.output_ids) == max_tokens


def test_multi_byte_characters_across_tokens_blocks_and_the_end():
    """Field case 15: byte tokens of a two- and a four-byte character, cut at every place."""
    tokenizer = models.read(NAME).tokenizer
    ids = tokenizer.encode("é🦙ß") + tokenizer.encode("🦙")[:2]
    assert len(ids) > 8, "the fixture's vocabulary holds these only as bytes"
    for cut in range(len(ids) + 1):
        for end in range(cut, len(ids) + 1):
            pieces = []
            text = OutputText(tokenizer, (), 0, pieces.append)
            text.push(ids[:cut])
            text.push(ids[cut:end])
            text.finish()
            assert "".join(pieces) == text.text == tokenizer.decode(ids[:end])


def test_random_ids_never_raise():
    rng = np.random.default_rng(0)
    model = models.model(NAME)
    for _ in range(20):
        prompt = rng.integers(0, 512, 12).tolist()
        pieces = []
        found = model.generate(prompt, DecodeOptions(max_tokens=12, ignore_eos=True), on_text=pieces.append)
        assert "".join(pieces) == found.text
        assert len(found.output_ids) == 12


@pytest.mark.parametrize("stop", ["kitchen", "wait?", " It's lazy, and", "t", "e mirror wa"])
@pytest.mark.parametrize("K", [0, 3])
def test_a_stop_string_ends_the_text_before_it(stop, K):
    options = DecodeOptions(max_tokens=64, spec_draft_n_max=max(K, 1), spec_type="none" if K == 0 else "auto")
    model = models.model(NAME)
    whole = model.generate(PROMPT, options)
    pieces = []
    cut = model.generate(PROMPT, options, stop=[stop, "never there"], on_text=pieces.append)
    assert cut.text == whole.text[: whole.text.index(stop)] == "".join(pieces)
    assert cut.finish_reason == "stop"
    count = len(cut.output_ids)
    assert cut.output_ids == whole.output_ids[:count]
    decode = model.tokenizer.decode
    assert decode(cut.output_ids).startswith(cut.text)
    assert count == 0 or len(decode(cut.output_ids[:-1])) < len(cut.text), "no id more than the text needs"


def test_a_stop_string_that_is_cut_off_by_the_end_is_still_shown():
    whole = models.model(NAME).generate(PROMPT, DecodeOptions(max_tokens=6))
    pieces = []
    cut = models.model(NAME).generate(
        PROMPT, DecodeOptions(max_tokens=6), stop=[whole.text[-3:] + "xyz"], on_text=pieces.append
    )
    assert "".join(pieces) == cut.text == whole.text
    assert cut.finish_reason == "length"


def test_a_text_prompt_is_encoded_with_the_files_tokenizer():
    found = models.model(NAME).generate("The quiet clock", DecodeOptions(max_tokens=3))
    assert list(found.prompt_ids) == PROMPT[:3]


def test_the_context_is_a_bucket_capped_by_the_file():
    model = models.model(NAME)
    assert model.generate(PROMPT, DecodeOptions(max_tokens=1)).ctx_size == 128
    assert model.decoder.slots(42, 256) == 512
    assert model.decoder.slots(4000, 256) == 4096
    assert model.decoder.slots(42, 8, 50) == 50


@pytest.mark.parametrize(
    ("prompt", "options", "says"),
    [
        ([], {}, "the prompt is empty"),
        ("", {}, "the prompt is empty"),
        ([1, 512], {}, "token id 512 is outside the vocabulary of 512"),
        ([-1], {}, "token id -1"),
        ([1] * 51, {"ctx_size": 50}, "the prompt has 51 tokens, but the context holds 50"),
        ([1] * 4097, {}, "the context holds 4096"),
        ([1], {"ctx_size": 4097}, "at most 4096"),
    ],
)
def test_refusals_come_before_anything_is_compiled(prompt, options, says):
    model = models.model(NAME)
    programs = model.decoder.programs.count
    started = []
    with pytest.raises(sharpi_jax.OptionError, match=says):
        model.generate(prompt, DecodeOptions(**options), on_start=lambda: started.append(1))
    assert model.decoder.programs.count == programs
    assert not started


def test_load_refuses_types_that_are_not_offered():
    for wrong in ({"dtype": "float16"}, {"cache_dtype": "int8"}):
        with pytest.raises(sharpi_jax.OptionError, match="must be one of"):
            sharpi_jax.load(models.fixture(NAME), **wrong)


def test_a_trace_holds_every_step():
    found = models.model(NAME).generate(PROMPT, DecodeOptions(max_tokens=20), trace=True)
    assert len(found.steps) == found.stats.steps
    emitted = [t for s in found.steps for t in (s.token, *s.drafts[: s.accepted])]
    assert emitted == list(found.output_ids)
    assert found.steps[0].position == len(PROMPT)
    for before, after in zip(found.steps, found.steps[1:], strict=False):
        assert after.token == before.next_token
        assert after.position == before.position + before.accepted + 1
    assert not models.model(NAME).generate(PROMPT, DecodeOptions(max_tokens=20)).steps
