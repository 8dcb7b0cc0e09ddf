"""Opening a model: one GGUF file, or the shards of a split one, joined.

A split model's files are called NAME-00001-of-00003.gguf and so on, and each says in its metadata which one it is
(`split.no`, from 0), of how many (`split.count`), and how many tensors they hold together (`split.tensors.count`). The
model's metadata are those of the first. What must not go wrong: a shard of another model passes for one of this, or a
header that claims 65535 shards is believed.
"""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType

from sharpi_jax.checkpoint.gguf_header import GGUFFile, TensorInfo, quoted, read_gguf
from sharpi_jax.errors import CheckpointError

__all__ = ["GGUFFile", "TensorInfo", "open_gguf"]

_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
_MAX_SHARDS = 512  # each takes a file descriptor, of which a process has 1024; published models have some 60 at most


def open_gguf(path: str | Path) -> GGUFFile:
    """Reads a model's header and maps its file; of a split model any shard may be given, and all are read and mapped.

    Raises:
      CheckpointError: a file is missing, unreadable, no little-endian GGUF of version 2 or 3, damaged or cut short, or
        does not belong to the others.
    """
    file = read_gguf(Path(path))
    count = _split_key(file, "count") or 1  # 0 in a merged file: so llama-gguf-split writes it
    return file if count == 1 else _join(_shards(file, count))


def _split_key(file: GGUFFile, name: str) -> int | None:
    """One of the `split.` keys; None where the file has none."""
    value = file.metadata.get(f"split.{name}")
    if value is not None and (type(value) is not int or not 0 <= value < 2**31):
        raise CheckpointError(
            f"{file.path} gives {quoted(value)} as split.{name}, which is no such number; "
            "the file is damaged or crafted, so download it again."
        )
    return value


def _shards(opened: GGUFFile, count: int) -> list[GGUFFile]:
    """The shards of the model that `opened` is one of, first to last, each known to be in its place."""
    paths = _paths(opened, count)
    missing = [p.name for p in paths if not p.exists()]
    if missing:
        more = f" and {len(missing) - 1} more are" if len(missing) > 1 else " is"
        raise CheckpointError(
            f"{opened.path} is one of {count} shards of a model, and {missing[0]}{more} missing; "
            "put them all into one folder."
        )
    shards: list[GGUFFile] = []
    for index, path in enumerate(paths):
        shard = opened if path == opened.path else read_gguf(path)
        if (_split_key(shard, "no"), _split_key(shard, "count")) != (index, count):
            raise CheckpointError(
                f"{path} is not shard {index + 1} of {count} by its own metadata, as its name and "
                f"{opened.path.name} have it; download it again."
            )
        shards.append(shard)
    return shards


def _paths(opened: GGUFFile, count: int) -> list[Path]:
    """Where the shards must lie, first to last: beside the one that is open, under the same name."""
    path, number = opened.path, _split_key(opened, "no")
    name = _NAME.fullmatch(path.name)
    if number is None or number >= count or not name or (int(name[2]), int(name[3])) != (number + 1, count):
        place = "one" if number is None else f"number {number + 1}"
        raise CheckpointError(
            f"{path} is {place} of {count} shards by its metadata, and its name does not say so; "
            f"give it the name it was published with, like NAME-00001-of-{count:05}.gguf."
        )
    if count > _MAX_SHARDS:
        raise CheckpointError(
            f"{path} is one of {count} shards, where at most {_MAX_SHARDS} can be opened; "
            "merge them with llama-gguf-split --merge."
        )
    return [path.with_name(f"{name[1]}-{n:05}-of-{count:05}.gguf") for n in range(1, count + 1)]


def _join(shards: Sequence[GGUFFile]) -> GGUFFile:
    """The shards as one, if they are of one model: the first one's metadata, and the tensors of all."""
    first = shards[0]
    tensors: dict[str, TensorInfo] = {}
    for shard in shards:
        for what in ("split.tensors.count", "general.architecture"):  # the latter is seldom in any but the first
            own, known = shard.metadata.get(what), first.metadata.get(what)
            if own is not None and quoted(own) != quoted(known):
                raise CheckpointError(
                    f"{shard.path} belongs to another model than {first.path.name}: its {what} is {quoted(own)}, "
                    f"not {quoted(known)}; download both again."
                )
        for name, info in shard.tensors.items():
            if name in tensors:
                raise CheckpointError(
                    f"{shard.path} holds the tensor {quoted(name)}, which {tensors[name].file.path.name} holds too; "
                    "one of them belongs to another model."
                )
            tensors[name] = info
    promised = _split_key(first, "tensors.count")
    if promised is not None and promised != len(tensors):
        raise CheckpointError(
            f"{first.path}: its {len(shards)} shards hold {len(tensors)} tensors together, where split.tensors.count "
            f"promises {promised}; one of them belongs to another model, so download them again."
        )
    files = tuple(file for shard in shards for file in shard.files)
    return dataclasses.replace(first, tensors=MappingProxyType(tensors), files=files)
