"""A GGUF file's tokens and what they are for, whatever way text is cut into them."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Any

from sharpi_jax.errors import CheckpointError

# llama.cpp knows the following tokens by their text and takes them for control tokens even where the file gives them
# another type (Qwen's "</s>" is a normal token there, and models do write it). It ends generation at these, because
# many files name only one of the two or three that their model uses; the last lines end an infilling. The lists were
# found by giving it each text as the one unusual token of a vocabulary.
_END_OF_TURN = {
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
    *("<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<eos>"),
    *("<end_of_utterance>", "<turn|>", "<｜end▁of▁sentence｜>", "<|tool_response>", "[e~["),
    *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|file_sep|>"),
    *("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
}
# The other marks of an infilling: control tokens that end nothing.
_INFILLING = {
    *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>", "<|code_prefix|>"),
    *("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>", "<|code_suffix|>"),
    *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>", "<|code_middle|>"),
    *("<|prefix|>", "<|suffix|>", "<|middle|>"),
}


class TokenType(IntEnum):
    """The values of tokenizer.ggml.token_type that matter here."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The tokens of a file.

    Attributes:
      tokens: their texts, by id, as the file spells them.
      types: their kinds, by id, as values of `TokenType`.
      ids: text to id; of two tokens with one text the later counts.
      bos_id, eos_id: the tokens that begin and end a text.
      stop_ids: the tokens at which generation ends, in order.
    """

    tokens: Sequence[str]
    types: Sequence[int]
    ids: Mapping[str, int]
    bos_id: int | None
    eos_id: int | None
    stop_ids: tuple[int, ...]

    @classmethod
    def from_metadata(
        cls, metadata: Mapping[str, Any], *, bos_id: int | None = None, eos_id: int | None = None
    ) -> "Vocabulary":
        """Read it from a GGUF file's metadata.

        Args:
            metadata: the file's metadata, as `open_gguf` gives it.
            bos_id: what holds where the file names none; likewise eos_id.

        Raises:
            CheckpointError: there are no tokens, or what is said about them does not fit.
        """
        tokens = string_list(metadata, "tokenizer.ggml.tokens")
        types = _token_types(metadata, len(tokens))
        ids = {text: index for index, text in enumerate(tokens)}
        by_text = {ids[text] for text in _END_OF_TURN if text in ids}
        for index in by_text | {ids[text] for text in _INFILLING if text in ids}:
            types[index] = TokenType.CONTROL
        bos, eos = _token_id(metadata, "bos", len(tokens), bos_id), _token_id(metadata, "eos", len(tokens), eos_id)
        named = (eos, *(_token_id(metadata, name, len(tokens)) for name in ("eot", "eom")))
        stops = by_text | {stop for stop in named if stop is not None}
        return cls(tokens, types, ids, bos, eos, tuple(sorted(stops)))

    def type_of(self, token_id: int) -> int | None:
        """The kind of a token; None for an id outside the vocabulary."""
        return self.types[token_id] if 0 <= token_id < len(self.tokens) else None

    def of_type(self, *kinds: int) -> dict[str, int]:
        """Text to id of all tokens of some kinds, those without a text left out."""
        return {text: index for text, index in self.ids.items() if text and self.types[index] in kinds}


def shown(value: object) -> str:
    """A value of the file for a message: on one line, and short whatever the file holds."""
    return " ".join(repr(value).split())[:120]


def listed(names: Iterable[str]) -> str:
    """Names for a message."""
    return ", ".join(names)


def string_list(metadata: Mapping[str, Any], key: str) -> list[str]:
    """The list of strings at a key.

    Raises:
        CheckpointError: there is none.
    """
    values = metadata.get(key)
    if not isinstance(values, list):
        raise CheckpointError(f"the model file holds no list of strings at {key}; convert the model again.")
    return values


def flag(metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    """The true or false at tokenizer.ggml.NAME.

    Raises:
        CheckpointError: it is something else.
    """
    value = metadata.get(f"tokenizer.ggml.{name}", default)
    if not isinstance(value, bool):
        raise CheckpointError(
            f"the model file's tokenizer.ggml.{name} is {shown(value)}, not true or false; convert the model again."
        )
    return value


def number_list(metadata: Mapping[str, Any], key: str, count: int) -> list[Any] | None:
    """The numbers at a key, one for each of `count` tokens; None without the key.

    Raises:
        CheckpointError: they are too few, or no list.
    """
    values = metadata.get(key)
    if values is None:
        return None
    numbers = getattr(values, "tolist", lambda: None)()
    if not isinstance(numbers, list) or len(numbers) < count:
        raise CheckpointError(f"the model file's {key} does not cover its {count} tokens; convert the model again.")
    return numbers[:count]


def _token_types(metadata: Mapping[str, Any], count: int) -> list[int]:
    """The kind of each token; without the key all are normal."""
    types = number_list(metadata, "tokenizer.ggml.token_type", count)
    return [int(TokenType.NORMAL)] * count if types is None else types


def _token_id(metadata: Mapping[str, Any], name: str, vocab_size: int, default: int | None = None) -> int | None:
    """The id at tokenizer.ggml.NAME_token_id, or the default without the key."""
    key = f"tokenizer.ggml.{name}_token_id"
    value = metadata.get(key, default)
    if value == 2**32 - 1:  # -1, as some converters write what there is not
        return default
    if value is not None and not (isinstance(value, int) and 0 <= value < vocab_size):
        raise CheckpointError(
            f"the model file's {key} is {shown(value)}, which is no id of its {vocab_size} tokens; convert the "
            "model again."
        )
    return value
