"""Fixtures and other GGUF files written again with changes, for what a reader must refuse or put up with."""

import re
from pathlib import Path

import gguf
import models
import numpy as np

from tools.gguf_writing import add_metadata, finish, metadata_of

ABSENT = object()  # as a metadata value: the key is left out


def rewrite(path, source, *, meta=None, drop=None, rename=None, add=None):
    """Writes a file again with changes, and returns `path`.

    Args:
      source: a fixture's name, or a path.
      meta: metadata by key, in place of the file's or beside it; the architecture's keys less their prefix.
      drop: a pattern of tensor names to leave out. rename: names by name. add: arrays by name, or (bytes, type).
    """
    reader = gguf.GGUFReader(source if isinstance(source, Path) else models.fixture(source))
    architecture = reader.fields["general.architecture"].contents()
    meta = {
        key if key.startswith(("general.", "tokenizer.")) else f"{architecture}.{key}": v
        for key, v in (meta or {}).items()
    }
    writer = gguf.GGUFWriter(path, meta.pop("general.architecture", architecture))
    add_metadata(writer, {name: field for name, field in metadata_of(reader).items() if name not in meta})
    for name, value in meta.items():
        if value is not ABSENT:
            writer.add_key_value(name, value, gguf.GGUFValueType.get_type(value))
    for tensor in reader.tensors:
        name = (rename or {}).get(tensor.name, tensor.name)
        if not (drop and re.fullmatch(drop, name)) and name not in (add or {}):
            writer.add_tensor(name, tensor.data, raw_dtype=tensor.tensor_type)
    for name, data in (add or {}).items():
        array, kind = data if isinstance(data, tuple) else (data, None)
        writer.add_tensor(name, array, raw_dtype=kind)
    finish(writer)
    return path


def tensors(source, pattern):
    """Tensors of a fixture whose names match, as `rewrite` takes them."""
    found = gguf.GGUFReader(models.fixture(source)).tensors
    return {t.name: (np.array(t.data), t.tensor_type) for t in found if re.fullmatch(pattern, t.name)}
