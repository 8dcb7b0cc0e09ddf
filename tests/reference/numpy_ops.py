"""The elementary functions of the reference models, in NumPy float64.

Shape letters: T positions, S cached positions, E width, H query heads, KV key-value heads, D head dim, Nk / Hv key /
value heads of the delta rule, Dk / Dv their dims, C convolution channels, F feed-forward width, X experts.
"""

import numpy as np

CONV_TAPS = 4


def sigmoid(x):
    """1 / (1 + exp(-x)), without overflow for any finite x."""
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0, e) / (1.0 + e)


def softplus(x):
    """log(1 + exp(x)), without overflow."""
    return np.maximum(x, 0.0) + np.log1p(np.exp(-np.abs(x)))


def silu(x):
    """x * sigmoid(x)."""
    return x * sigmoid(x)


def rms_norm(x, w, eps):
    """x[..., E] / sqrt(mean(x^2) + eps) * w[E]; the GGUF weight already holds HF's `1 +`."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * w


def l2norm(x, eps):
    """x[..., D] / sqrt(sum(x^2) + eps): the delta rule's normalisation of q and k."""
    return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + eps)


def scale_query(q):
    """q[..., Dk] / sqrt(Dk): the delta rule's query scale, applied after `l2norm`."""
    return q / np.sqrt(q.shape[-1])


def tile_heads(x, count):
    """x[T, Nk, Dk] -> [T, count, Dk]: value head j reads key head j % Nk, the order of GGUF files (HF repeats)."""
    return x[:, [j % x.shape[1] for j in range(count)]]


def rope_neox(x, positions, n_rot, base):
    """Rotate the pairs (i, i + n_rot/2) of x[T, H, D] by positions[T] * base^(-2i/n_rot); dims from n_rot on stay."""
    half = n_rot // 2
    frequency = base ** (-2.0 * np.arange(half) / n_rot)
    angle = np.asarray(positions, np.float64)[:, None, None] * frequency
    a, b = x[..., :half], x[..., half:n_rot]
    rotated = [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)]
    return np.concatenate([*rotated, x[..., n_rot:]], axis=-1)


def causal_conv_silu(x, w, state):
    """SiLU of a depthwise causal convolution: x[T, C], w[C, 4] oldest tap first, state[3, C] -> (y[T, C], new state).

    The state is the last three input rows as they were *before* the convolution.
    """
    rows = np.concatenate([state, x])
    y = np.zeros_like(x)
    for t in range(len(x)):
        for tap in range(CONV_TAPS):
            y[t] += rows[t + tap] * w[:, tap]
    return silu(y), rows[len(rows) - (CONV_TAPS - 1) :]


def delta_rule(q, k, v, g, beta, S):
    """The gated delta rule, one token and one head at a time.

    q, k [T, Hv, Dk] (already normalised, scaled and tiled), v [T, Hv, Dv], g (log decay) and beta [T, Hv],
    S [Hv, Dk, Dv] -> (o[T, Hv, Dv], S). S decays, forgets what it held under k, learns v there, and is read with q.
    """
    S = S.copy()
    o = np.zeros_like(v)
    for t in range(len(q)):
        for h in range(q.shape[1]):
            S[h] = np.exp(g[t, h]) * S[h]
            error = beta[t, h] * (v[t, h] - S[h].T @ k[t, h])
            S[h] = S[h] + np.outer(k[t, h], error)
            o[t, h] = S[h].T @ q[t, h]
    return o, S


def causal_attention(q, k, v):
    """Full causal softmax attention: q[T, H, D] are the last T of the S positions of k, v [S, KV, D] -> [T, H, D]."""
    T, H, D = q.shape
    S, KV, _ = k.shape
    out = np.zeros((T, H, v.shape[-1]))
    for t in range(T):
        visible = S - T + t + 1
        for h in range(H):
            kv = h // (H // KV)
            score = k[:visible, kv] @ q[t, h] / np.sqrt(D)
            weight = np.exp(score - score.max())
            out[t, h] = weight @ v[:visible, kv] / weight.sum()
    return out


def gated_attention(q, k, v, gate):
    """`causal_attention` times sigmoid(gate[T, H, D]), the output gate of Qwen3.5's attention layers."""
    return causal_attention(q, k, v) * sigmoid(gate)


def swiglu(x, w_gate, w_up, w_down):
    """x[T, E] -> [T, E] through silu(gate) * up: w_gate, w_up [F, E], w_down [E, F]."""
    return (silu(x @ w_gate.T) * (x @ w_up.T)) @ w_down.T


def mixture_of_experts(x, router, w_gate, w_up, w_down, used):
    """x[T, E] through `used` experts each: router [X, E], w_gate, w_up [X, F, E], w_down [X, E, F].

    Softmax over all experts; the chosen ones' shares are brought to a sum of 1. Of equal experts the lower number wins.
    """
    out = np.zeros_like(x)
    for t in range(len(x)):
        logits = router @ x[t]
        shares = np.exp(logits - logits.max())
        shares /= shares.sum()
        chosen = np.argsort(-shares, kind="stable")[:used]
        for e in chosen:
            out[t] += shares[e] / shares[chosen].sum() * swiglu(x[t], w_gate[e], w_up[e], w_down[e])
    return out
