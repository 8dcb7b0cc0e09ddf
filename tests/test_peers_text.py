"""Token ids, texts and chat prompts against a live llama-server: `SHARPI_PEERS=FOLDER pytest -m peers` (see peers.py).

The stored tables hold the package to what llama-server once said; these tests hold it to what it says today, about a
part of the tables and about vocabularies made up for the purpose.
"""

from pathlib import Path

import chat_cases
import gguf
import numpy as np
import pytest
import test_sentencepiece as made
import tokenizer_strings
import vocabularies
from peers import found, llama_server

from sharpi_jax.checkpoint.tokenizer import Tokenizer
from tools.gguf_writing import finish
from tools.peers import templates, vocabulary

pytestmark = pytest.mark.peers


@pytest.mark.parametrize("kind", vocabularies.KINDS)
def test_stored_ids_and_texts(kind: str, tmp_path: Path) -> None:
    found()  # fails before the work
    model = tmp_path / "model.gguf"
    vocabulary.wrap(vocabularies.unpack(kind, tmp_path), model, pre=kind)
    tokenizer = vocabularies.tokenizer(kind)
    _, ids = vocabularies.stored_ids(kind)
    with llama_server(model, *vocabulary.FLAGS) as server:
        for text, stored in list(zip(tokenizer_strings.strings(), ids, strict=True))[::10]:
            assert server.tokenize(text) == stored == tokenizer.encode(text)
            assert server.ask("detokenize", {"tokens": stored})["content"] == tokenizer.decode(stored, continues=True)


def _write(path: Path, pieces: dict[str, float]) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in made.spm(pieces).items():
        if isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_array(name, value.tolist() if isinstance(value, np.ndarray) else value)
    finish(writer)


@pytest.mark.parametrize("seed", [None, *range(5)])
def test_merging_by_score(seed: int | None, tmp_path: Path) -> None:
    """The vocabulary worked out by hand (None), and random ones in which most scores are equal."""
    found()
    pieces, texts = (made.LETTERS, list(made.CASES)) if seed is None else (made.random_pieces(seed), [])
    _write(tmp_path / "vocabulary.gguf", pieces)
    vocabulary.wrap(tmp_path / "vocabulary.gguf", tmp_path / "model.gguf")
    tokenizer = Tokenizer.from_metadata(made.spm(pieces))
    with llama_server(tmp_path / "model.gguf", *vocabulary.FLAGS) as server:
        for text in texts or made.random_texts(seed or 0, 200):
            assert server.tokenize(text) == tokenizer.encode(text), text


@pytest.mark.parametrize("name", [name for name in chat_cases.SOURCES if name != "qwen2"])  # a large vocabulary: slow
def test_stored_prompts(name: str) -> None:
    stored = chat_cases.stored()
    with templates.serving(found().server, name) as server:
        if name == chat_cases.CHATML:
            assert server.properties()["chat_template"] == stored["chatml"]
        for case in stored["prompts"]:
            if case["template"] == name:
                assert templates.ask(server, case) == case["prompt"]
