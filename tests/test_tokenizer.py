"""Token ids against llama.cpp's own, and streamed text against whole text.

`data/vocab` holds llama.cpp's own test strings (`.inp`) with the ids it gives (`.out`) for the vocabularies of
vocabularies.py. There are none for smollm; test_tokenizer_peer.py has 3,000 more strings, for all of them.
"""

import json
import random
import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vocabularies import metadata as vocab_metadata
from vocabularies import tokenizer as vocab

from sharpi_jax.checkpoint.byte_level import pre_tokenizer
from sharpi_jax.checkpoint.detokenizer import StreamingDetokenizer
from sharpi_jax.checkpoint.gguf_file import open_gguf
from sharpi_jax.checkpoint.tokenizer import Tokenizer
from sharpi_jax.errors import CheckpointError

DATA = Path(__file__).parent / "data"
SEPARATOR = "\n__ggml_vocab_test__\n"
SMALL = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "qwen35",
    "tokenizer.ggml.tokens": [
        "a",
        "b",
        "Ġ",
        "ab",
        "<|im_end|>",
        "<think>",
        "<|eot|>",
        "<0x41>",
        "[PAD8]",
        "<unk>",
        "é",
    ],
    "tokenizer.ggml.token_type": np.array([1, 1, 1, 1, 3, 4, 3, 6, 5, 2, 4], np.int32),
    "tokenizer.ggml.merges": ["a b"],
}


@cache
def tiny() -> Tokenizer:
    """The tokenizer of the fixture models."""
    return Tokenizer.from_metadata(open_gguf(DATA / "qwen35-tiny-f32.gguf").metadata)


@pytest.mark.parametrize(
    ("pre", "count"), [("qwen35", 50), ("qwen2", 46), ("gpt-2", 46), ("llama-bpe", 46), ("llama-spm", 46)]
)
def test_ids_equal_llama_cpp(pre: str, count: int) -> None:
    *strings, rest = (DATA / "vocab" / f"{pre}.inp").read_bytes().decode().split(SEPARATOR)
    ids = [list(map(int, line.split())) for line in (DATA / "vocab" / f"{pre}.out").read_text().splitlines()]
    assert (len(strings), len(ids), rest) == (count, count, "")
    tokenizer = vocab(pre)
    for string, expected in zip(strings, ids, strict=True):
        assert tokenizer.encode(string) == expected, string
        assert tokenizer.decode(expected) == string


def test_fixture_ids_equal_llama_cpp() -> None:
    cases = json.loads((DATA / "tokenize.json").read_text())
    assert len(cases) == 30
    for case in cases:
        assert tiny().encode(case["text"]) == case["llama_ids"], case["text"]
        assert tiny().decode(case["llama_ids"]) == case["text"]
    spec = json.loads((DATA / "qwen35-tiny.spec.json").read_text())
    assert tiny().encode_prompt(spec["prompt_text"]) == spec["prompt_ids"]
    assert tiny().decode(spec["spec_f32kv"]["n0"]["tokens"]).startswith(spec["greedy_text"])


# Worked out by hand from the patterns' definition, a "|" between the pieces.
SPLITS = {
    "qwen35": [
        "हिन्दी| देवनागरी",  # vowel signs and viramas are marks: they stay with their letters
        "ก็|\n|ที่",
        "مَرْحَبًا| بِكَ",
        "e\u0301te\u0301| a\u0308",
        "Hello| | world",  # of two spaces the second goes with the word
        "1|2|3|4|5",
        "a|1|b|½|Ⅷ",
        "we|'LL| go|,| they|'Ve",
        "f|(x|)\r\n\r\n|   | return",
        "x|!!\n\n|y",
        "x| !!\n\n|\ty",
        "end|   ",
        "a|\u00a0b|\u2003c",
    ],
    "qwen2": ["ह|िन|्द|ी", "1|2|3", "a|!\n\n|b", "it|'S| ok"],
    "llama-bpe": ["123|456|7", "a|123|b", "it|'S| ok", "a|  | b"],
    "gpt-2": ["a| 12345| b", "it|'s| it|'|S", "a|!!| ?|\n|\n|b", "x|  | y", "x|\n|y"],
    "smollm": ["a| |1|2|3|4|5| b", "x|  |7|up|'s|\n\n|9", "½|Ⅷ|٣| |3|.|1|4", "v|2|.|0| beta"],
}


@pytest.mark.parametrize("pre", SPLITS)
def test_splits_worked_out_by_hand(pre: str) -> None:
    splitter = pre_tokenizer(pre)
    for case in SPLITS[pre]:
        text = case.replace("|", "")
        pieces = [text[begin:end] for _, (begin, end) in splitter.pre_tokenize_str(text)]
        assert pieces == case.split("|"), text


def test_special_tokens_in_the_text() -> None:
    tokenizer = vocab("qwen35")
    assert tokenizer.encode("!<|im_end|>") == [0, 151645]
    assert tokenizer.encode("Hello, <|im_start|>  <|im_end|>world") == [
        *tokenizer.encode("Hello, "),
        151644,
        *tokenizer.encode("  "),
        151645,
        *tokenizer.encode("world"),
    ]
    # user-defined tokens are found either way, control tokens only where asked for
    assert tokenizer.encode("[PAD151700]<|im_end|>", parse_special=False)[0] == 151700
    assert 151645 not in tokenizer.encode("[PAD151700]<|im_end|>", parse_special=False)
    assert tokenizer.decode(tokenizer.encode("<|im_end|>", parse_special=False)) == "<|im_end|>"


def test_control_tokens_are_known_by_their_text() -> None:
    """As llama.cpp logs it: these texts make a control token of any token; all but the last end generation."""
    tokens = ["a", "</s>", "<|fim_pad|>", "<｜end▁of▁sentence｜>", "<|fim_prefix|>"]
    metadata = {**SMALL, "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": []}
    small = Tokenizer.from_metadata({**metadata, "tokenizer.ggml.token_type": np.array([1, 1, 4, 6, 5])})
    assert small.encode("a</s><|fim_pad|>a<｜end▁of▁sentence｜><|fim_prefix|>") == [0, 1, 2, 0, 3, 4]
    assert 2 not in small.encode("<|fim_pad|>", parse_special=False)
    assert [i for i in range(5) if small.is_special(i)] == [1, 2, 3, 4]
    assert small.stop_ids == (1, 2, 3)


def test_the_longest_special_token_wins() -> None:
    tokens = ["a", "<x", "<x>", "<x><x>"]
    types = {"tokenizer.ggml.token_type": np.array([1, 3, 3, 4])}
    small = Tokenizer.from_metadata({**SMALL, **types, "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": []})
    assert small.encode("a<x><x><x>a<xa") == [0, 3, 2, 0, 1, 0]
    assert small.encode("<x><x>a", parse_special=False) == [3, 0]
    # and where two overlap it wins even if the other begins earlier (llama-server gives these three)
    tokens = [*"abcdefgh<>", "<ab", "b>cdef", "efgh"]
    types = {"tokenizer.ggml.token_type": np.array([1] * 10 + [3, 3, 4])}
    small = Tokenizer.from_metadata({**SMALL, **types, "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": []})
    assert small.encode("<ab>cdef") == [8, 0, 11]
    assert small.encode("<ab>cdefgh") == [8, 0, 11, 6, 7]
    assert small.encode("<ab>cdefefgh") == [8, 0, 11, 12]


def test_llama_bpe_takes_whole_words_unmerged() -> None:
    """A word that is a token counts as it is, even where no merge leads to it."""
    metadata = vocab_metadata("llama-bpe")
    word = next(t for t in metadata["tokenizer.ggml.tokens"] if len(t) > 6 and t.isascii() and t.isalpha())
    merges = [m for m in metadata["tokenizer.ggml.merges"] if m.replace(" ", "") != word]
    small = {**metadata, "tokenizer.ggml.merges": merges}
    assert len(Tokenizer.from_metadata(small).encode(word)) == 1
    assert len(Tokenizer.from_metadata({**small, "tokenizer.ggml.pre": "gpt-2"}).encode(word)) > 1


def test_bos_and_stop_tokens() -> None:
    llama, qwen = vocab("llama-bpe"), vocab("qwen35")
    assert (llama.bos_id, llama.eos_id, llama.add_bos) == (128000, 128001, True)
    assert llama.stop_ids == (128001, 128009)  # <|end_of_text|>, <|eot_id|>
    assert llama.encode_prompt("Hi") == [128000, *llama.encode("Hi")]
    assert llama.encode_prompt("<|begin_of_text|>Hi") == [128000, *llama.encode("Hi")]
    assert llama.encode_prompt("") == [128000]
    assert (qwen.bos_id, qwen.eos_id, qwen.add_bos) == (151643, 151643, False)
    assert qwen.stop_ids == (128247, 151643, 151645)  # </s>, a normal token of the file, <|endoftext|>, <|im_end|>
    assert vocab("smollm").stop_ids == (0, 2, 4)  # <|endoftext|>, <|im_end|>, <reponame>
    assert qwen.encode_prompt("Hi") == qwen.encode("Hi")
    told = Tokenizer.from_metadata({**vocab_metadata("gpt-2"), "tokenizer.ggml.add_bos_token": True})
    assert told.encode_prompt("Hi") == [50256, *told.encode("Hi")]
    assert (tiny().vocab_size, tiny().bos_id, tiny().eos_id, tiny().add_bos) == (512, None, 477, False)
    assert tiny().stop_ids == (475, 477)
    small = Tokenizer.from_metadata({**SMALL, "tokenizer.ggml.eot_token_id": 6, "tokenizer.ggml.add_bos_token": True})
    assert (small.stop_ids, small.add_bos) == ((4, 6), False)  # no BOS token to add
    assert small.encode_prompt("ab") == [3]


def test_kinds_of_tokens() -> None:
    small = Tokenizer.from_metadata(SMALL)
    assert [small.token_bytes(i) for i in range(-1, 12)] == [
        *(b"", b"a", b"b", b" ", b"ab", b"<|im_end|>", b"<think>", b"<|eot|>", b"A", b"", b"<unk>"),
        *("é".encode(), b""),  # a user-defined token is plain text, not the byte alphabet
    ]
    assert [i for i in range(-1, 12) if small.is_special(i)] == [4, 6, 9]
    assert small.decode([3, 4, 5, 2, 8, 0, 99, -7]) == "ab<|im_end|><think> a"
    assert small.decode([3, 4, 5, 2, 8, 0, 99, -7], skip_special=True) == "ab<think> a"
    assert small.decode(np.array([0, 1], np.int32)) == "ab"
    assert small.token_text(8) == "[PAD8]"
    assert small.token_text(11) == "[id 11]"
    assert tiny().token_text(198) == "\\n"
    assert tiny().token_text(127) == "\\xc3"
    untyped = {k: v for k, v in SMALL.items() if k != "tokenizer.ggml.token_type"}
    assert Tokenizer.from_metadata(untyped).encode("ab") == [3]
    assert tiny().encode("a\ud800b\ud83d\udc4d") == tiny().encode("a\ufffdb👍")  # a lone surrogate, and a pair


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.model": None}, "no tokenizer"),
        ({"tokenizer.ggml.model": "bert"}, "kind 'bert' is not supported.*gpt2.*llama"),
        ({"tokenizer.ggml.model": "llama"}, "no token <0x00>"),
        ({"tokenizer.ggml.model": np.arange(3)}, "is not supported"),
        (
            {"tokenizer.ggml.pre": "deepseek-v3"},
            "'deepseek-v3' is not supported.*qwen35, qwen2, llama-bpe, gpt-2, smollm",
        ),
        ({"tokenizer.ggml.pre": None}, "no pre-tokenizer.*qwen35"),
        ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.tokens": np.arange(3)}, "tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges"),
        ({"tokenizer.ggml.merges": ["a\nz"]}, "no pair"),
        ({"tokenizer.ggml.merges": ["a z" * 999]}, "merges do not fit"),
        ({"tokenizer.ggml.merges": ["b a"]}, "merges do not fit"),
        ({"tokenizer.ggml.token_type": np.array([1, 1])}, "does not cover"),
        ({"tokenizer.ggml.token_type": 1}, "does not cover"),
        ({"tokenizer.ggml.eos_token_id": 11}, "eos_token_id is 11, .*11 tokens"),
        ({"tokenizer.ggml.bos_token_id": -1}, "bos_token_id is -1"),
        ({"tokenizer.ggml.eot_token_id": "x"}, "eot_token_id is 'x'"),
    ],
)
def test_refused_tokenizers(change: dict[str, Any], message: str) -> None:
    metadata = {k: v for k, v in {**SMALL, **change}.items() if v is not None}
    with pytest.raises(CheckpointError, match=message) as caught:
        Tokenizer.from_metadata(metadata)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@settings(max_examples=150, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_any_text_survives(text: str) -> None:
    for tokenizer in (tiny(), vocab("qwen35"), vocab("gpt-2"), vocab("llama-bpe"), vocab("llama-spm")):
        # SentencePiece spells a space as U+2581, so it cannot tell the two apart.
        kept = text.replace("▁", " ") if tokenizer is vocab("llama-spm") else text
        assert tokenizer.decode(tokenizer.encode(text)) == kept


def streamed(tokenizer: Tokenizer, ids: list[int], cuts: list[int], skip_special: bool = False) -> list[str]:
    """The pieces of a stream that is handed over in parts of the given sizes (0 allowed), then finished."""
    stream = StreamingDetokenizer(tokenizer, skip_special=skip_special)
    pieces, begin = [], 0
    for cut in cuts:
        pieces.append(stream.push(ids[begin : begin + cut]))
        begin += cut
    return [*pieces, stream.push(ids[begin:]), stream.finish()]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.one_of(st.integers(-3, 515), st.integers(90, 260)), max_size=40),  # 90 to 260: many are half characters
    st.lists(st.integers(0, 4), max_size=40),
    st.booleans(),
)
def test_streamed_text_is_whole_text(ids: list[int], cuts: list[int], skip_special: bool) -> None:
    whole = tiny().decode(ids, skip_special=skip_special)
    assert "".join(streamed(tiny(), ids, cuts, skip_special)) == whole


@settings(max_examples=100, deadline=None)
@given(st.text(st.sampled_from("aé日👍🏽\u0301\u200d <"), max_size=12), st.lists(st.integers(0, 3), max_size=20))
def test_streamed_characters_are_never_halved(text: str, cuts: list[int]) -> None:
    assert "\ufffd" not in "".join(streamed(tiny(), tiny().encode(text), cuts))


def test_what_is_certain_is_said_at_once() -> None:
    byte = {tiny().token_bytes(i): i for i in range(256)}
    assert len(byte) == 256

    def pieces(raw: bytes) -> list[str]:
        return streamed(tiny(), [byte[bytes([b])] for b in raw], [1] * len(raw))[: len(raw)]

    assert pieces("aé👍b".encode()) == ["a", "", "é", "", "", "", "👍", "b"]
    assert pieces(b"\xffa") == ["\ufffd", "a"]
    assert pieces(b"\xc3a") == ["", "\ufffda"]
    assert pieces(b"\xf0\x9f\x91a") == ["", "", "", "\ufffda"]
    assert pieces(b"\xe0\x80") == ["", "\ufffd\ufffd"]  # no character begins so: two bytes, two replacements
    stream = StreamingDetokenizer(tiny())
    assert stream.push([byte[b"\xf0"], byte[b"\x9f"]]) == ""
    assert stream.finish() == "\ufffd"  # as when max_tokens cuts a character


def test_random_ids_of_a_large_vocabulary_never_raise() -> None:
    draw = random.Random(15)
    for pre in ("qwen35", "llama-bpe", "gpt-2", "llama-spm"):
        ids = [draw.randrange(-10, vocab(pre).vocab_size + 10) for _ in range(5000)]
        whole = vocab(pre).decode(ids, continues=True)
        assert "".join(streamed(vocab(pre), ids, [draw.randrange(5) for _ in range(2000)])) == whole
        assert all(vocab(pre).token_text(i).isprintable() for i in ids)


@pytest.mark.parametrize("pre", ["qwen35", "llama-spm"])
def test_large_vocabularies_are_built_fast(pre: str) -> None:
    metadata = vocab_metadata(pre)
    began = time.perf_counter()
    tokenizer = Tokenizer.from_metadata(metadata)
    assert time.perf_counter() - began < 5.0  # 0.4 s where nothing else runs
    began = time.perf_counter()
    for text in (" " * 100_000 + "x", "a" * 100_000, "<" * 100_000, "\n " * 50_000, "é" * 50_000):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert time.perf_counter() - began < 10.0  # 1 s: long runs of one character cost no more than their length
