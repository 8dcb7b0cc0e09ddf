"""A model file from its path to a loaded model, in the order that every command that runs one keeps.

What can be refused cheaply is refused before JAX is imported, and a bar is shown while the weights are read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from sharpi_jax.cli import device
from sharpi_jax.cli.progress import loading_bar

if TYPE_CHECKING:  # api imports JAX, and `--help` must not
    from sharpi_jax.api import Model


def check(*paths: str | None) -> None:
    """Lets the file reader say what is wrong with a path that holds no GGUF file; None is no path.

    Raises:
      CheckpointError: a file cannot be used.
    """
    for path in paths:
        if path is not None and not _begins_as_gguf(path):
            from sharpi_jax.checkpoint.gguf_file import open_gguf

            open_gguf(path)


def load(path: str, mtp_model: str | None, platform: str | None, options: Mapping[str, str]) -> Model:
    """Starts JAX where it should run, and loads the model; `options` are those of api.load.

    Raises:
      OptionError: the platform or an option is not available. CheckpointError: a file cannot be used.
    """
    device.check(platform)
    from sharpi_jax import api  # here, not above: it imports JAX

    with loading_bar() as show:
        return api.load(path, mtp_model=mtp_model, on_progress=show, **options)


def _begins_as_gguf(path: str) -> bool:
    if not (os.path.isfile(path) and os.access(path, os.R_OK)):  # not a pipe: opening one may wait for ever
        return False
    with open(path, "rb") as file:
        return file.read(4) == b"GGUF"
