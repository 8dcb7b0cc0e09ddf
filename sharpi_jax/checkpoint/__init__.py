"""Reading a model file: `read(path)` is the only place where config, weights and tokenizer meet."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from sharpi_jax.checkpoint.chat import ChatTemplate
from sharpi_jax.checkpoint.config import read_config
from sharpi_jax.checkpoint.gguf_file import GGUFFile, open_gguf
from sharpi_jax.checkpoint.tokenizer import Tokenizer
from sharpi_jax.model.config import ModelConfig

if TYPE_CHECKING:  # the params are JAX arrays, and looking at a file must not wait for JAX
    from sharpi_jax.model.params import ModelParams

__all__ = ["ChatTemplate", "Checkpoint", "GGUFFile", "Tokenizer", "open_gguf", "read"]


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A model file, read. `notes` are remarks for the user, a line each; a file may have no chat template (None)."""

    file: GGUFFile
    config: ModelConfig
    params: ModelParams
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    notes: tuple[str, ...]


def read(path: str | Path) -> Checkpoint:
    """Reads a GGUF file; weights go to the device packed as they are, those of rare types as bfloat16.

    Raises:
      CheckpointError: the file cannot be used; one sentence says why.
    """
    from sharpi_jax.checkpoint.weights import read_weights

    file = open_gguf(path)
    config, notes = read_config(file)
    tokenizer = Tokenizer.from_metadata(file.metadata)
    template = ChatTemplate.from_metadata(file.metadata)
    params, more = read_weights(file, config)
    return Checkpoint(file, config, params, tokenizer, template, (*notes, *more))
