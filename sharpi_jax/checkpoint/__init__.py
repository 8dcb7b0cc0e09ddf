"""Reading a model file: `read(path)` is the only place where config, weights and tokenizer meet."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from sharpi_jax.checkpoint.chat import ChatTemplate
from sharpi_jax.checkpoint.config import read_config
from sharpi_jax.checkpoint.gguf_file import GGUFFile, open_gguf
from sharpi_jax.checkpoint.sidecar import is_head_alone, join_sidecar
from sharpi_jax.checkpoint.tokenizer import Tokenizer
from sharpi_jax.errors import CheckpointError
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


def read(
    path: str | Path,
    mtp_model: str | Path | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    engine: str | None = None,
) -> Checkpoint:
    """Reads a GGUF file, or all shards of a split one; weights go to the device packed, those of rare types as
    bfloat16.

    Args:
      path: the file, or any shard.
      mtp_model: a file that holds an MTP head alone, for this model.
      on_progress: called after each tensor with the bytes that are on the device and the bytes in all.
      engine: what is to multiply by block formats, one of quant.ENGINES; None takes the fastest that there is.

    Raises:
      CheckpointError: a file cannot be used; one sentence says why.
    """
    from sharpi_jax.checkpoint.weights import read_weights
    from sharpi_jax.quant import choose_engine

    file = open_gguf(path)
    if is_head_alone(file):
        raise CheckpointError(
            f"{file.path} holds only an MTP head; give the file that holds the trunk, and this one as --mtp_model."
        )
    file, head_notes = (file, ()) if mtp_model is None else join_sidecar(file, open_gguf(mtp_model))
    config, notes = read_config(file)
    tokenizer = Tokenizer.from_metadata(file.metadata)
    template = ChatTemplate.from_metadata(file.metadata)
    params, weight_notes = read_weights(file, config, engine or choose_engine()[0], on_progress)
    return Checkpoint(file, config, params, tokenizer, template, head_notes + notes + weight_notes)
