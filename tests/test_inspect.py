"""`inspect`: the facts of a file, from its header alone, for files that can be run and for those that cannot."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fixtures import fixture
from gguf import GGUFReader, GGUFWriter

from sharpi_jax.checkpoint.describe import describe
from sharpi_jax.checkpoint.gguf_file import open_gguf
from sharpi_jax.cli.main import main
from tools.gguf_writing import finish

CapSys = pytest.CaptureFixture[str]


def inspect(capsys: CapSys, *argv: str | Path) -> list[str]:
    assert main(["inspect", *map(str, argv)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out.splitlines()


def line(lines: list[str], name: str) -> str:
    return next(text for text in lines if text.startswith(name + ":")).partition(":")[2].strip()


def write(path: Path, architecture: str, tensors: dict[str, Any], **keys: int) -> Path:
    """A small GGUF file: the architecture's integer keys (dots as __), and the tensors."""
    writer = GGUFWriter(path, architecture)
    for key, value in keys.items():
        writer.add_uint32(f"{architecture}.{key.replace('__', '.')}", value)
    for name, array in tensors.items():
        writer.add_tensor(name, array)
    finish(writer)
    return path


@pytest.mark.parametrize(
    "name", ["qwen35-tiny-f32", "qwen35-tiny-q4_0", "qwen35-tiny256-q4_0", "qwen35-tiny-nomtp-f16"]
)
def test_counts_and_shares_are_the_readers(name: str) -> None:
    path = fixture(name)
    facts = describe(open_gguf(path))
    reader = GGUFReader(path)
    assert facts.parameters == sum(int(tensor.n_elements) for tensor in reader.tensors)
    assert facts.file_bytes == path.stat().st_size
    shares = {share.name: (share.tensors, share.nbytes) for share in facts.types}
    for kind in {tensor.tensor_type.name for tensor in reader.tensors}:
        of_kind = [int(tensor.n_bytes) for tensor in reader.tensors if tensor.tensor_type.name == kind]
        assert shares.pop(kind) == (len(of_kind), sum(of_kind))
    assert not shares
    assert list(facts.types) == sorted(facts.types, key=lambda share: -share.nbytes)


def test_summary_of_a_model_with_a_head(capsys: CapSys) -> None:
    lines = inspect(capsys, fixture("qwen35-tiny-q4_0"))
    assert line(lines, "architecture") == "qwen35"
    assert line(lines, "context length") == "4096"
    assert line(lines, "width") == "64"
    assert line(lines, "layers") == "3 gated delta net + 1 attention, 1 MTP"
    assert line(lines, "MTP head") == "yes, block 4"
    assert line(lines, "heads").startswith("4 / 2 (query / key-value) of 32; gated delta net 4 / 2 (value / key) of 16")
    assert line(lines, "tokenizer").startswith("gpt2, pre-tokenizer qwen35, 512 tokens, eos 477 <|im_end|>")
    assert line(lines, "chat template").startswith("yes")
    assert line(lines, "supported") == "yes"
    assert not any(text.startswith("experts") for text in lines)
    assert [text.split()[0] for text in lines[lines.index("quantisation:") + 1 :]] == ["Q4_0", "Q8_0", "F32"]
    assert not any(char < " " or char == "\x7f" for text in lines for char in text)


def test_summary_of_a_model_without_a_head(capsys: CapSys) -> None:
    lines = inspect(capsys, f"--model={fixture('qwen35-tiny-nomtp-f16')}")
    assert line(lines, "layers") == "3 gated delta net + 1 attention"
    assert line(lines, "MTP head") == "no"


def test_summary_of_a_mixture_of_experts(capsys: CapSys) -> None:
    lines = inspect(capsys, fixture("qwen35moe-tiny-f32"))
    assert line(lines, "experts") == "8, 2 used, width 32, shared width 48"
    assert line(lines, "supported") == "yes"


def test_lists(data_dir: Path, capsys: CapSys) -> None:
    path = data_dir / "qwen35-tiny-f32.gguf"
    file = open_gguf(path)
    lines = inspect(capsys, path, "--tensors", "--metadata")
    metadata = lines[lines.index("metadata:") + 1 : lines.index("tensors:") - 1]
    assert [text.split()[0] for text in metadata] == list(file.metadata)
    assert any(text.split() == ["qwen35.block_count", "UINT32", "5"] for text in metadata)
    assert next(text for text in metadata if "tokenizer.ggml.tokens" in text).endswith("... 512 in all]")
    assert any(text.split()[:3] == ["tokenizer.ggml.add_bos_token", "BOOL", "false"] for text in metadata)
    assert max(map(len, lines)) < 250
    tensors = lines[lines.index("tensors:") + 1 :]
    assert [text.split()[0] for text in tensors] == list(file.tensors)
    assert any(text.split() == ["token_embd.weight", "F32", "64", "x", "512", "131,072"] for text in tensors)


def test_a_file_that_cannot_be_run(tmp_path: Path, capsys: CapSys) -> None:
    tensors = {"blk.0.odd.weight": np.zeros((2, 8), np.float64), "blk.6.odd.weight": np.zeros(3, np.int8)}
    path = write(tmp_path / "odd.gguf", "strange", tensors, context_length=77)
    lines = inspect(capsys, path, "--tensors")
    assert line(lines, "architecture") == "strange"
    assert line(lines, "context length") == "77"
    assert line(lines, "layers") == "7"
    assert line(lines, "width") == "not given"
    assert line(lines, "tokenizer") == "none"
    assert line(lines, "chat template") == "no"
    assert line(lines, "supported").startswith("no: architecture 'strange' is not supported; supported: qwen35,")
    assert lines[lines.index("quantisation:") + 1].split()[:2] == ["F64", "1"]


def test_a_head_alone_is_not_called_a_model(capsys: CapSys) -> None:
    assert line(inspect(capsys, fixture("qwen35-tiny-mtponly-f16")), "supported").startswith("no: it holds an MTP head")


def test_keys_by_layer_and_absurd_block_numbers(tmp_path: Path, capsys: CapSys) -> None:
    tensors = {f"blk.{'9' * 5000}.nextn.x": np.zeros(3, np.float32), "token_embd.weight": np.zeros((4, 8), np.float32)}
    path = write(tmp_path / "odd.gguf", "qwen35", tensors, block_count=1, embedding_length=8)
    assert line(inspect(capsys, path), "supported").startswith("no: ")
    path = tmp_path / "array.gguf"
    writer = GGUFWriter(path, "llama")
    for key in ("block_count", "embedding_length", "context_length", "attention.head_count"):
        writer.add_uint32(f"llama.{key}", 1)
    writer.add_array("llama.attention.key_length", [8, 8])
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_uint32("llama.feed_forward_length", 8)
    writer.add_tensor("token_embd.weight", np.zeros((4, 1), np.float32))
    finish(writer)
    assert line(inspect(capsys, path), "supported").startswith("no: ")


def test_a_file_with_nothing_in_it(tmp_path: Path, capsys: CapSys) -> None:
    lines = inspect(capsys, write(tmp_path / "bare.gguf", "bare", {}), "--tensors")
    assert line(lines, "layers") == "none"
    assert line(lines, "quantisation") == "none"


@pytest.mark.parametrize(
    ("keys", "tensors", "layers", "head"),
    [
        ({"block_count": 5, "nextn_predict_layers": 1}, ["blk.0.x"], "4", "no (the metadata promises 1"),
        (
            {"block_count": 5},
            ["blk.0.x", "blk.4.nextn.eh_proj.weight"],
            "4, 1 MTP",
            "yes, block 4 (the metadata does not",
        ),
        (
            {"block_count": 4},
            ["blk.0.x", "blk.4.nextn.eh_proj.weight"],
            "4, 1 MTP",
            "yes, block 4 (the metadata does not",
        ),
        (
            {"block_count": 5, "nextn_predict_layers": 1},
            ["blk.4.nextn.eh_proj.weight"],
            "4, 1 MTP",
            "yes, block 4 (the file holds no trunk",
        ),
        (
            {"block_count": 6, "nextn_predict_layers": 2},
            ["blk.0.x", "blk.4.nextn.eh_proj.weight"],
            "4, 1 MTP",
            "yes, block 4 (the metadata promises 2)",
        ),
        ({"block_count": 2**32 - 1, "full_attention_interval": 4}, [], "3221225472 gated delta net + 1073741823", "no"),
        ({"block_count": 4, "full_attention_interval": 0}, [], "4", "no"),
    ],
)
def test_metadata_and_tensors_disagree(
    tmp_path: Path, capsys: CapSys, keys: dict[str, int], tensors: list[str], layers: str, head: str
) -> None:
    path = write(tmp_path / "x.gguf", "qwen35", {name: np.zeros(4, np.float32) for name in tensors}, **keys)
    lines = inspect(capsys, path)
    assert line(lines, "layers").startswith(layers)
    assert line(lines, "MTP head").startswith(head)


def test_metadata_of_unexpected_kinds(tmp_path: Path, capsys: CapSys) -> None:
    writer = GGUFWriter(tmp_path / "x.gguf", "qwen35")
    writer.add_string("qwen35.block_count", "many")
    writer.add_array("qwen35.attention.head_count", [8, 8, 8])
    writer.add_array("qwen35.attention.head_count_kv", [1, 2])
    writer.add_float32("qwen35.full_attention_interval", float("nan"))
    writer.add_uint32("general.name", 3)
    writer.add_string("tokenizer.ggml.model", "\x1b[31mred\nline")
    writer.add_uint32("tokenizer.ggml.eos_token_id", 9)
    finish(writer)
    lines = inspect(capsys, tmp_path / "x.gguf", "--metadata")
    assert line(lines, "name") == "not given"
    assert line(lines, "heads").startswith("8 / not given")
    assert line(lines, "tokenizer").startswith(r"\x1b[31mred\nline")
    assert "outside the vocabulary" in line(lines, "tokenizer")


def test_faults_are_one_line(tmp_path: Path, capsys: CapSys) -> None:
    (tmp_path / "text.gguf").write_text("not a model")
    (tmp_path / "empty.gguf").touch()
    for path in (tmp_path / "text.gguf", tmp_path / "empty.gguf", tmp_path, tmp_path / "absent.gguf"):
        assert main(["inspect", str(path)]) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("sharpi-jax: error: ")
        assert str(path) in err
        assert err.count("\n") == 1
