"""GGUF reading against the gguf package's reader, and against headers that are damaged or crafted."""

import os
import random
import struct
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from crafted import (
    ARRAY,
    BOOL,
    F32,
    F64,
    I8,
    I16,
    I32,
    I64,
    STRING,
    TYPE_F32,
    TYPE_IQ1_S,
    TYPE_Q8_0,
    U8,
    U16,
    U32,
    U64,
    array,
    gguf,
    key,
    tensor,
    text,
)
from fixtures import fixture
from gguf import GGUFReader

from sharpi_jax.checkpoint.gguf_file import GGUFFile, open_gguf
from sharpi_jax.errors import CheckpointError


def opened(tmp_path: Path, raw: bytes) -> GGUFFile:
    path = tmp_path / "model.gguf"
    path.write_bytes(raw)
    return open_gguf(path)


@pytest.mark.parametrize(
    "name",
    ["qwen35-tiny-f32", "qwen35-tiny-bf16", "qwen35-tiny-f16", "qwen35-tiny-q4_0", "qwen35-tiny256-q8_0"],
)
def test_agrees_with_the_gguf_package(name: str) -> None:
    path = fixture(name)
    ours, theirs = open_gguf(path), GGUFReader(path)
    fields = {k: f for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert list(ours.metadata) == list(fields)
    for k, field in fields.items():
        value = ours.metadata[k]
        assert (value.tolist() if isinstance(value, np.ndarray) else value) == field.contents(), k
        kinds = [kind.name for kind in field.types]
        assert ours.metadata_types[k] == (kinds[0] if len(kinds) == 1 else f"ARRAY[{kinds[1]}]")
    assert (ours.version, ours.alignment) == (3, 32)
    assert list(ours.tensors) == [t.name for t in theirs.tensors]
    for t in theirs.tensors:
        info = ours.tensors[t.name]
        assert (list(info.dims), info.type_id, info.type_name) == (
            t.shape.tolist(),
            t.tensor_type.value,
            t.tensor_type.name,
        )
        assert (info.offset, info.nbytes, info.n_elements) == (t.data_offset, t.n_bytes, t.n_elements)
        raw = ours.raw(t.name)
        assert raw.shape[:-1] == info.dims[:0:-1]
        np.testing.assert_array_equal(raw, np.ascontiguousarray(t.data).view(np.uint8).reshape(raw.shape))
        assert not raw.flags.writeable


def test_every_kind_of_value(tmp_path: Path) -> None:
    keys = [
        key("u8", U8, b"\xff"),
        key("i8", I8, b"\xff"),
        key("u16", U16, b"\xfe\xff"),
        key("i16", I16, b"\xfe\xff"),
        key("u32", U32, b"\xff" * 4),
        key("i32", I32, b"\xff" * 4),
        key("f32", F32, struct.pack("<f", 1.5)),
        key("yes", BOOL, b"\x01"),
        key("no", BOOL, b"\x00"),
        key("text", STRING, text("héllo")),
        key("u64", U64, b"\xff" * 8),
        key("i64", I64, b"\xff" * 8),
        key("f64", F64, struct.pack("<d", -0.25)),
        key("texts", ARRAY, array(STRING, 3, text("a") + text("") + text("日本"))),
        key("flags", ARRAY, array(BOOL, 3, b"\x00\x01\x02")),
        key("shorts", ARRAY, array(I16, 2, struct.pack("<hh", -2, 7))),
        key("none", ARRAY, array(STRING, 0)),
    ]
    file = opened(tmp_path, gguf(keys, version=2))
    expected = {"u8": 255, "i8": -1, "u16": 65534, "i16": -2, "u32": 2**32 - 1, "i32": -1, "f32": 1.5}
    expected |= {"yes": True, "no": False, "text": "héllo", "u64": 2**64 - 1, "i64": -1, "f64": -0.25}
    assert {name: file.metadata[name] for name in expected} == expected
    assert file.metadata["texts"] == ["a", "", "日本"]
    assert file.metadata["none"] == []
    assert file.metadata["flags"].dtype == bool
    assert file.metadata["flags"].tolist() == [False, True, True]
    assert file.metadata["shorts"].dtype == np.int16
    assert file.metadata["shorts"].tolist() == [-2, 7]
    assert file.metadata_types["texts"] == "ARRAY[STRING]"
    assert file.metadata_types["u8"] == "UINT8"
    assert file.version == 2


def test_alignment_and_shapes(tmp_path: Path) -> None:
    """Data begins at the next multiple of the file's own alignment; rows of blocks stay packed."""
    data = bytes(range(128)) + bytes(128)
    file = opened(
        tmp_path,
        gguf(
            [key("general.alignment", U32, struct.pack("<I", 128))],
            [tensor("q", [64, 3], TYPE_Q8_0), tensor("v", [2], TYPE_F32, 128 * 2)],
            data + b"\x00\x00\x80\x3f\x00\x00\x00\x40",
            alignment=128,
        ),
    )
    assert file.alignment == 128
    assert file.tensors["q"].offset % 128 == 0
    assert file.tensors["q"].nbytes == 2 * 34 * 3  # two blocks of 34 bytes in each of three rows
    assert file.raw("q").shape == (3, 68)
    assert file.raw("q")[1, 0] == 68
    assert file.raw("v").view("<f4").tolist() == [1.0, 2.0]
    with pytest.raises(CheckpointError, match=r"no tensor 'w'"):
        file.raw("w")


def test_a_known_type_that_no_engine_supports_is_listed(tmp_path: Path) -> None:
    assert opened(tmp_path, gguf([], [tensor("x", [256], TYPE_IQ1_S)], bytes(50))).tensors["x"].type_name == "IQ1_S"


HUGE = 2**63
CRAFTED = {
    "string array of 2^63": (gguf([key("k", ARRAY, array(STRING, HUGE))]), "9223372036854775808 elements at .*'k'"),
    "number array of 2^63": (gguf([key("k", ARRAY, array(F64, HUGE))]), "9223372036854775808 elements"),
    "array of 2^61 + 1 wraps to 8": (gguf([key("k", ARRAY, array(U64, 2**61 + 1, bytes(8)))]), "array of"),
    "array ends early": (gguf([key("k", ARRAY, array(U32, 100, bytes(4)))]), "array of 100 elements"),
    "nested array": (gguf([key("k", ARRAY, array(ARRAY, 1, array(U8, 1, b"x")))]), "nests arrays"),
    "deeply nested arrays": (gguf([key("k", ARRAY, array(ARRAY, 1) * 9999)]), "nests arrays"),
    "value type 99": (gguf([key("k", 99, bytes(64))]), "unknown value type 99 .*'k'"),
    "array of type 99": (gguf([key("k", ARRAY, array(99, 1, bytes(64)))]), "unknown value type 99"),
    "2^64 - 1 keys": (gguf(n_keys=2**64 - 1, data=bytes(64)), "18446744073709551615 metadata keys"),
    "2^64 - 1 tensors": (gguf(n_tensors=2**64 - 1, data=bytes(64)), "18446744073709551615 tensors"),
    "a key of 2^63 bytes": (gguf([struct.pack("<Q", HUGE) + bytes(32)]), "string of 9223372036854775808 bytes"),
    "a key of 2^64 - 1 bytes": (gguf([struct.pack("<Q", 2**64 - 1) + bytes(32)]), "string of 18446744073709551615"),
    "a string of 2^63 bytes": (gguf([key("k", STRING, struct.pack("<Q", HUGE))]), "string of 92233"),
    "a string in an array of 2^64 - 9 bytes": (
        gguf([key("k", ARRAY, array(STRING, 1, struct.pack("<Q", 2**64 - 9)))]),
        "element 0 of 1",
    ),
    "string array ends early": (gguf([key("k", ARRAY, array(STRING, 2, text("abc")))]), "array of 2|element 1 of 2"),
    "a key that is not UTF-8": (gguf([key(b"\xff", U8, b"x")]), "not UTF-8"),
    "a value that is not UTF-8": (gguf([key("k", STRING, text(b"\xc3("))]), "not UTF-8 .*'k'"),
    "an element that is not UTF-8": (
        gguf([key("k", ARRAY, array(STRING, 2, text("a") + text(b"\x80")))]),
        "not UTF-8 at element 1",
    ),
    "a key twice": (gguf([key("k", U8, b"x"), key("k", U8, b"y")]), "key 'k' twice"),
    "alignment 0": (gguf([key("general.alignment", U32, bytes(4))]), "alignment 0"),
    "alignment 24": (gguf([key("general.alignment", U32, struct.pack("<I", 24))]), "alignment 24"),
    "alignment true": (gguf([key("general.alignment", BOOL, b"\x01")]), "alignment True"),
    "alignment of text": (gguf([key("general.alignment", STRING, text("x" * 9999))]), "alignment 'xxx"),
    "2^32 - 1 dimensions": (gguf([], [tensor("t", [1] * 4, n_dims=2**32 - 1)]), "4294967295 dimensions .*'t'"),
    "no dimensions": (gguf([], [tensor("t", [])], bytes(32)), "0 dimensions .*'t'"),
    "a dimension of 0": (gguf([], [tensor("t", [0, 4])], bytes(32)), "dimension of 0 .*'t'"),
    "a product of 2^64": (gguf([], [tensor("t", [2**32, 2**32])], bytes(32)), "'t' ends at byte"),
    "a product of 2^252": (gguf([], [tensor("t", [2**63] * 4)], bytes(32)), "'t' ends at byte"),
    "an offset past the end": (gguf([], [tensor("t", [4], offset=64)], bytes(16)), "'t' ends at byte .*: 64"),
    "an offset of 2^64 - 32": (gguf([], [tensor("t", [4], offset=2**64 - 32)], bytes(16)), "'t' ends at byte"),
    "an offset that is not aligned": (gguf([], [tensor("t", [4], offset=8)], bytes(64)), "offset 8.*alignment 32"),
    "an unknown tensor type": (gguf([], [tensor("t", [4], 4711)], bytes(64)), "'t' in the unknown type 4711"),
    "a removed tensor type": (gguf([], [tensor("t", [32], 4)], bytes(64)), "'t' in the unknown type 4"),
    "rows that blocks do not fill": (gguf([], [tensor("t", [48, 2], TYPE_Q8_0)], bytes(200)), "rows of 48.*Q8_0.* 32"),
    "a tensor twice": (gguf([], [tensor("t", [4]), tensor("t", [4])], bytes(64)), "tensor 't' twice"),
    "version 1": (gguf(version=1), "version 1"),
    "version 4": (gguf(version=4), "version 4"),
    "big-endian": (gguf(version=3 << 24), "big-endian"),
    "an older format": (b"tjgg" + bytes(64), "not a GGUF"),
    "a page of a web site": (b"<!DOCTYPE html>", "not a GGUF"),
    "two bytes": (b"GG", "not a GGUF"),
    "the magic number alone": (b"GGUF", "cut short in its header.*: at least 4"),
    "a name with line breaks": (gguf([], [tensor("a\nb" * 9999, [4], 4711)], bytes(64)), r"unknown type 4711"),
}


@pytest.mark.parametrize("case", CRAFTED)
def test_crafted_headers_end_in_one_sentence(tmp_path: Path, case: str) -> None:
    raw, message = CRAFTED[case]
    path = tmp_path / "crafted.gguf"
    path.write_bytes(raw)
    tracemalloc.start()
    began = time.perf_counter()
    try:
        with pytest.raises(CheckpointError, match=message) as caught:
            open_gguf(path)
        assert time.perf_counter() - began < 1.0
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()
    sentence = str(caught.value)
    assert str(path) in sentence
    assert "\n" not in sentence
    assert len(sentence) < 400 + len(str(path))


@pytest.mark.parametrize(
    "header",
    [
        gguf(n_keys=2**30),
        gguf(n_tensors=2**30),
        gguf([key("k", STRING, struct.pack("<Q", 2**33))]),
        gguf([key("k", ARRAY, array(STRING, 2**32))]),
        gguf([key("k", ARRAY, array(U8, 2**33))]),
        gguf([struct.pack("<Q", 2**33)]),
        gguf([], [struct.pack("<Q", 2**33)]),
    ],
)
def test_a_sparse_file_does_not_lift_the_bounds(tmp_path: Path, header: bytes) -> None:
    """64 GB on paper: what a header claims would fit into the file, and must be refused all the same."""
    path = tmp_path / "sparse.gguf"
    with path.open("wb") as file:
        file.write(header)
        file.truncate(1 << 36)
    began = time.perf_counter()
    with pytest.raises(CheckpointError):
        open_gguf(path)
    assert time.perf_counter() - began < 1.0


def test_a_file_cut_anywhere_says_so(tmp_path: Path) -> None:
    whole = fixture("qwen35-tiny-q4_0").read_bytes()
    draw = random.Random(7)
    lengths = [*draw.sample(range(4, 20_000), 150), *draw.sample(range(20_000, len(whole)), 20), len(whole) - 1]
    for length in lengths:
        with pytest.raises(CheckpointError, match=r"cut short|ends inside|left for them|are left"):
            opened(tmp_path, whole[:length])
    with pytest.raises(CheckpointError, match=r"missing bytes: 5\)"):
        opened(tmp_path, whole[:-5])


def test_what_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        open_gguf(tmp_path / "absent.gguf")
    with pytest.raises(CheckpointError, match="is a folder"):
        open_gguf(str(tmp_path))
    with pytest.raises(CheckpointError, match="cannot be opened"):
        open_gguf("a\0b")
    with pytest.raises(CheckpointError, match="cannot be opened"):
        open_gguf("x" * 10_000)
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(CheckpointError, match="is empty"):
        open_gguf(tmp_path / "empty.gguf")
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(CheckpointError, match="not a regular file"):
        open_gguf(tmp_path / "pipe.gguf")

    def refuse(*_: object) -> None:
        raise PermissionError("no")

    (tmp_path / "locked.gguf").write_bytes(gguf())
    monkeypatch.setattr(Path, "open", refuse)  # the tests may run as a user who may read everything
    with pytest.raises(CheckpointError, match="may not be read"):
        open_gguf(tmp_path / "locked.gguf")


def _damage(raw: bytearray, header_bytes: int, draw: random.Random) -> bytearray:
    """One to three small changes in the header."""
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(header_bytes)
        kind = draw.randrange(5)
        if kind == 0:
            raw[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            raw[at : at + 4] = draw.randbytes(4)
        elif kind == 2:
            raw[at : at + 8] = draw.choice([2**63, 2**64 - 1, 2**32 - 1, 2**31, 0, 1, 2**40]).to_bytes(8, "little")
        elif kind == 3:
            del raw[at : at + draw.randint(1, 16)]
        else:
            raw[at:at] = draw.randbytes(draw.randint(1, 16))
    return raw


def test_two_thousand_damaged_headers(tmp_path: Path) -> None:
    """Each opens or is refused in a sentence: no other exception, no hang, no large allocation."""
    source = fixture("qwen35-tiny-q4_0")
    whole = source.read_bytes()
    header_bytes = min(info.offset for info in open_gguf(source).tensors.values())
    draw = random.Random(13)
    path = tmp_path / "damaged.gguf"
    complaints = []
    tracemalloc.start()
    try:
        for _ in range(2000):
            path.write_bytes(_damage(bytearray(whole), header_bytes, draw))
            tracemalloc.reset_peak()
            began = time.perf_counter()
            try:
                file = open_gguf(path)
            except CheckpointError as error:
                complaints.append(str(error))
            else:
                assert all(file.raw(name).size == info.nbytes for name, info in file.tensors.items())
            assert time.perf_counter() - began < 1.0
            assert tracemalloc.get_traced_memory()[1] < 8_000_000
    finally:
        tracemalloc.stop()
    assert not any("\n" in complaint for complaint in complaints)
    assert 500 < len(complaints) < 2000  # the damage is neither harmless nor always fatal


def test_a_large_vocabulary_is_read_fast(tmp_path: Path) -> None:
    """A quarter of a million tokens and as many merges: more than any Qwen model has."""
    words = b"".join(text(f"token{index}") for index in range(250_000))
    keys = [key("tokens", ARRAY, array(STRING, 250_000, words)), key("merges", ARRAY, array(STRING, 250_000, words))]
    began = time.perf_counter()
    file = opened(tmp_path, gguf([*keys, key("types", ARRAY, array(I32, 250_000, bytes(1_000_000)))]))
    assert time.perf_counter() - began < 2.0  # 0.2 s where nothing else runs
    assert file.metadata["merges"][-1] == "token249999"
