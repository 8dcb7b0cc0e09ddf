"""GGUF files byte by byte, for headers that no writer would write. Not part of the package."""

import struct
from collections.abc import Iterable

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)  # the format's value types
TYPE_F32, TYPE_Q8_0, TYPE_IQ1_S = 0, 8, 19


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def key(name: str | bytes, kind: int, payload: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + payload


def array(item: int, count: int, payload: bytes = b"") -> bytes:
    return struct.pack("<IQ", item, count) + payload


def tensor(
    name: str | bytes, dims: Iterable[int], kind: int = TYPE_F32, offset: int = 0, n_dims: int | None = None
) -> bytes:
    sizes = list(dims)
    count = len(sizes) if n_dims is None else n_dims
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", count, *sizes, kind, offset)


def gguf(
    keys: Iterable[bytes] = (),
    tensors: Iterable[bytes] = (),
    data: bytes = b"",
    *,
    version: int = 3,
    n_keys: int | None = None,
    n_tensors: int | None = None,
    alignment: int = 32,
) -> bytes:
    keys, tensors = list(keys), list(tensors)
    counts = struct.pack(
        "<QQ", len(tensors) if n_tensors is None else n_tensors, len(keys) if n_keys is None else n_keys
    )
    header = b"GGUF" + struct.pack("<I", version) + counts + b"".join(keys) + b"".join(tensors)
    return header + bytes(-len(header) % alignment) + data
