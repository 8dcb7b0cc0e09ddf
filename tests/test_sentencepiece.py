"""SentencePiece vocabularies: merging by score, worked out by hand, and the spaces in front.

The ids of a real vocabulary are compared in test_tokenizer.py and test_tokenizer_peer.py. Those of `LETTERS` are also
asked of a live llama-server, in test_peers_text.py, together with vocabularies made at random.
"""

import random
from typing import Any

import numpy as np
import pytest

from sharpi_jax.checkpoint.detokenizer import StreamingDetokenizer
from sharpi_jax.checkpoint.tokenizer import Tokenizer
from sharpi_jax.errors import CheckpointError

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def spm(pieces: dict[str, float], **changes: Any) -> dict[str, Any]:
    """The metadata of a vocabulary: <unk>, <s>, </s>, the bytes from 3 on, then the pieces with their scores."""
    tokens = ["<unk>", "<s>", "</s>", *BYTES, *pieces]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.array([0.0] * 259 + list(pieces.values()), np.float32),
        "tokenizer.ggml.token_type": np.array([2, 3, 3] + [6] * 256 + [1] * len(pieces), np.int32),
    }
    named = {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    return {name: value for name, value in (metadata | named).items() if value is not None}


def random_pieces(seed: int) -> dict[str, float]:
    """A vocabulary of short pieces with few different scores, the space, and letters that are no pieces themselves."""
    draw = random.Random(seed)
    made = {"".join(draw.choice("abcd▁é") for _ in range(draw.randint(1, 4))): draw.randint(-3, 0) for _ in range(60)}
    return {"▁": -9.0} | {piece: float(score) for piece, score in made.items()}


def random_texts(seed: int, count: int) -> list[str]:
    """Texts of the letters that `random_pieces` knows and of some that it does not."""
    draw = random.Random(seed)
    return ["".join(draw.choice("abcdé  x日<") for _ in range(draw.randint(1, 20))) for _ in range(count)]


LETTERS = {
    "▁": -9.0,
    "a": -9.0,
    "b": -9.0,
    "c": -9.0,
    "ab": -2.0,
    "ba": -2.0,
    "bc": -1.0,
    "▁▁": -3.0,
    "éa": -4.0,
    "aéa": -4.0,
}
CASES = {
    "aba": "▁ ab a",  # of equal scores the leftmost pair: no fixed order of "ab" and "ba" can do both
    "bab": "▁ ba b",
    "abc": "▁ a bc",  # the higher score, though it comes later
    "abcba": "▁ a bc ba",
    "  a": "▁▁ ▁ a",
    "éa": "▁ éa",  # é is no token, but what it makes with a is
    "aéa": "▁ aéa",
    "é": "▁ <0xC3> <0xA9>",
    "a\n日": "▁ a <0x0A> <0xE6> <0x97> <0xA5>",
    "<0x41>": "▁ <0x3C> <0x30> <0x78> <0x34> <0x31> <0x3E>",  # spelled out in the text it is no byte token
    "a<s>b": "▁ a <s> ▁ b",
    "<s></s> a": "<s> </s> ▁▁ a",
    "<unk>": "<unk>",
}


@pytest.mark.parametrize("text", CASES)
def test_merging_worked_out_by_hand(text: str) -> None:
    metadata = spm(LETTERS)
    tokenizer = Tokenizer.from_metadata(metadata)
    ids = [metadata["tokenizer.ggml.tokens"].index(piece) for piece in CASES[text].split()]
    assert tokenizer.encode(text) == ids
    assert tokenizer.decode(ids) == text


def test_without_a_space_in_front() -> None:
    tokenizer = Tokenizer.from_metadata(spm(LETTERS, add_space_prefix=False))
    assert tokenizer.decode(tokenizer.encode("a")) == "a"
    assert [tokenizer.token_bytes(i) for i in tokenizer.encode(" a<s>b")] == [b" ", b"a", b"<s>", b"b"]
    assert tokenizer.decode(tokenizer.encode(" a<s> b")) == " a<s> b"


def test_what_the_keys_leave_open() -> None:
    """BOS 1 and EOS 2, a BOS in front, a space in front: as in llama.cpp."""
    tokenizer = Tokenizer.from_metadata(spm(LETTERS))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.stop_ids, tokenizer.add_bos) == (1, 2, (2,), True)
    assert [tokenizer.token_bytes(i) for i in tokenizer.encode_prompt("a")] == [b"<s>", b" ", b"a"]
    assert tokenizer.encode_prompt("<s>a") == tokenizer.encode_prompt("a")
    assert tokenizer.decode(tokenizer.encode_prompt("a b"), skip_special=True) == "a b"
    told = Tokenizer.from_metadata(spm(LETTERS, bos_token_id=2, eos_token_id=1, add_bos_token=False))
    assert (told.bos_id, told.eos_id, told.stop_ids, told.add_bos) == (2, 1, (1, 2), False)
    unscored = Tokenizer.from_metadata(spm(LETTERS, scores=None))  # all scores equal: always the leftmost pair
    assert [unscored.token_bytes(i) for i in unscored.encode("abc")] == [b" ", b"ab", b"c"]


def test_an_output_keeps_its_first_space() -> None:
    """What a model writes carries on from the prompt: its first space stands between two words."""
    tokenizer = Tokenizer.from_metadata(spm(LETTERS))
    ids = tokenizer.encode("a b<s>a")
    assert tokenizer.decode(ids) == "a b<s>a"
    assert tokenizer.decode(ids, continues=True) == " a b<s> a"
    stream = StreamingDetokenizer(tokenizer)
    assert "".join([*(stream.push([i]) for i in ids), stream.finish()]) == " a b<s> a"


def test_random_vocabularies_give_the_text_back() -> None:
    for seed in range(5):
        tokenizer = Tokenizer.from_metadata(spm(random_pieces(seed)))
        for text in random_texts(seed, 100):
            assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": ["<unk>", "a"], "token_type": None, "scores": None}, "has no token <0x00>.*byte fallback"),
        ({"scores": np.zeros(3, np.float32)}, "tokenizer.ggml.scores does not cover its 269 tokens"),
        ({"scores": ["high"] * 269}, "tokenizer.ggml.scores does not cover"),
        ({"tokens": None}, "no list of strings at tokenizer.ggml.tokens"),
    ],
)
def test_refused_vocabularies(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        Tokenizer.from_metadata(spm(LETTERS, **changes))
    assert "\n" not in str(caught.value)
