"""Text to token ids and back, from a GGUF file's own vocabulary.

What must not go wrong here: the ids are those that llama.cpp gives for the same file. So special tokens are taken out
of the text before anything else sees it, and decoding joins bytes before it reads UTF-8, because one character may be
spread over several tokens.
"""

import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from sharpi_jax.checkpoint.byte_level import ByteLevel, check_pre
from sharpi_jax.checkpoint.sentencepiece import SentencePiece
from sharpi_jax.checkpoint.vocabulary import TokenType, Vocabulary, flag, number_list, shown, string_list
from sharpi_jax.errors import CheckpointError

_SPELLED_OUT = (TokenType.UNKNOWN, TokenType.CONTROL, TokenType.USER_DEFINED)  # their text stands for itself


class Subwords(Protocol):
    """How one kind of vocabulary cuts text that holds no special tokens."""

    def encode(self, text: str) -> list[int]:
        """The ids of a text, which is not empty."""
        ...

    def token_bytes(self, token: str) -> bytes:
        """The bytes that a normal token stands for."""
        ...

    def commonest(self, count: int) -> np.ndarray:
        """The ids of the `count` tokens that training made first, hence the most frequent in its text."""
        ...


class Tokenizer:
    """Text to token ids and back, for one model file."""

    def __init__(
        self, vocabulary: Vocabulary, subwords: Subwords, *, add_bos: bool = False, add_space: bool = False
    ) -> None:
        """Put the parts together.

        Args:
            vocabulary: the file's tokens.
            subwords: what cuts text into them.
            add_bos: whether a prompt begins with the vocabulary's BOS, where it has one.
            add_space: whether text gets a space in front, at its beginning and after a special token.
        """
        self._vocabulary = vocabulary
        self._subwords = subwords
        self._add_space = add_space
        # llama.cpp looks for the unknown token in the text as well.
        self._special_ids = vocabulary.of_type(*_SPELLED_OUT)
        self._special = _longest_first(self._special_ids)
        self._user_defined = _longest_first(vocabulary.of_type(TokenType.USER_DEFINED))
        self.vocab_size = len(vocabulary.tokens)
        self.bos_id = vocabulary.bos_id
        self.eos_id = vocabulary.eos_id
        self.stop_ids = vocabulary.stop_ids
        self.add_bos = add_bos and self.bos_id is not None

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> "Tokenizer":
        """Build the tokenizer that a GGUF file describes.

        Args:
            metadata: the file's metadata, as `open_gguf` gives it.

        Raises:
            CheckpointError: there is no tokenizer, or one of a kind that is not supported, or a damaged one.
        """
        model = metadata.get("tokenizer.ggml.model")
        if model is None:
            raise CheckpointError(
                "the model file holds no tokenizer (no key tokenizer.ggml.model); use a complete one."
            )
        if isinstance(model, str) and model == "gpt2":
            return cls._byte_level(metadata)
        if isinstance(model, str) and model == "llama":
            return cls._sentencepiece(metadata)
        raise CheckpointError(
            f"the model file's tokenizer kind {shown(model)} is not supported; use a model with byte-level BPE "
            "('gpt2') or SentencePiece BPE ('llama')."
        )

    @classmethod
    def _byte_level(cls, metadata: Mapping[str, Any]) -> "Tokenizer":
        pre = check_pre(metadata.get("tokenizer.ggml.pre"))
        vocabulary = Vocabulary.from_metadata(metadata)
        subwords = ByteLevel(vocabulary, string_list(metadata, "tokenizer.ggml.merges"), pre)
        # Where the key is absent llama.cpp adds a BOS for the llama-bpe pattern and for none of the others.
        return cls(vocabulary, subwords, add_bos=flag(metadata, "add_bos_token", pre == "llama-bpe"))

    @classmethod
    def _sentencepiece(cls, metadata: Mapping[str, Any]) -> "Tokenizer":
        # What the keys leave open is as in the first LLaMA.
        size = len(string_list(metadata, "tokenizer.ggml.tokens"))
        bos, eos = (1, 2) if size > 2 else (None, None)
        vocabulary = Vocabulary.from_metadata(metadata, bos_id=bos, eos_id=eos)
        scores = number_list(metadata, "tokenizer.ggml.scores", size) or [0.0] * size
        return cls(
            vocabulary,
            SentencePiece(vocabulary, scores),
            add_bos=flag(metadata, "add_bos_token", True),
            add_space=flag(metadata, "add_space_prefix", True),
        )

    def encode(self, text: str, *, parse_special: bool = True) -> list[int]:
        """The token ids of a text, without a BOS.

        Args:
            text: any text; a lone surrogate counts as U+FFFD.
            parse_special: whether the text of a control token gives that token. User-defined tokens always do.
        """
        try:
            text.encode()
        except UnicodeEncodeError:
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        ids: list[int] = []
        for index, part in enumerate(_cut(text, self._special if parse_special else self._user_defined)):
            if index % 2:
                ids.append(self._special_ids[part])
            elif part:
                ids += self._subwords.encode(" " + part if self._add_space else part)
        return ids

    def encode_prompt(self, text: str, *, parse_special: bool = True) -> list[int]:
        """As `encode`, with the BOS in front where the model wants one and the text does not begin with it."""
        ids = self.encode(text, parse_special=parse_special)
        if self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = False, continues: bool = False) -> str:
        """The text of token ids. It never raises: invalid bytes become U+FFFD, unknown ids give nothing.

        Args:
            ids: any integers.
            skip_special: whether control tokens are left out.
            continues: whether the ids carry on from others, as a model's output does. If not, they are taken for what
                `encode` makes of a text, and the spaces that it put in front are taken away again.
        """
        pieces: list[bytes] = []
        strips = self._add_space and not continues
        after_special = True  # as at the beginning
        for token_id in ids:
            piece = self.token_bytes(token_id)
            special = self._vocabulary.type_of(token_id) in _SPELLED_OUT
            if not (skip_special and self.is_special(token_id)):
                pieces.append(piece.removeprefix(b" ") if strips and after_special and not special else piece)
            after_special = special
        return b"".join(pieces).decode("utf-8", errors="replace")

    def draft_ids(self, count: int) -> np.ndarray:
        """Ids, ascending: the `count` commonest as far as a vocabulary tells, and all special and user-defined ones."""
        return np.union1d(self._subwords.commonest(count), self._spelled_out)

    @cached_property
    def _spelled_out(self) -> np.ndarray:
        return np.flatnonzero(np.isin(self._vocabulary.types, _SPELLED_OUT))

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; none for an unused slot or an id outside the vocabulary."""
        kind = self._vocabulary.type_of(token_id)
        if kind is None or kind == TokenType.UNUSED:
            return b""
        text = self._vocabulary.tokens[token_id]
        if kind in _SPELLED_OUT:
            return text.encode()
        if kind == TokenType.BYTE and re.fullmatch("<0x[0-9A-Fa-f]{2}>", text):
            return bytes.fromhex(text[3:5])
        return self._subwords.token_bytes(text)

    def token_text(self, token_id: int) -> str:
        """A printable form of one token for traces: partial characters and control characters are escaped."""
        kind = self._vocabulary.type_of(token_id)
        if kind is None:
            return f"[id {token_id}]"
        unused = kind == TokenType.UNUSED
        raw = self._vocabulary.tokens[token_id].encode() if unused else self.token_bytes(token_id)
        text = raw.decode("utf-8", errors="backslashreplace")
        return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)

    def is_special(self, token_id: int) -> bool:
        """Whether a token steers the model (control or unknown) rather than standing for text."""
        return self._vocabulary.type_of(token_id) in (TokenType.CONTROL, TokenType.UNKNOWN)


def _longest_first(texts: Iterable[str]) -> list[str]:
    return sorted(texts, key=lambda text: len(text.encode()), reverse=True)


def _cut(text: str, special: Iterable[str]) -> list[str]:
    """Cut the special texts out: text and special text by turns, text first and last, which may be empty.

    A longer one is cut out wherever it occurs before a shorter one is looked for, as llama.cpp does; so of two that
    overlap the longer counts, not the first.
    """
    parts = [text]
    for found in (candidate for candidate in special if candidate in text):
        pieces: list[str] = []
        for index, part in enumerate(parts):
            if index % 2:
                pieces.append(part)
            else:
                first, *others = part.split(found)
                pieces.append(first)
                for other in others:
                    pieces += [found, other]
        parts = pieces
    return parts
