"""Bounded reading of one GGUF file's header (versions 2 and 3).

What must not go wrong here: a header is somebody else's data. Every count and length is compared with the bytes that
are left in the file, and with a fixed ceiling, before anything is allocated or looped over, so a crafted or damaged
header ends in one sentence and never in a hang or a memory fault. A file may be sparse (large on paper, empty on the
disk), so "it fits into the file" alone is not a bound. Tensor data is not read here: a `TensorInfo` says where it lies,
and `GGUFFile` hands it out.
"""

import math
import reprlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from sharpi_jax.checkpoint.mapped_file import Bytes, MappedFile
from sharpi_jax.errors import CheckpointError

_SCALARS = {  # value type: (struct and numpy code, bytes)
    GGUFValueType.UINT8: ("<B", 1),
    GGUFValueType.INT8: ("<b", 1),
    GGUFValueType.UINT16: ("<H", 2),
    GGUFValueType.INT16: ("<h", 2),
    GGUFValueType.UINT32: ("<I", 4),
    GGUFValueType.INT32: ("<i", 4),
    GGUFValueType.FLOAT32: ("<f", 4),
    GGUFValueType.BOOL: ("<B", 1),
    GGUFValueType.UINT64: ("<Q", 8),
    GGUFValueType.INT64: ("<q", 8),
    GGUFValueType.FLOAT64: ("<d", 8),
}
_U64 = struct.Struct("<Q")

# Ceilings with an order of magnitude to spare over any published model; reading up to one takes about a second.
_MAX_ARRAY_ELEMENTS = 1 << 22  # the largest vocabularies have 0.26 million tokens and 0.5 million merges
_MAX_TEXT_BYTES = 1 << 24  # chat templates have about 10 kB
_MAX_NAME_BYTES = (1 << 16) - 1  # the format's own limit for keys
_MAX_DIMS = 4  # ggml's own limit
_MIN_KEY_VALUE_BYTES = 8 + 4 + 1  # length of an empty key, value type, one byte of value
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8  # length of an empty name, count of dims, one dim, type, offset

_SHORT = reprlib.Repr()  # the file's own names appear in messages, escaped and clipped: they may be 64 kB of anything
_SHORT.maxstring = _SHORT.maxother = 100
quoted = _SHORT.repr


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies and what it holds.

    `dims` are in GGUF order (in-features first; a NumPy shape is the reverse), `offset` is absolute in `file`.
    """

    name: str
    dims: tuple[int, ...]
    type_id: int
    type_name: str
    offset: int
    nbytes: int
    file: MappedFile = field(repr=False)

    @property
    def n_elements(self) -> int:
        """The number of weights."""
        return math.prod(self.dims)


@dataclass(frozen=True)
class GGUFFile:
    """A model's metadata and tensors, from one file or from several that were joined.

    `metadata` holds Python scalars and strings; arrays of numbers or flags are NumPy arrays, arrays of strings lists.
    `metadata_types` names each value's type for display. `tensors` is in the files' order. `path`, `version`,
    `alignment` and the metadata are those of the first of `files`.
    """

    path: Path
    version: int
    alignment: int
    metadata: Mapping[str, Any]
    metadata_types: Mapping[str, str]
    tensors: Mapping[str, TensorInfo]
    files: tuple[MappedFile, ...] = field(repr=False)

    def raw(self, name: str) -> Bytes:
        """One tensor's packed bytes, without a copy: a read-only view of the file.

        Args:
            name: the tensor's name in the file.

        Returns:
            Shape: the reverse of `dims` with the last axis counted in bytes.

        Raises:
            CheckpointError: the file has no such tensor.
        """
        info = self._info(name)
        return info.file.view(info.offset, info.nbytes).reshape(*info.dims[:0:-1], -1)

    def load(self, name: str) -> Bytes:
        """As `raw`, but copied into memory for the device to take over, with no page of the map left behind."""
        info = self._info(name)
        return info.file.copy(info.offset, info.nbytes).reshape(*info.dims[:0:-1], -1)

    def _info(self, name: str) -> TensorInfo:
        info = self.tensors.get(name)
        if info is None:
            raise CheckpointError(
                f"{self.path} has no tensor {quoted(name)}; it cannot be used as a model of this kind."
            )
        return info


def read_gguf(path: Path) -> GGUFFile:
    """Map one file and read its header; shards of a split model are joined by `gguf_file.open_gguf`.

    Raises:
        CheckpointError: the file is missing, unreadable, no little-endian GGUF of version 2 or 3, damaged or cut short.
    """
    return _Reader(MappedFile(path)).read()


class _Reader:
    """One pass over the header. `_need` stands before every read, so nothing past the end is ever touched."""

    def __init__(self, file: MappedFile) -> None:
        self._file = file
        self._path = file.path
        self._data = file.data
        self._size = file.size
        self._pos = 0
        self._where = "its first bytes"  # what is being read, for the messages
        self._string_budget = _MAX_ARRAY_ELEMENTS  # over all string arrays: each string costs a Python object

    def read(self) -> GGUFFile:
        """The whole header, in the file's order."""
        version = self._preamble()
        n_tensors = self._count("tensors", _MIN_TENSOR_BYTES)
        n_keys = self._count("metadata keys", _MIN_KEY_VALUE_BYTES)
        metadata: dict[str, Any] = {}
        types: dict[str, str] = {}
        for index in range(n_keys):
            self._where = f"metadata key {index}"
            key = self._text(_MAX_NAME_BYTES)
            if key in metadata:
                self._fail(f"holds the metadata key {quoted(key)} twice")
            self._where = f"metadata key {quoted(key)}"
            types[key], metadata[key] = self._value()
        alignment = self._alignment(metadata)
        tensors = self._tensors(n_tensors, alignment)
        self._file.release(0, self._pos)
        return GGUFFile(
            path=self._path,
            version=version,
            alignment=alignment,
            metadata=MappingProxyType(metadata),
            metadata_types=MappingProxyType(types),
            tensors=MappingProxyType(tensors),
            files=(self._file,),
        )

    def _fail(self, problem: str, fix: str = "the file is damaged or crafted, so download it again") -> NoReturn:
        raise CheckpointError(f"{self._path} {problem}; {fix}.")

    def _need(self, nbytes: int) -> int:
        """Claim the next `nbytes` and return where they begin."""
        start = self._pos
        if nbytes > self._size - start:
            missing = nbytes - (self._size - start)
            self._fail(
                f"is cut short in its header: {self._where} goes beyond the file's {self._size} bytes "
                f"(missing bytes: at least {missing})",
                "download it again",
            )
        self._pos = start + nbytes
        return start

    def _scalar(self, code: str, nbytes: int) -> Any:
        return struct.unpack_from(code, self._data, self._need(nbytes))[0]

    def _u32(self) -> int:
        return int(self._scalar("<I", 4))

    def _u64(self) -> int:
        return int(self._scalar("<Q", 8))

    def _preamble(self) -> int:
        """Check the magic number and return the version."""
        magic = self._data[: min(4, self._size)]
        if magic != b"GGUF":
            self._fail(f"is not a GGUF file (it begins with {magic!r})", "give a .gguf file")
        self._need(4)
        self._where = "the version"
        version = self._u32()
        if version in (2, 3):
            return version
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        if swapped in (1, 2, 3):
            self._fail("is a big-endian GGUF file", "only little-endian files are supported, so convert it again")
        self._fail(f"is a GGUF file of version {version}", "versions 2 and 3 are supported, so convert it again")

    def _count(self, what: str, min_bytes: int) -> int:
        """A number of items, each of which takes at least `min_bytes` of what is left."""
        self._where = f"the number of {what}"
        count = self._u64()
        left = self._size - self._pos
        if count > left // min_bytes:
            self._fail(f"claims to hold {count} {what} and has only {left} bytes left for them")
        return count

    def _text(self, limit: int) -> str:
        length = self._u64()
        if length > self._size - self._pos or length > limit:
            self._fail(
                f"gives a string of {length} bytes at {self._where}, where {self._size - self._pos} bytes are left "
                f"and at most {limit} are allowed"
            )
        start = self._need(length)
        try:
            return str(self._data[start : start + length], "utf-8")
        except UnicodeDecodeError:
            self._fail(f"has text that is not UTF-8 at {self._where}")

    def _value_type(self) -> GGUFValueType:
        type_id = self._u32()
        try:
            return GGUFValueType(type_id)
        except ValueError:
            self._fail(f"gives the unknown value type {type_id} at {self._where}")

    def _value(self) -> tuple[str, Any]:
        """A value with its type's name."""
        kind = self._value_type()
        if kind == GGUFValueType.STRING:
            return kind.name, self._text(_MAX_TEXT_BYTES)
        if kind != GGUFValueType.ARRAY:
            value = self._scalar(*_SCALARS[kind])
            return kind.name, bool(value) if kind == GGUFValueType.BOOL else value
        item = self._value_type()
        if item == GGUFValueType.ARRAY:
            self._fail(f"nests arrays at {self._where}, which no supported model does")
        item_bytes = 8 if item == GGUFValueType.STRING else _SCALARS[item][1]  # 8: the length of an empty string
        count = self._u64()
        left = self._size - self._pos
        if count > left // item_bytes or count > _MAX_ARRAY_ELEMENTS:
            self._fail(
                f"claims an array of {count} elements at {self._where}, where {left} bytes are left and at most "
                f"{_MAX_ARRAY_ELEMENTS} elements are allowed"
            )
        name = f"ARRAY[{item.name}]"
        if item == GGUFValueType.STRING:
            return name, self._texts(count)
        code = _SCALARS[item][0]
        # A copy: the bytes in the file are unaligned, and bounded by the ceiling above.
        values = np.frombuffer(self._data, code, count, self._need(count * item_bytes)).copy()
        return name, values != 0 if item == GGUFValueType.BOOL else values

    def _texts(self, count: int) -> list[str]:
        """An array of strings, with as little work for each as possible: vocabularies have hundreds of thousands."""
        self._string_budget -= count
        if self._string_budget < 0:
            self._fail(f"holds more than {_MAX_ARRAY_ELEMENTS} strings in its arrays")
        data, pos, size, length_at = self._data, self._pos, self._size, _U64.unpack_from
        texts: list[str] = []
        append = texts.append
        try:
            for _ in range(count):
                start = pos + 8
                pos = start + length_at(data, pos)[0]
                if pos > size:
                    break
                append(str(data[start:pos], "utf-8"))
        except UnicodeDecodeError:
            self._fail(f"has text that is not UTF-8 at element {len(texts)} of {self._where}")
        except struct.error:  # the length itself lies past the end
            pos = size + 1
        if pos > size:
            self._fail(
                f"ends inside {self._where}: element {len(texts)} of {count} reaches past the file's {size} bytes",
                "download it again",
            )
        self._pos = pos
        return texts

    def _alignment(self, metadata: Mapping[str, Any]) -> int:
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
            self._fail(f"gives the alignment {quoted(alignment)}, which is no power of two")
        return alignment

    def _tensors(self, count: int, alignment: int) -> dict[str, TensorInfo]:
        """The tensor table; offsets become absolute, and every tensor is checked to lie in the file."""
        infos: dict[str, TensorInfo] = {}
        for index in range(count):
            self._where = f"tensor {index}"
            info = self._tensor(alignment)
            if info.name in infos:
                self._fail(f"holds the tensor {quoted(info.name)} twice")
            infos[info.name] = info
        base = -(-self._pos // alignment) * alignment
        placed = {name: replace(info, offset=base + info.offset) for name, info in infos.items()}
        last = max(placed.values(), key=lambda info: info.offset + info.nbytes, default=None)
        if last is not None and last.offset + last.nbytes > self._size:
            end = last.offset + last.nbytes
            self._fail(
                f"is cut short: tensor {quoted(last.name)} ends at byte {end} and the file at {self._size} "
                f"(missing bytes: {end - self._size})",
                "download it again",
            )
        return placed

    def _tensor(self, alignment: int) -> TensorInfo:
        """One entry of the tensor table, its offset still relative to the data."""
        name = self._text(_MAX_NAME_BYTES)
        self._where = f"tensor {quoted(name)}"
        n_dims = self._u32()
        if not 1 <= n_dims <= _MAX_DIMS:
            self._fail(f"gives {n_dims} dimensions to tensor {quoted(name)}, where 1 to {_MAX_DIMS} are possible")
        dims = tuple(self._u64() for _ in range(n_dims))
        if 0 in dims:
            self._fail(f"gives a dimension of 0 to tensor {quoted(name)}")
        type_id = self._u32()
        offset = self._u64()
        try:
            kind = GGMLQuantizationType(type_id)
            block, block_bytes = GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            self._fail(
                f"stores tensor {quoted(name)} in the unknown type {type_id}",
                "convert the model to a known type, e.g. Q8_0",
            )
        if dims[0] % block:
            self._fail(
                f"gives tensor {quoted(name)} rows of {dims[0]}, which its {kind.name} blocks of {block} do not fill"
            )
        if offset % alignment:
            self._fail(
                f"puts tensor {quoted(name)} at offset {offset}, which is no multiple of its alignment {alignment}"
            )
        nbytes = math.prod(dims) // block * block_bytes
        return TensorInfo(name, dims, type_id, kind.name, offset, nbytes, self._file)
