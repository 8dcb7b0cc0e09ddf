"""`llama`, `qwen2`, `qwen3` and `qwen3moe` in NumPy float64: slow, obvious, the whole text at once.

The mathematics is that of llama.cpp's graphs of these names: pre-norm blocks of causal attention and a feed-forward
part, without Qwen3.5's output gate. Shape letters: those of numpy_ops.py.
"""

from dataclasses import dataclass

import gguf
import numpy as np

from .numpy_ops import causal_attention, mixture_of_experts, rms_norm, rope_neox, swiglu


@dataclass(frozen=True)
class Plain:
    """Metadata without the architecture's prefix, and float64 weights by GGUF name."""

    architecture: str
    meta: dict
    weights: dict

    def logits(self, tokens):
        """[T, V]; row t predicts the token after tokens[t]."""
        eps = self.meta["attention.layer_norm_rms_epsilon"]
        x = self.weights["token_embd.weight"][np.asarray(tokens, int)]
        for i in range(self.meta["block_count"]):
            x = x + self._attention(i, rms_norm(x, self._weight(i, "attn_norm"), eps))
            x = x + self._feed_forward(i, rms_norm(x, self._weight(i, "ffn_norm"), eps))
        hidden = rms_norm(x, self.weights["output_norm.weight"], eps)
        return hidden @ self.weights.get("output.weight", self.weights["token_embd.weight"]).T

    def _weight(self, i, name):
        return self.weights[f"blk.{i}.{name}.weight"]

    def _attention(self, i, y):
        T, meta = len(y), self.meta
        heads, kv_heads = meta["attention.head_count"], meta["attention.head_count_kv"]
        q, k, v = (y @ self._weight(i, f"attn_{n}").T + self.weights.get(f"blk.{i}.attn_{n}.bias", 0.0) for n in "qkv")
        q, k, v = q.reshape(T, heads, -1), k.reshape(T, kv_heads, -1), v.reshape(T, kv_heads, -1)
        if self.architecture in ("qwen3", "qwen3moe"):
            eps = meta["attention.layer_norm_rms_epsilon"]
            q, k = rms_norm(q, self._weight(i, "attn_q_norm"), eps), rms_norm(k, self._weight(i, "attn_k_norm"), eps)
        out = causal_attention(self._rope(q), self._rope(k), v)
        return out.reshape(T, -1) @ self._weight(i, "attn_output").T

    def _rope(self, x):
        """Every frequency of x[T, H, D] divided by its factor; `llama` pairs neighbours, the others halves."""
        D, meta = x.shape[-1], self.meta
        factors = self.weights.get("rope_freqs.weight", np.ones(D // 2))
        if meta.get("rope.scaling.type", "linear") == "linear":
            factors = factors * meta.get("rope.scaling.factor", 1.0)
        out = np.zeros_like(x)
        for pair in range(D // 2):
            at = [2 * pair, 2 * pair + 1] if self.architecture == "llama" else [pair, pair + D // 2]
            # One pair alone is a head of two dimensions, whose only frequency is 1.
            positions = np.arange(len(x)) * meta["rope.freq_base"] ** (-2 * pair / D) / factors[pair]
            out[..., at] = rope_neox(x[..., at], positions, 2, 1.0)
        return out

    def _feed_forward(self, i, z):
        if self.architecture != "qwen3moe":
            return swiglu(z, *(self._weight(i, f"ffn_{n}") for n in ("gate", "up", "down")))
        experts = (self._weight(i, f"ffn_{n}_exps") for n in ("gate", "up", "down"))
        return mixture_of_experts(z, self._weight(i, "ffn_gate_inp"), *experts, self.meta["expert_used_count"])


def load(path):
    """A GGUF file of one of the four, whole, in float64."""
    reader = gguf.GGUFReader(path)
    meta = {name: f.contents() for name, f in reader.fields.items() if not name.startswith("tokenizer.")}
    architecture = meta["general.architecture"]
    own = {k.removeprefix(f"{architecture}."): v for k, v in meta.items() if k.startswith(f"{architecture}.")}
    weights = {t.name: gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float64) for t in reader.tensors}
    return Plain(architecture, own, weights)
