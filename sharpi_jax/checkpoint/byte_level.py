"""Byte-level BPE (`tokenizer.ggml.model` = gpt2): words are cut out by a named pattern, then bytes are merged by rank.

What must not go wrong here: there is no normaliser (a GGUF carries none, and decomposed text must stay decomposed), and
the split patterns are exactly the named ones.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tokenizers
from tokenizers import pre_tokenizers
from tokenizers.models import BPE

from sharpi_jax.checkpoint.vocabulary import Vocabulary, listed, shown
from sharpi_jax.errors import CheckpointError

_CONTRACTIONS = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_QWEN_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"


def _qwen2(digits: str) -> str:
    words = r"[^\r\n\p{L}\p{N}]?\p{L}+"
    return rf"{_CONTRACTIONS}|{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_QWEN_TAIL}"


# tokenizer.ggml.pre: the patterns, applied one after the other to the pieces of the one before. What no pattern
# matches stays a piece of its own.
_PATTERNS: dict[str, tuple[str, ...]] = {
    "qwen35": (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_QWEN_TAIL}",
    ),
    "qwen2": (_qwen2(r"\p{N}"),),
    "llama-bpe": (_qwen2(r"\p{N}{1,3}"),),
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
}


def _byte_alphabet() -> dict[str, bytes]:
    """The characters that stand for the 256 bytes in a byte-level vocabulary.

    A byte that is a visible Latin-1 character stands for itself, the others take the characters from U+0100 on.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    alphabet = {chr(byte): bytes([byte]) for byte in visible}
    return alphabet | {chr(0x100 + index): bytes([byte]) for index, byte in enumerate(hidden)}


_BYTE_OF = _byte_alphabet()


class ByteLevel:
    """The merge engine of one vocabulary; it knows no special tokens, which are cut out of the text before it."""

    def __init__(self, vocabulary: Vocabulary, merges: Sequence[str], pre: str) -> None:
        """Build the engine.

        Args:
            vocabulary: its tokens are spelled in the byte alphabet.
            merges: "left right" in order of rank.
            pre: the name of the split pattern, as `check_pre` lets it pass.

        Raises:
            CheckpointError: the merges do not fit the tokens.
        """
        self._size = len(vocabulary.tokens)
        pairs = []
        for merge in dict.fromkeys(merges):  # of two equal merges the first counts
            at = merge.find(" ", 1)  # from 1: the left part may itself begin with a space
            if at < 0:
                raise CheckpointError(f"the model file's merge {shown(merge)} is no pair; convert the model again.")
            pairs.append((merge[:at], merge[at + 1 :]))
        try:
            bpe = BPE(vocab=dict(vocabulary.ids), merges=pairs, ignore_merges=pre == "llama-bpe")
            self._engine: Any = tokenizers.Tokenizer(bpe)
        except Exception as error:  # the library raises bare Exceptions: a merge whose parts or result are no tokens
            raise CheckpointError(
                f"the model file's merges do not fit its tokens ({shown(str(error))}); the file is damaged, so "
                "download it again."
            ) from None
        self._engine.pre_tokenizer = pre_tokenizer(pre)

    def encode(self, text: str) -> list[int]:
        """The ids of a text without special tokens. A byte for which the vocabulary has no token gives none."""
        ids: list[int] = self._engine.encode(text, add_special_tokens=False).ids
        return ids

    def commonest(self, count: int) -> np.ndarray:
        """The first `count` ids: a vocabulary lists the bytes and then what was merged, the most frequent first."""
        return np.arange(min(count, self._size))

    def token_bytes(self, token: str) -> bytes:
        """The bytes that a normal token stands for."""
        return b"".join(_BYTE_OF.get(char) or char.encode() for char in token)


def check_pre(pre: object) -> str:
    """The name of a split pattern.

    Raises:
        CheckpointError: it is missing or unknown.
    """
    if not isinstance(pre, str):
        raise CheckpointError(
            f"the model file names no pre-tokenizer (key tokenizer.ggml.pre), where {listed(_PATTERNS)} are "
            "supported; convert the model again with a current converter."
        )
    if pre not in _PATTERNS:
        raise CheckpointError(
            f"the model file's pre-tokenizer {shown(pre)} is not supported; use a model with one of "
            f"{listed(_PATTERNS)}."
        )
    return pre


def pre_tokenizer(pre: str) -> Any:
    """What cuts text into words before the merges, for a `tokenizer.ggml.pre` (a key of _PATTERNS)."""
    splits = [pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated") for pattern in _PATTERNS[pre]]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
