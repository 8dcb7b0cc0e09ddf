"""Small random models of the plain architectures, and what llama-server makes of them.

    python -m tools.peers.architectures --server=LLAMA_SERVER --out=tests/data/architectures.npz

There are no fixtures of `llama`, `qwen2`, `qwen3` and `qwen3moe`, so each is written here from a seed, in float32, and
llama-server's greedy tokens and log-probabilities of the whole vocabulary are stored; tests/test_architectures.py
writes the same files again (it compares checksums) and holds the package to what is stored.
"""

import hashlib
import pathlib
import tempfile
from collections.abc import Iterator

import gguf
import numpy as np
from absl import app, flags

from tools.gguf_writing import finish
from tools.peers.server import running

VOCABULARY, WIDTH, LAYERS, HEADS, KEY_HEADS, HIDDEN, EXPERTS, USED = 288, 64, 2, 4, 2, 96, 8, 2
HEAD_DIM = {"qwen3": 32, "qwen3moe": 32}  # these two store it; the others have width / heads
EXACT = ("-np", "1", "-ctk", "f32", "-ctv", "f32", "-fa", "off", "-t", "1", "-c", "256", "--no-warmup")
PROMPTS = ([5, 250, 17, 99, 3, 64, 64, 200], [281, 7])
TOKENS = 8
# What sets each case apart from its architecture's plainest form.
CASES = {
    "llama": {},
    "llama-biases": {"biases": True, "untied": True},
    "llama-factors": {"factors": True},
    "llama-linear": {"linear": 4.0},
    "llama-untyped": {"linear": 4.0, "untyped": True},
    "llama-both": {"linear": 2.0, "factors": True},
    "qwen2": {"biases": True},
    "qwen3": {"untied": True},
    "qwen3moe": {},
}


def write(path: pathlib.Path, case: str) -> None:
    """One model of CASES as a GGUF file: the same bytes every time."""
    architecture, changes = case.split("-")[0], CASES[case]
    head_dim = HEAD_DIM.get(architecture, WIDTH // HEADS)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500.0)
    if architecture in HEAD_DIM:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if architecture == "llama":
        writer.add_rope_dimension_count(head_dim)
    if "linear" in changes:
        if not changes.get("untyped"):
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(changes["linear"])
    if architecture == "qwen3moe":
        writer.add_expert_count(EXPERTS)
        writer.add_expert_used_count(USED)
        writer.add_expert_feed_forward_length(HIDDEN // 2)
    _add_tokenizer(writer)
    for name, values in _tensors(architecture, changes, head_dim).items():
        writer.add_tensor(name, values)
    finish(writer)


def _tensors(architecture: str, changes: dict, head_dim: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(list(architecture.encode()))

    def matrix(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * shape[-1] ** -0.5).astype(np.float32)

    def vector(size: int) -> np.ndarray:
        return (1 + 0.2 * rng.standard_normal(size)).astype(np.float32)

    queries, stored = HEADS * head_dim, KEY_HEADS * head_dim
    found = {"token_embd.weight": matrix(VOCABULARY, WIDTH) * 4, "output_norm.weight": vector(WIDTH)}
    if changes.get("untied"):
        found["output.weight"] = matrix(VOCABULARY, WIDTH) * 4
    if changes.get("factors"):
        found["rope_freqs.weight"] = np.linspace(1, 8, head_dim // 2, dtype=np.float32)
    for index in range(LAYERS):
        layer = {"attn_norm.weight": vector(WIDTH), "ffn_norm.weight": vector(WIDTH)}
        layer |= {"attn_q.weight": matrix(queries, WIDTH), "attn_k.weight": matrix(stored, WIDTH)}
        layer |= {"attn_v.weight": matrix(stored, WIDTH), "attn_output.weight": matrix(WIDTH, queries) * 3}
        if changes.get("biases"):
            layer |= {f"attn_{n}.bias": vector(s) - 1 for n, s in (("q", queries), ("k", stored), ("v", stored))}
        if architecture.startswith("qwen3"):
            layer |= {"attn_q_norm.weight": vector(head_dim), "attn_k_norm.weight": vector(head_dim)}
        if architecture == "qwen3moe":
            layer["ffn_gate_inp.weight"] = matrix(EXPERTS, WIDTH)
            layer |= {f"ffn_{n}_exps.weight": matrix(EXPERTS, HIDDEN // 2, WIDTH) for n in ("gate", "up")}
            layer["ffn_down_exps.weight"] = matrix(EXPERTS, WIDTH, HIDDEN // 2) * 6
        else:
            layer |= {f"ffn_{n}.weight": matrix(HIDDEN, WIDTH) for n in ("gate", "up")}
            layer["ffn_down.weight"] = matrix(WIDTH, HIDDEN) * 6
        found |= {f"blk.{index}.{name}": values for name, values in layer.items()}
    return found


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    """ASCII, the one merge without which llama.cpp loads no vocabulary, and special tokens.

    No other bytes: what is no UTF-8 llama-server answers with an error.
    """
    plain = [*map(chr, range(0x21, 0x7F)), "ab"]
    special = [f"<|{index}|>" for index in range(VOCABULARY - len(plain))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*plain, *special])
    writer.add_token_types([gguf.TokenType.NORMAL] * len(plain) + [gguf.TokenType.CONTROL] * len(special))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(VOCABULARY - 1)
    writer.add_eos_token_id(VOCABULARY - 1)
    writer.add_add_bos_token(False)


def checksum(path: pathlib.Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def ask(server: pathlib.Path, model: pathlib.Path) -> Iterator[tuple[list[int], np.ndarray]]:
    """Of each prompt llama-server's greedy tokens, and the log-probabilities [TOKENS, V] that they were chosen from."""
    with running(server, model, *EXACT) as peer:
        for prompt in PROMPTS:
            body = {"prompt": prompt, "n_predict": TOKENS, "temperature": 0, "return_tokens": True}
            body |= {"cache_prompt": False, "ignore_eos": True, "n_probs": VOCABULARY}
            answer = peer.ask("completion", body)
            rows = np.full((TOKENS, VOCABULARY), np.nan, np.float32)
            for row, position in zip(rows, answer["completion_probabilities"], strict=True):
                for entry in position["top_logprobs"]:
                    row[entry["id"]] = entry["logprob"]
            yield answer["tokens"], rows


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]}")
    results: dict[str, np.ndarray] = {}
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            path = pathlib.Path(folder) / f"{case}.gguf"
            write(path, case)
            results[f"{case}.sha256"] = np.asarray(checksum(path))
            for index, (tokens, rows) in enumerate(ask(pathlib.Path(_SERVER.value), path)):
                results |= {f"{case}.{index}.tokens": np.asarray(tokens), f"{case}.{index}.log_probabilities": rows}
                print(case, tokens, flush=True)
    np.savez_compressed(_OUT.value, **results)


if __name__ == "__main__":  # the tests import `write`, and flags belong to a command only
    _SERVER = flags.DEFINE_string("server", None, "llama-server.", required=True)
    _OUT = flags.DEFINE_string("out", None, "The .npz file to write.", required=True)
    app.run(main)
