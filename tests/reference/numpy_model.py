"""Qwen3.5, dense and MoE, with its MTP block in NumPy float64: slow, obvious, without a batch axis.

The mathematics is that of llama.cpp's `qwen35` and `qwen35moe` graphs and of transformers' Qwen3.5, read off both; GGUF
tensors keep their NumPy shape [out, in], so every projection is `x @ w.T`. Shape letters: those of numpy_ops.py, Nv
value heads of the delta rule, V vocabulary.
"""

import copy
from dataclasses import dataclass, field

import gguf
import numpy as np

from .numpy_ops import (
    CONV_TAPS,
    causal_attention,
    causal_conv_silu,
    delta_rule,
    gated_attention,
    l2norm,
    mixture_of_experts,
    rms_norm,
    rope_neox,
    scale_query,
    sigmoid,
    silu,
    softplus,
    swiglu,
    tile_heads,
)

# --- the file ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Config:
    """Dims read from the GGUF metadata; `recurrent[i]` says whether trunk layer i is a Gated DeltaNet."""

    layers: int
    mtp_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    n_rot: int
    rope_base: float
    eps: float
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    experts_used: int
    recurrent: tuple[bool, ...]


def read_config(meta):
    """`Config` from a dict of metadata. A layer's kind is decided here alone: tensor names do not tell."""
    arch = meta["general.architecture"]
    if arch not in ("qwen35", "qwen35moe"):
        raise ValueError(f"the reference reads qwen35 and qwen35moe files only, not {arch!r}")
    get = {key.removeprefix(f"{arch}."): value for key, value in meta.items() if key.startswith(f"{arch}.")}
    mtp_layers = get.get("nextn_predict_layers", 0)
    if mtp_layers > 1:
        raise ValueError(f"{mtp_layers} MTP layers: this architecture runs one")
    layers = get["block_count"] - mtp_layers
    recurrent = get.get("attention.recurrent_layers")
    if recurrent is None:
        interval = get.get("full_attention_interval", 4)
        recurrent = [(i + 1) % interval != 0 for i in range(layers)]
    elif isinstance(recurrent, bool):
        recurrent = [recurrent] * layers
    head_dim = get["attention.key_length"]
    n_rot = get.get("rope.dimension_count", head_dim)
    if sum(get.get("rope.dimension_sections", [n_rot])) < n_rot // 2:
        raise ValueError("rope sections do not cover the rotated dims: text rope would not be plain NEOX rope")
    if get["ssm.conv_kernel"] != CONV_TAPS:
        raise ValueError(f"a convolution of {get['ssm.conv_kernel']} taps")
    return Config(
        layers=layers,
        mtp_layers=mtp_layers,
        heads=get["attention.head_count"],
        kv_heads=get["attention.head_count_kv"],
        head_dim=head_dim,
        n_rot=n_rot,
        rope_base=get["rope.freq_base"],
        eps=get["attention.layer_norm_rms_epsilon"],
        key_heads=get["ssm.group_count"],
        value_heads=get["ssm.time_step_rank"],
        key_dim=get["ssm.state_size"],
        value_dim=get["ssm.inner_size"] // get["ssm.time_step_rank"],
        experts_used=get.get("expert_used_count", 0),
        recurrent=tuple(recurrent[:layers]),
    )


def load(path, *, swap_halves=False, pre_norm_hidden=False):
    """Read a GGUF file of any block format `gguf` dequantises, whole, into float64."""
    reader = gguf.GGUFReader(path)
    meta = {name: f.contents() for name, f in reader.fields.items() if not name.startswith("tokenizer.")}
    cfg = read_config(meta)
    weights = {t.name: gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float64) for t in reader.tensors}
    return Reference(cfg, weights, swap_halves, pre_norm_hidden)


# --- the model --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reference:
    """Configuration and float64 weights by GGUF name. The two flags are *wrong* wirings, for negative controls.

    swap_halves: the MTP projection reads (hidden, embedding) instead of (embedding, hidden).
    pre_norm_hidden: the MTP block is handed hiddens from before the final norm (the trunk's and its own) instead of
    after it. `dataclasses.replace` turns a flag on without reading the file again.

    `trace`, where a method takes it, is a dict filled with intermediate activations as "<layer>.<name>".
    """

    cfg: Config
    weights: dict
    swap_halves: bool = False
    pre_norm_hidden: bool = False

    def empty_state(self, layer):
        """State of a layer before the first token: dict(conv[3, C], S[Nv, Dk, Dv]) or dict(k, v [0, KV, D])."""
        c = self.cfg
        if layer < c.layers and c.recurrent[layer]:
            channels = 2 * c.key_heads * c.key_dim + c.value_heads * c.value_dim
            S = np.zeros((c.value_heads, c.key_dim, c.value_dim))
            return {"conv": np.zeros((CONV_TAPS - 1, channels)), "S": S}
        return {"k": np.zeros((0, c.kv_heads, c.head_dim)), "v": np.zeros((0, c.kv_heads, c.head_dim))}

    def trunk(self, tokens, *, start=0, states=None, trace=None):
        """One pass over tokens[T] at positions start.. after `states` (default: none yet, from position 0).

        -> dict(logits[T, V], hidden[T, E] after the final norm, pre_norm_hidden[T, E], states: per layer that after
        the last token, layers: per layer its output [T, E]). Row t predicts the token after tokens[t].
        """
        states = states or [self.empty_state(i) for i in range(self.cfg.layers)]
        x = self.weights["token_embd.weight"][np.asarray(tokens, int)]
        layers, new_states = [], []
        for i, state in enumerate(states):
            x, state = self._block(i, x, start, state, trace)
            layers.append(x)
            new_states.append(state)
        hidden = rms_norm(x, self.weights["output_norm.weight"], self.cfg.eps)
        logits = hidden @ self._head().T
        return {"logits": logits, "hidden": hidden, "pre_norm_hidden": x, "states": new_states, "layers": layers}

    def mtp(self, tokens, hidden, *, trace=None):
        """The MTP block over tokens[T] with the trunk's hidden[T, E] -> dict(logits, hidden, pre_norm_hidden, k, v).

        Row p pairs tokens[p] with hidden[p-1] (row 0 with zeros) and predicts tokens[p+1]; the last hidden is unused.
        """
        previous = np.concatenate([np.zeros((1, self.weights["output_norm.weight"].size)), hidden[: len(tokens) - 1]])
        return self.mtp_rows(tokens, previous, 0, self.empty_state(self.cfg.layers), trace=trace)

    def mtp_rows(self, tokens, previous, start, cache, *, trace=None):
        """MTP entries (tokens[T], previous[T, E]) at positions start.. after `cache` = dict(k, v [start, KV, D])."""
        c, w, n = self.cfg, self.weights, self.cfg.layers
        if c.mtp_layers == 0:
            raise ValueError("this file has no MTP block")
        name = f"blk.{n}.nextn."
        table = w.get(name + "embed_tokens.weight", w["token_embd.weight"])
        embedding = rms_norm(table[np.asarray(tokens, int)], w[name + "enorm.weight"], c.eps)
        handed = rms_norm(previous, w[name + "hnorm.weight"], c.eps)
        joined = np.concatenate([handed, embedding] if self.swap_halves else [embedding, handed], axis=-1)
        u = joined @ w[name + "eh_proj.weight"].T
        _record(trace, n, concat=joined, eh_proj=u)
        u, cache = self._block(n, u, start, cache, trace)
        hidden = rms_norm(u, w.get(name + "shared_head_norm.weight", w["output_norm.weight"]), c.eps)
        logits = hidden @ w.get(name + "shared_head_head.weight", self._head()).T
        return {"logits": logits, "hidden": hidden, "pre_norm_hidden": u, **cache}

    def handed_over(self, out):
        """The hidden [T, E] of a `trunk` or `mtp` result that feeds the next MTP entry."""
        return out["pre_norm_hidden" if self.pre_norm_hidden else "hidden"]

    def draft(self, tokens, hidden, K):
        """The K chained argmax drafts after tokens[-1], given the trunk's `handed_over` hidden of the positions before.

        MTP keys and values of tokens come from the trunk's hiddens, those of the drafts from the MTP's own.
        """
        return self.chain(self.mtp(tokens, hidden), len(tokens), K)

    def chain(self, out, position, K):
        """K argmax drafts, the first from the last row of the MTP result `out`; it is the token at `position`."""
        drafts = []
        for j in range(K):
            drafts.append(int(np.argmax(out["logits"][-1])))
            if j + 1 < K:
                cache = {"k": out["k"], "v": out["v"]}
                out = self.mtp_rows(drafts[-1:], self.handed_over(out)[-1:], position + j, cache)
        return drafts

    def _head(self):
        return self.weights.get("output.weight", self.weights["token_embd.weight"])

    def _block(self, i, x, start, state, trace):
        """Pre-norm residual block: x += mix(norm x); x += ffn(norm x)."""
        w, name = self.weights, f"blk.{i}."
        y = rms_norm(x, w[name + "attn_norm.weight"], self.cfg.eps)
        recurrent = i < self.cfg.layers and self.cfg.recurrent[i]
        if recurrent:
            mixed, state = self._gated_delta_net(i, y, state, trace)
        else:
            mixed, state = self._attention(i, y, start, state, trace)
        x = x + mixed
        z = rms_norm(x, w[name + "post_attention_norm.weight"], self.cfg.eps)
        ffn = self._ffn(name, z)
        _record(trace, i, norm=y, mixed=mixed, residual=x, post_norm=z, ffn=ffn, out=x + ffn)
        return x + ffn, state

    def _ffn(self, name, z):
        """Dense SwiGLU, or the chosen experts plus a shared one gated by a sigmoid."""
        w, parts = self.weights, ("gate", "up", "down")
        if not self.cfg.experts_used:
            return swiglu(z, *(w[name + f"ffn_{part}.weight"] for part in parts))
        if name + "ffn_gate_up_exps.weight" in w:  # the fused form, gate first
            gate, up = np.split(w[name + "ffn_gate_up_exps.weight"], 2, axis=1)
        else:
            gate, up = (w[name + f"ffn_{part}_exps.weight"] for part in parts[:2])
        router = w[name + "ffn_gate_inp.weight"]
        routed = mixture_of_experts(z, router, gate, up, w[name + "ffn_down_exps.weight"], self.cfg.experts_used)
        shared = swiglu(z, *(w[name + f"ffn_{part}_shexp.weight"] for part in parts))
        return routed + sigmoid(z @ w[name + "ffn_gate_inp_shexp.weight"].ravel())[:, None] * shared

    def _attention(self, i, y, start, cache, trace):
        """Gated attention over `cache` and y[T, E]; per head attn_q holds D query rows, then D gate rows."""
        c, w, name, T = self.cfg, self.weights, f"blk.{i}.", len(y)
        H, KV, D = c.heads, c.kv_heads, c.head_dim
        if name + "attn_qkv.weight" in w:  # the fused form: query with gate, key, value
            parts = np.split(y @ w[name + "attn_qkv.weight"].T, [2 * H * D, 2 * H * D + KV * D], axis=-1)
        else:
            parts = [y @ w[name + f"attn_{p}.weight"].T for p in "qkv"]
        q, gate = np.split(parts[0].reshape(T, H, 2 * D), 2, axis=-1)
        q = rms_norm(q, w[name + "attn_q_norm.weight"], c.eps)
        k = rms_norm(parts[1].reshape(T, KV, D), w[name + "attn_k_norm.weight"], c.eps)
        v = parts[2].reshape(T, KV, D)
        _record(trace, i, q_full=parts[0], k_full=parts[1], q_normed=q, k_normed=k, v=v, gate=gate)
        positions = np.arange(start, start + T)
        q, k = (rope_neox(a, positions, c.n_rot, c.rope_base) for a in (q, k))
        _record(trace, i, q_roped=q, k_roped=k)
        k, v = np.concatenate([cache["k"], k]), np.concatenate([cache["v"], v])
        out = gated_attention(q, k, v, gate).reshape(T, H * D)
        if trace is not None:
            _record(trace, i, pregate=causal_attention(q, k, v))
        return out @ w[name + "attn_output.weight"].T, {"k": k, "v": v}

    def _gated_delta_net(self, i, y, state, trace):
        """Gated DeltaNet on y[T, E]: convolution, delta rule, then a norm per head gated by silu(z)."""
        c, w, name, T = self.cfg, self.weights, f"blk.{i}.", len(y)
        qkv = y @ w[name + "attn_qkv.weight"].T
        z = (y @ w[name + "attn_gate.weight"].T).reshape(T, c.value_heads, c.value_dim)
        beta = sigmoid(y @ w[name + "ssm_beta.weight"].T)
        # ssm_a already holds -exp(A_log).
        g = softplus(y @ w[name + "ssm_alpha.weight"].T + w[name + "ssm_dt.bias"]) * w[name + "ssm_a"]
        convolved, conv = causal_conv_silu(qkv, w[name + "ssm_conv1d.weight"], state["conv"])
        keys = c.key_heads * c.key_dim
        q, k, v = np.split(convolved, [keys, 2 * keys], axis=-1)
        q, k = (l2norm(a.reshape(T, c.key_heads, c.key_dim), c.eps) for a in (q, k))
        v = v.reshape(T, c.value_heads, c.value_dim)
        _record(trace, i, qkv=qkv, z=z, beta=beta, g=g, convolved=convolved, q=q, k=k, v=v)
        q, k = (tile_heads(a, c.value_heads) for a in (scale_query(q), k))
        o, S = delta_rule(q, k, v, g, beta, state["S"])
        gated = rms_norm(o, w[name + "ssm_norm.weight"], c.eps) * silu(z)
        _record(trace, i, delta_out=o, S=S, gated=gated)
        return gated.reshape(T, -1) @ w[name + "ssm_out.weight"].T, {"conv": conv, "S": S}


def _record(trace, layer, **values):
    if trace is not None:
        trace.update({f"{layer}.{name}": value for name, value in values.items()})


# --- one token at a time ----------------------------------------------------------------------------------------------


@dataclass
class Session:
    """A growing sequence with the trunk's and the MTP block's caches, both always covering exactly `tokens`.

    No array is ever changed in place, so `copy` is cheap and going back means keeping an older copy.
    """

    reference: Reference
    tokens: list = field(default_factory=list)
    states: list | None = None
    handed: np.ndarray | None = None
    mtp: dict | None = None

    def append(self, token):
        """Run `token` through the trunk and the MTP block; -> the trunk's logits [V] for the token after it."""
        ref, position = self.reference, len(self.tokens)
        out = ref.trunk([token], start=position, states=self.states)
        if ref.cfg.mtp_layers:
            previous = np.zeros_like(out["hidden"]) if self.handed is None else self.handed
            self.mtp = ref.mtp_rows([token], previous, position, self.mtp or ref.empty_state(ref.cfg.layers))
        self.tokens = [*self.tokens, int(token)]
        self.states, self.handed = out["states"], ref.handed_over(out)
        return out["logits"][0]

    def draft(self, K):
        """The K chained drafts after the last token; the session does not change."""
        if self.mtp is None:
            raise ValueError("no MTP block, or no token yet: nothing to draft from")
        return self.reference.chain(self.mtp, len(self.tokens), K)

    def copy(self):
        """An independent session at the same point."""
        return copy.copy(self)
