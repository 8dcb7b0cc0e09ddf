"""Peak resident memory of loading a large file, and of decoding a few tokens of it, against the file's own size.

    python bench/load_memory.py [--model=FILE.gguf] [--layers=24]

Without a model it writes one of random Q8_0 weights into a temporary folder: the shapes of Qwen3.5-0.8B with its MTP
head, and a vocabulary of 151,936 made-up tokens, so that the tokenizer weighs what it does in practice. The load runs
in a process of its own. Memory is VmHWM (Linux), less what it is after `import jax`.
"""

import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import gguf
import numpy as np
from absl import app, flags

_MODEL = flags.DEFINE_string("model", None, "GGUF file")
_LAYERS = flags.DEFINE_integer("layers", 24, "trunk layers of the file that is written")

WIDTH, FFN, VOCABULARY = 1024, 3584, 151_936
HEADS, KEY_HEADS, HEAD_DIM = 8, 2, 256
DELTA_HEADS, STATE, TAPS = 16, 128, 4
DELTA_WIDTH = DELTA_HEADS * STATE

_MEASURE = """
import json, re, sys
def peak():
    return 1024 * int(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1])
import jax
baseline = peak()
import sharpi_jax
from sharpi_jax.checkpoint import open_gguf
model = sharpi_jax.load(sys.argv[1])
loaded = peak()
tensors = sum(info.nbytes for info in open_gguf(sys.argv[1]).tensors.values())
arrays = sum(x.nbytes for x in {id(x): x for x in jax.tree.leaves(model.decoder.params)}.values())
model.generate([1, 2, 3], sharpi_jax.DecodeOptions(max_tokens=4, ctx_size=128, ignore_eos=True))
print(json.dumps({"baseline": baseline, "loaded": loaded, "decoded": peak(), "tensors": tensors, "arrays": arrays}))
"""


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(_MODEL.value) if _MODEL.value else _write(Path(folder) / "random.gguf", _LAYERS.value)
        done = subprocess.run([sys.executable, "-c", _MEASURE, str(path)], check=True, capture_output=True, text=True)
    found = json.loads(done.stdout)
    tensors, baseline = found["tensors"], found["baseline"]
    print(f"{'import jax':<24}{baseline / 1e6:>9.1f} MB")
    print(f"{'tensors in the file':<24}{tensors / 1e6:>9.1f} MB   ({found['arrays'] / 1e6:.1f} MB on the device)")
    for name, key in (("peak, loaded", "loaded"), ("peak, 4 tokens decoded", "decoded")):
        print(f"{name:<24}{found[key] / 1e6:>9.1f} MB   {(found[key] - baseline) / tensors:.3f} times the tensors")


def _write(path: Path, layers: int) -> Path:
    writer = gguf.GGUFWriter(path, "qwen35")
    writer.add_block_count(layers + 1)
    writer.add_uint32("qwen35.nextn_predict_layers", 1)
    writer.add_context_length(4096)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(64)
    writer.add_rope_freq_base(1e7)
    for key, value in {
        "conv_kernel": TAPS,
        "state_size": STATE,
        "group_count": DELTA_HEADS,
        "time_step_rank": DELTA_HEADS,
        "inner_size": DELTA_WIDTH,
    }.items():
        writer.add_uint32(f"qwen35.ssm.{key}", value)
    _add_vocabulary(writer)
    _add_tensors(writer, layers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_vocabulary(writer: gguf.GGUFWriter) -> None:
    """Random pairs of known tokens, merged in order: what byte-level BPE looks like from the outside."""
    draw = random.Random(0)
    visible = [chr(c) for c in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))]
    tokens = dict.fromkeys(visible + [chr(c) for c in range(0x100, 0x100 + 256 - len(visible))])
    texts, merges = list(tokens), []
    while len(texts) < VOCABULARY:
        left, right = draw.choice(texts), draw.choice(texts)
        if len(left + right) <= 12 and left + right not in tokens:
            tokens[left + right] = None
            texts.append(left + right)
            merges.append(f"{left} {right}")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen35")
    writer.add_token_list(texts)
    writer.add_token_types([1] * VOCABULARY)
    writer.add_token_merges(merges)
    writer.add_eos_token_id(0)


def _add_tensors(writer: gguf.GGUFWriter, layers: int) -> None:
    rng = np.random.default_rng(0)

    def matrix(name: str, rows: int, columns: int) -> None:
        blocks = rng.integers(0, 256, (rows, columns // 32, 34), np.uint8)
        blocks[..., :2] = np.array([0.02 / 74 * (1024 / columns) ** 0.5], np.float16).view(np.uint8)
        writer.add_tensor(name, blocks.reshape(rows, -1), raw_dtype=gguf.GGMLQuantizationType.Q8_0)

    def vector(name: str, *shape: int, value: float = 1.0) -> None:
        writer.add_tensor(name, np.full(shape, value, np.float32))

    matrix("token_embd.weight", VOCABULARY, WIDTH)
    vector("output_norm.weight", WIDTH)
    for layer in range(layers + 1):
        p = f"blk.{layer}."
        vector(p + "attn_norm.weight", WIDTH)
        vector(p + "post_attention_norm.weight", WIDTH)
        for name, rows, columns in (("gate", FFN, WIDTH), ("up", FFN, WIDTH), ("down", WIDTH, FFN)):
            matrix(f"{p}ffn_{name}.weight", rows, columns)
        if layer == layers or layer % 4 == 3:
            matrix(p + "attn_q.weight", 2 * HEADS * HEAD_DIM, WIDTH)
            for name in "kv":
                matrix(f"{p}attn_{name}.weight", KEY_HEADS * HEAD_DIM, WIDTH)
            matrix(p + "attn_output.weight", WIDTH, HEADS * HEAD_DIM)
            for name in "qk":
                vector(f"{p}attn_{name}_norm.weight", HEAD_DIM)
            continue
        matrix(p + "attn_qkv.weight", 3 * DELTA_WIDTH, WIDTH)
        matrix(p + "attn_gate.weight", DELTA_WIDTH, WIDTH)
        for name in ("alpha", "beta"):
            matrix(f"{p}ssm_{name}.weight", DELTA_HEADS, WIDTH)
        vector(p + "ssm_a", DELTA_HEADS, value=-1.0)
        vector(p + "ssm_dt.bias", DELTA_HEADS)
        vector(p + "ssm_conv1d.weight", 3 * DELTA_WIDTH, TAPS, value=0.25)
        vector(p + "ssm_norm.weight", STATE)
        matrix(p + "ssm_out.weight", WIDTH, DELTA_WIDTH)
    matrix(f"blk.{layers}.nextn.eh_proj.weight", WIDTH, 2 * WIDTH)
    for name in ("enorm", "hnorm", "shared_head_norm"):
        vector(f"blk.{layers}.nextn.{name}.weight", WIDTH)


if __name__ == "__main__":
    app.run(main)
