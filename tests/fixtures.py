"""The fixture models and their reference arrays, whatever form tests/data keeps them in. tests/data/README.md says how.

A quantised fixture is not kept whole. Its header is, and of its blocks those that the gguf package cannot make again;
the rest is quantised from the float32 file of the same base. A file so made must have the original's SHA-256.
"""

import functools
import hashlib
import io
import json
import lzma
import os
import tempfile
from pathlib import Path

import gguf
import numpy as np

DATA = Path(__file__).parent / "data"
# {base: {fixture: {"size": bytes, "sha256": of the original file}}}
FIXTURES: dict[str, dict[str, dict]] = json.loads((DATA / "fixtures.json").read_text())
BASE = {name: base for base, files in FIXTURES.items() for name in files}
# A tensor that the float32 file holds in parts, joined along the output rows.
FUSED = {"ffn_gate_up_exps": ("ffn_gate_exps", "ffn_up_exps"), "attn_qkv": ("attn_q", "attn_k", "attn_v")}


def quantised(*bases: str) -> list[str]:
    """The fixtures of these bases that have reference arrays of their own: all but float32 and those of a part."""
    return [name for base in bases for name in FIXTURES[base] if (DATA / f"{name}.ref.npz.xz").exists()]


@functools.cache
def fixture(name: str) -> Path:
    """The path of a fixture GGUF by its name without the ending, unpacked or rebuilt where tests/data has it packed.

    Raises:
      ValueError: the rebuilt file is not the original, byte for byte.
    """
    plain = DATA / f"{name}.gguf"
    if plain.exists():
        return plain
    path = _cache_folder() / plain.name
    if not path.exists():
        # Workers may do the same at once: each writes a file of its own, and the last rename wins with equal bytes.
        own = path.with_name(f"{path.name}.{os.getpid()}")
        packed = DATA / f"{name}.gguf.xz"
        if packed.exists():
            own.write_bytes(lzma.decompress(packed.read_bytes()))
        else:
            _rebuild(name, own)
        if hashlib.sha256(own.read_bytes()).hexdigest() != FIXTURES[BASE[name]][name]["sha256"]:
            raise ValueError(f"{name} is not the original file: the gguf package may quantise differently now.")
        own.replace(path)
    return path


@functools.cache
def arrays(name: str) -> dict[str, np.ndarray]:
    """The arrays of a packed .npz file by its name without the endings: "qwen35-tiny.act", "qwen35-tiny.ref"."""
    with np.load(io.BytesIO(lzma.decompress((DATA / f"{name}.npz.xz").read_bytes()))) as found:
        return dict(found)


def reference(name: str) -> dict[str, np.ndarray]:
    """Reference arrays of a base's float32 file, or of a quantised one; tests/data/README.md lists them."""
    return arrays(f"{name}.ref")


@functools.cache
def _cache_folder() -> Path:
    """One folder per test session: conftest.py names it for the workers, and removes it."""
    return Path(os.environ.get("SHARPI_JAX_TEST_FIXTURES") or tempfile.mkdtemp(prefix="sharpi-jax-test-fixtures-"))


@functools.cache
def _float32(base: str) -> dict[str, np.ndarray]:
    """Tensors of a base's float32 file by name."""
    return {t.name: np.array(t.data) for t in gguf.GGUFReader(fixture(f"{base}-f32")).tensors}


def _rebuild(name: str, path: Path) -> None:
    """Writes header, padding and, by the header's own table, every tensor."""
    base = BASE[name]
    packed = arrays(f"{base}.packed")
    with path.open("wb") as file:
        file.write(packed[name].tobytes())
        file.truncate(FIXTURES[base][name]["size"])
    reader = gguf.GGUFReader(path, "r+")
    for tensor in reader.tensors:
        blocks = packed.get(block_key(tensor))
        if blocks is None:
            blocks = made(base, tensor.name, tensor.tensor_type)
        tensor.data.reshape(-1).view(np.uint8)[:] = np.frombuffer(blocks.tobytes(), np.uint8)
    reader.data.flush()


def block_key(tensor: gguf.ReaderTensor) -> str:
    """Where a tensor's blocks are kept: llama-quantize makes the same ones in every file that has it in this type."""
    return f"{tensor.tensor_type.name} {tensor.name}"


def made(base: str, name: str, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """A tensor of a base in another type, by gguf-py.

    Raises:
      NotImplementedError: gguf-py does not quantise to that type.
    """
    weights = _float32(base)
    part = name.split(".")[-2]
    if name not in weights and part in FUSED:
        value = np.concatenate([weights[name.replace(part, p)] for p in FUSED[part]], axis=-2)
    else:
        value = weights[name]
    return value if kind == gguf.GGMLQuantizationType.F32 else gguf.quants.quantize(value, kind)
