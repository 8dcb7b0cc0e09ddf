"""Split models: opened by any shard, and every set of shards that does not belong together refused by name."""

import os
import struct
import time
from pathlib import Path

import models
import pytest
from crafted import ARRAY, BOOL, F32, I32, STRING, U8, U16, U64, array, gguf, key, tensor, text
from gguf import GGUFReader, GGUFWriter
from models import same_params

from sharpi_jax import checkpoint
from sharpi_jax.checkpoint import gguf_file
from sharpi_jax.checkpoint.gguf_file import open_gguf
from sharpi_jax.cli.main import main
from sharpi_jax.errors import CheckpointError
from tools.gguf_writing import add_metadata, finish, metadata_of

TINY = "qwen35-tiny-f16"


def split(folder: Path, source: str, **how: int) -> list[Path]:
    """A fixture split by the gguf package's own writer, as NAME-00001-of-0000n.gguf."""
    reader = GGUFReader(models.fixture(source))
    writer = GGUFWriter(folder / "model.gguf", "qwen35", **how)
    add_metadata(writer, metadata_of(reader))
    for t in reader.tensors:
        writer.add_tensor(t.name, t.data, raw_dtype=t.tensor_type)
    finish(writer)
    return sorted(folder.glob("model-*-of-*.gguf"))


@pytest.mark.parametrize("metadata_only_first", [False, True])
def test_any_shard_opens_the_whole_model(tmp_path: Path, metadata_only_first: bool) -> None:
    paths = split(tmp_path, TINY, split_max_tensors=30, small_first_shard=metadata_only_first)
    assert len(paths) == (4 if metadata_only_first else 3)
    assert len(GGUFReader(paths[0]).tensors) == (0 if metadata_only_first else 30)
    whole = models.read(TINY)
    for path in paths:
        read = checkpoint.read(path)
        assert read.file.path == paths[0]
        assert (read.config, read.notes) == (whole.config, whole.notes)
        assert same_params(read.params, whole.params)
        assert read.tokenizer.encode("Why does") == whole.tokenizer.encode("Why does")
        assert list(read.file.tensors) == list(whole.file.tensors)


def test_inspect_describes_the_whole_model_from_any_shard(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = split(tmp_path, TINY, split_max_tensors=30)
    size = sum(path.stat().st_size for path in paths)
    outputs = set()
    for path in paths:
        assert main(["inspect", str(path), "--tensors"]) == 0
        outputs.add(capsys.readouterr().out)
    (output,) = outputs
    assert main(["inspect", str(models.fixture(TINY)), "--tensors"]) == 0
    whole = capsys.readouterr().out
    first, rest = output.split("\n", 1)
    assert first.split()[1:] == f"{paths[0]} ({size / 1e3:.2f} kB, GGUF version 3, the first of 3 files)".split()
    assert rest == whole.split("\n", 1)[1]


# --- what does not belong together ------------------------------------------------------------------------------------

ONE, TWO, THREE = (f"m-0000{n}-of-00003.gguf" for n in (1, 2, 3))


def number(name: str, value: int, kind: int = U16) -> bytes:
    formats = {U8: "<B", U16: "<H", I32: "<i", U64: "<Q", F32: "<f", BOOL: "<?"}
    return key(f"split.{name}", kind, struct.pack(formats[kind], value))


def shard(no: int, count: int = 3, total: int | None = 3, architecture: str = "", name: str = "") -> bytes:
    """A shard with one tensor of 16 bytes, called t0, t1, ..."""
    keys = [number("no", no), number("count", count)]
    keys += [number("tensors.count", total, I32)] if total is not None else []
    keys += [key("general.architecture", STRING, text(architecture))] if architecture else []
    return gguf(keys, [tensor(name or f"t{no}", [4])], bytes([no % 256] * 16))


def write(folder: Path, **changes: bytes | None) -> None:
    """Three shards that belong together, with changes by their letter; None leaves one out."""
    for name, no, letter in zip((ONE, TWO, THREE), range(3), "abc", strict=True):
        raw = changes.get(letter, shard(no, architecture="" if no else "qwen35"))
        if raw is not None:
            (folder / name).write_bytes(raw)


def refusal(path: Path) -> str:
    began = time.perf_counter()
    with pytest.raises(CheckpointError) as caught:
        open_gguf(path)
    assert time.perf_counter() - began < 1.0
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    assert len(message) < 500 + 2 * len(str(path))
    return message


def test_shards_that_belong_together(tmp_path: Path) -> None:
    write(tmp_path)
    for name in (ONE, TWO, THREE):
        file = open_gguf(tmp_path / name)
        assert [file.raw(f"t{n}").tolist() for n in range(3)] == [[n] * 16 for n in range(3)]
        assert [mapped.path.name for mapped in file.files] == [ONE, TWO, THREE]
    for letter, no in zip("abc", range(3), strict=True):  # the count of tensors may be left out
        write(tmp_path, **{letter: shard(no, total=None)} if letter != "a" else {})
        assert len(open_gguf(tmp_path / TWO).tensors) == 3


@pytest.mark.parametrize("opened", [ONE, TWO, THREE])
@pytest.mark.parametrize("missing", [ONE, TWO, THREE])
def test_a_missing_shard_is_named(tmp_path: Path, opened: str, missing: str) -> None:
    if opened == missing:
        return
    write(tmp_path)
    (tmp_path / missing).unlink()
    message = refusal(tmp_path / opened)
    assert f"{tmp_path / opened} is one of 3 shards of a model, and {missing} is missing" in message


def test_two_missing_shards_are_counted_and_a_broken_link_is_missing(tmp_path: Path) -> None:
    write(tmp_path, a=None, c=None)
    os.symlink(tmp_path / "nowhere", tmp_path / THREE)
    assert f"{ONE} and 1 more are missing" in refusal(tmp_path / TWO)


@pytest.mark.parametrize(
    ("changes", "named", "says"),
    [
        ({"b": shard(1, count=4)}, TWO, "is not shard 2 of 3"),
        ({"b": shard(2)}, TWO, "is not shard 2 of 3"),
        ({"b": shard(1), "c": shard(1)}, THREE, "is not shard 3 of 3"),
        ({"b": gguf([], [tensor("t1", [4])], bytes(16))}, TWO, "is not shard 2 of 3"),
        ({"b": gguf([number("no", 1)], [tensor("t1", [4])], bytes(16))}, TWO, "is not shard 2 of 3"),
        ({"b": gguf([key("split.no", STRING, text("1"))])}, TWO, "gives '1' as split.no"),
        ({"b": b"GGUF"}, TWO, "cut short"),
        ({"b": b"<html>"}, TWO, "not a GGUF"),
        ({"c": shard(2, total=4)}, THREE, "its split.tensors.count is 4, not 3"),
        ({"c": shard(2, architecture="llama")}, THREE, "its general.architecture is 'llama', not 'qwen35'"),
        ({"c": shard(2, name="t0")}, THREE, f"holds the tensor 't0', which {ONE} holds too"),
        ({letter: shard(no, total=4) for no, letter in enumerate("abc")}, ONE, "hold 3 tensors together.*promises 4"),
        ({letter: shard(no, total=2) for no, letter in enumerate("abc")}, ONE, "hold 3 tensors together.*promises 2"),
        ({"a": shard(0, total=0), "b": shard(1, total=None)}, THREE, "its split.tensors.count is 3, not 0"),
    ],
)
def test_a_foreign_shard_is_named(tmp_path: Path, changes: dict[str, bytes], named: str, says: str) -> None:
    write(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=says) as caught:
        open_gguf(tmp_path / ONE)
    assert str(caught.value).startswith(str(tmp_path / named))
    with pytest.raises(CheckpointError):
        open_gguf(tmp_path / THREE)


# --- crafted headers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "keys", "says"),
    [
        ("m-00001-of-65535.gguf", [number("count", 65535), number("no", 0)], "one of 65535 shards, where at most 512"),
        ("m-00001-of-00512.gguf", [number("count", 512), number("no", 0)], "00002-of-00512.gguf and 510 more are"),
        (ONE, [number("count", 65535), number("no", 0)], "number 1 of 65535 shards .* its name does not say so"),
        (ONE, [number("count", 2**63, U64), number("no", 0)], "gives 9223372036854775808 as split.count"),
        (ONE, [number("count", -1, I32), number("no", 0)], "gives -1 as split.count"),
        (ONE, [number("count", 3, F32), number("no", 0)], "gives 3.0 as split.count"),
        (ONE, [number("count", 1, BOOL), number("no", 0)], "gives True as split.count"),
        (ONE, [key("split.count", STRING, text("3" * 10_000)), number("no", 0)], "gives '333.* as split.count"),
        (ONE, [key("split.count", ARRAY, array(U16, 1, b"\3\0")), number("no", 0)], "as split.count"),
        (ONE, [number("count", 3), number("no", -1, I32)], "gives -1 as split.no"),
        (ONE, [number("count", 3), number("no", 3)], "number 4 of 3 shards"),
        (ONE, [number("count", 3), number("no", 1)], "number 2 of 3 shards"),
        (ONE, [number("count", 3)], "is one of 3 shards .* its name does not say so"),
        ("m.gguf", [number("count", 3), number("no", 0)], "like NAME-00001-of-00003.gguf"),
        ("m-1-of-3.gguf", [number("count", 3), number("no", 0)], "like NAME-00001-of-00003.gguf"),
        ("m-00001-of-00002.gguf", [number("count", 3), number("no", 0)], "like NAME-00001-of-00003.gguf"),
    ],
)
def test_crafted_split_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, keys: list[bytes], says: str
) -> None:
    opened: list[Path] = []
    read = gguf_file.read_gguf
    monkeypatch.setattr(gguf_file, "read_gguf", lambda path: opened.append(path) or read(path))
    (tmp_path / name).write_bytes(gguf(keys))
    (tmp_path / "m-00002-of-65535.gguf").write_bytes(gguf(keys))
    with pytest.raises(CheckpointError, match=says):
        open_gguf(tmp_path / name)
    refusal(tmp_path / name)
    assert len(opened) == 2  # once for each of the two calls: no other file was opened


@pytest.mark.parametrize("keys", [[number("count", 0)], [number("count", 1), number("no", 0)], [number("no", 7)]])
def test_a_file_that_is_not_split(tmp_path: Path, keys: list[bytes]) -> None:
    """A count of 0 is what llama-gguf-split leaves in a file that it merged."""
    path = tmp_path / "merged.gguf"
    path.write_bytes(gguf([*keys, number("tensors.count", 99, I32)], [tensor("t", [4])], bytes(16)))
    assert [mapped.path for mapped in open_gguf(path).files] == [path]


def test_as_many_shards_as_are_allowed(tmp_path: Path) -> None:
    for no in range(512):
        (tmp_path / f"m-{no + 1:05}-of-00512.gguf").write_bytes(shard(no, 512, 512, name=f"t{no}"))
    began = time.perf_counter()
    assert len(open_gguf(tmp_path / "m-00300-of-00512.gguf").tensors) == 512
    assert time.perf_counter() - began < 1.0
