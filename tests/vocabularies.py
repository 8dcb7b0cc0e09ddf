"""The vocabularies in tests/data/vocab, by the name of their kind.

The files are llama.cpp's own vocabulary-only ones, but for smollm, which is SmolLM2's (tools/peers/vocabulary.py). The
qwen2 file of llama.cpp's set has the tokens and merges of the qwen35 one, so it is not stored twice.
"""

import json
import lzma
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from sharpi_jax.checkpoint.gguf_file import open_gguf
from sharpi_jax.checkpoint.tokenizer import Tokenizer

FOLDER = Path(__file__).parent / "data" / "vocab"
KINDS = ("qwen35", "qwen2", "gpt-2", "llama-bpe", "smollm", "llama-spm")
_FILES = {"qwen2": "qwen35"}


def unpack(kind: str, folder: str | Path) -> Path:
    """The GGUF file that holds a kind's tokens, written into the folder; see `metadata` for its pre-tokenizer."""
    path = Path(folder) / f"{kind}-vocabulary.gguf"
    path.write_bytes(lzma.decompress((FOLDER / f"{_FILES.get(kind, kind)}.gguf.xz").read_bytes()))
    return path


@cache
def metadata(kind: str) -> dict[str, Any]:
    """A kind's metadata; the pre-tokenizer is the kind's own, whatever file the tokens are from."""
    with tempfile.TemporaryDirectory() as folder:
        return {**open_gguf(unpack(kind, folder)).metadata, "tokenizer.ggml.pre": kind}


@cache
def tokenizer(kind: str) -> Tokenizer:
    """The package's tokenizer of a kind."""
    return Tokenizer.from_metadata(metadata(kind))


def stored_ids(kind: str) -> tuple[str, list[list[int]]]:
    """llama-server's ids of the strings of tokenizer_strings.py, and a SHA-256 of the strings that it was given."""
    stored = json.loads(lzma.decompress((FOLDER / f"{kind}.ids.json.xz").read_bytes()))
    return stored["strings"], stored["ids"]
