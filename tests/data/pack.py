"""Pack the fixtures' folder into this one: PYTHONPATH=tests python tests/data/pack.py FOLDER

FOLDER holds the original GGUF files and arrays. README.md beside this file says what is kept and why; every packed
model is rebuilt at the end and compared with the original's SHA-256.
"""

import hashlib
import io
import json
import lzma
import os
import shutil
import sys
import tempfile
from pathlib import Path

import gguf
import numpy as np

HERE = Path(__file__).parent
BASES = ("qwen35-tiny", "qwen35-tiny256", "qwen35moe-tiny", "qwen35moe-tiny256")
PLAIN = "qwen35-tiny-f32"  # configs/fixture.cfg names it
# lp: a byte's place within its float32 is context, which is what is regular about weights and logits.
XZ = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 2, "lp": 2, "pb": 2}]
FLOAT32_ARRAYS = ("prompt", "greedy", "tokens", "draft_ids", "logits", "hidden", "mtp_logits", "mtp_hidden")
FLOAT32_ARRAYS += ("hf_logits", "hf_mtp_logits")
QUANTISED_ARRAYS = ("prompt", "dequant_tokens", "dequant_draft_ids", "dequant_greedy_min_margin")
LLAMA_TOKENS = ("qwen35-tiny-f16", "qwen35-tiny-bf16")  # elsewhere llama.cpp quantises activations too: no target
# Of the MoE model's activations: the router's, the experts', and every layer's output.
MOE_ACTIVATIONS = ("ffn_", "l_out", "model.input_embed", "mtp_ffn", "mtp_shared_exp", "mtp_attn_post_norm", "mtp_post")


def xz(data: bytes) -> bytes:
    return lzma.compress(data, filters=XZ)


def save(name: str, arrays: dict) -> None:
    """Writes NAME.npz.xz: uncompressed inside, so that xz sees the numbers."""
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    (HERE / f"{name}.npz.xz").write_bytes(xz(stream.getvalue()))


def quantised_arrays(name: str, found: dict) -> dict:
    """What is kept of a quantised file's arrays: even columns of the logits; top choice and lead of the whole rows."""
    kept = {key: found[key] for key in QUANTISED_ARRAYS}
    if name in LLAMA_TOKENS:
        kept["llama_tokens"] = found["llama_tokens"]
    for key in ("dequant_logits", "dequant_mtp_logits"):
        top = np.sort(found[key], axis=-1)[:, -2:]
        kept |= {f"{key}_even": found[key][:, ::2], f"{key}_argmax": found[key].argmax(-1).astype(np.int32)}
        kept[f"{key}_gap"] = top[:, 1] - top[:, 0]
    return kept


def pack_base(source: Path, base: str, names: list[str]) -> None:
    """Writes a base's float32 file and, for the other files, their headers and the blocks that must be kept."""
    import fixtures  # only now: it reads the list that `pack` has written

    raw = (source / f"{base}-f32.gguf").read_bytes()
    if f"{base}-f32" == PLAIN:
        (HERE / f"{PLAIN}.gguf").write_bytes(raw)
    else:
        (HERE / f"{base}-f32.gguf.xz").write_bytes(xz(raw))
    packed: dict[str, np.ndarray] = {}
    for name in names:
        reader = gguf.GGUFReader(source / f"{name}.gguf")
        packed[name] = np.array(reader.data[: reader.data_offset])
        for tensor in reader.tensors:
            try:
                if fixtures.made(base, tensor.name, tensor.tensor_type).tobytes() == tensor.data.tobytes():
                    continue
            except NotImplementedError:
                pass
            blocks = np.frombuffer(tensor.data.tobytes(), np.uint8)
            known = packed.setdefault(fixtures.block_key(tensor), blocks)
            assert (known == blocks).all(), f"{name} and a file before it differ in {tensor.name}"
    save(f"{base}.packed", packed)


def pack(source: Path) -> None:
    listed: dict[str, dict] = {}
    for path in sorted(source.glob("*.gguf")):
        base = max((b for b in BASES if path.name.startswith(b + "-")), key=len)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        listed.setdefault(base, {})[path.stem] = {"size": path.stat().st_size, "sha256": digest}
    (HERE / "fixtures.json").write_text(json.dumps(listed, indent=1) + "\n")
    for base, files in listed.items():
        pack_base(source, base, [name for name in files if name != f"{base}-f32"])
    for path in sorted(source.glob("*.ref.npz")):
        name, found = path.name.removesuffix(".ref.npz"), dict(np.load(path))
        kept = {key: found[key] for key in FLOAT32_ARRAYS} if name in BASES else quantised_arrays(name, found)
        save(f"{name}.ref", kept)
    save("qwen35-tiny.act", dict(np.load(source / "qwen35-tiny.act.npz")))
    moe = dict(np.load(source / "qwen35moe-tiny.act.npz"))
    save("qwen35moe-tiny.act", {k: v for k, v in moe.items() if k.partition(".")[2].startswith(MOE_ACTIVATIONS)})
    for path in (*source.glob("*.spec.json"), source / "tokenize.json"):
        shutil.copyfile(path, HERE / path.name)
    (HERE / "text").mkdir(exist_ok=True)
    (HERE / "text/alice29.txt.xz").write_bytes(lzma.compress((source / "text/alice29.txt").read_bytes(), preset=9))


def main(source: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SHARPI_JAX_TEST_FIXTURES"] = folder
        pack(source)
        import fixtures

        for name in fixtures.BASE:
            assert fixtures.fixture(name).read_bytes() == (source / f"{name}.gguf").read_bytes()
    print(f"{len(fixtures.BASE)} models; {sum(f.stat().st_size for f in HERE.rglob('*') if f.is_file()) / 1e6:.2f} MB")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
