"""The demo model's tokenizer: byte-level BPE under the qwen35 pattern, trained with `tokenizers`."""

import dataclasses
import json
from typing import Any

import numpy as np
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from sharpi_jax.checkpoint.byte_level import pre_tokenizer
from sharpi_jax.checkpoint.tokenizer import Tokenizer

SIZE = 4096
END = "<|endoftext|>"


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """Token texts in id order (byte-level spelling, `END` last) and the merges, "left right", best first."""

    tokens: list[str]
    merges: list[str]

    @property
    def end_id(self) -> int:
        return self.tokens.index(END)

    def metadata(self) -> dict[str, Any]:
        """The GGUF keys, as llama.cpp's converter writes them for Qwen3.5: type 1 is a normal token, 3 control."""
        return {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "qwen35",
            "tokenizer.ggml.tokens": self.tokens,
            "tokenizer.ggml.token_type": np.array([3 if text == END else 1 for text in self.tokens], np.int32),
            "tokenizer.ggml.merges": self.merges,
            "tokenizer.ggml.eos_token_id": self.end_id,
            "tokenizer.ggml.padding_token_id": self.end_id,
            "tokenizer.ggml.add_bos_token": False,
        }

    def tokenizer(self) -> Tokenizer:
        """The package's own tokenizer of this vocabulary."""
        return Tokenizer.from_metadata(self.metadata())


def train_vocabulary(texts: list[str], size: int = SIZE) -> Vocabulary:
    """A vocabulary of `size` tokens: the 256 bytes, size - 257 merges, and END."""
    engine = tokenizers.Tokenizer(models.BPE())
    engine.pre_tokenizer = pre_tokenizer("qwen35")
    trainer = trainers.BpeTrainer(
        vocab_size=size - 1, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    engine.train_from_iterator(texts, trainer)
    model = json.loads(engine.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return Vocabulary([*tokens, END], [" ".join(pair) for pair in model["merges"]])


def token_stream(vocabulary: Vocabulary, texts: list[str]) -> np.ndarray:
    """All texts as one array of ids, each ended by the end token."""
    tokenizer = vocabulary.tokenizer()
    return np.concatenate([[*tokenizer.encode(text), vocabulary.end_id] for text in texts]).astype(np.int32)
