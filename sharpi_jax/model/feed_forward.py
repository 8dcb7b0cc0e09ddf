"""The feed-forward half of a layer: SwiGLU, or a mixture of experts.

What must not be got wrong in the mixture: a row's bits depend neither on how many rows there are nor on which experts
the others chose. Each (row, expert) pair goes through a dot of a fixed number of rows, whoever shares it, and a row's
experts are added up in the order of its own choice.
"""

import jax
import jax.numpy as jnp
from jax import lax

from sharpi_jax.model.config import ModelConfig
from sharpi_jax.model.norms import row_sum
from sharpi_jax.model.params import ExpertsParams, FeedForwardParams
from sharpi_jax.model.window import Window
from sharpi_jax.quant import matmul, rows_dot, take_matrix

# Rows that share one reading of an expert: a prompt has many for each, a decode window one or two. Every block is
# filled up to this many, so only a row's place among them could change its bits, and it does not (test_feed_forward).
_PROMPT_BLOCK, _DECODE_BLOCK = 32, 4


def feed_forward(p: FeedForwardParams | ExpertsParams, cfg: ModelConfig, y: jax.Array, window: Window) -> jax.Array:
    """y [B, T, D] normed input -> [B, T, D]."""
    return swiglu(p, cfg, y, window.used) if isinstance(p, FeedForwardParams) else mixture_of_experts(p, cfg, y, window)


def swiglu(p: FeedForwardParams, cfg: ModelConfig, y: jax.Array, used: int | None = None) -> jax.Array:
    """down (silu(gate y) * up y) (Shazeer 2020): [..., D] -> [..., D]; `used` as in `quant.matmul`."""
    gate, up = (matmul(y, weight, cfg.dtype, used) for weight in (p.gate, p.up))
    return matmul(jax.nn.silu(gate) * up, p.down, cfg.dtype, used)


def mixture_of_experts(p: ExpertsParams, cfg: ModelConfig, y: jax.Array, window: Window) -> jax.Array:
    """Each position's k likeliest experts, by shares that sum to 1, and the shared expert where there is one.

    Shares are a softmax over all experts, brought to a sum of 1 over the chosen: the same as a softmax over the chosen
    alone. Of equal experts the lower number wins. The router works in float32 whatever cfg.dtype.
    """
    top, chosen = lax.top_k(matmul(y, p.router), cfg.experts_used)
    shares = jnp.exp(top - top[..., :1])
    shares = shares / row_sum(shares)
    # Padding chooses an expert that does not exist, so that nothing is read for it.
    chosen = jnp.where(window.valid[..., None], chosen, cfg.experts)
    each = _run_chosen(p, cfg, y, chosen, _DECODE_BLOCK if window.row_exact else _PROMPT_BLOCK)
    out = shares[..., :1] * each[..., 0, :]
    for j in range(1, cfg.experts_used):
        out = out + shares[..., j : j + 1] * each[..., j, :]
    if p.shared is None:
        return out
    assert p.shared_gate is not None
    return out + jax.nn.sigmoid(rows_dot(y, p.shared_gate[None])) * swiglu(p.shared, cfg, y, window.used)


def _run_chosen(p: ExpertsParams, cfg: ModelConfig, y: jax.Array, chosen: jax.Array, size: int) -> jax.Array:
    """y [B, T, D] through each position's experts `chosen` [B, T, k]: [B, T, k, D]; zeros for expert number X.

    (position, expert) pairs are sorted by expert and cut into blocks of at most `size` of one expert. The loop runs
    over the blocks that there are, so only chosen experts are read and unpacked, each once per block.
    """
    rows, flat, k = y.reshape(-1, y.shape[-1]), chosen.reshape(-1), cfg.experts_used
    pairs = flat.shape[0]
    order = jnp.argsort(flat, stable=True)
    counts = jnp.zeros(cfg.experts, jnp.int32).at[flat].add(1, mode="drop")
    ends, blocks = jnp.cumsum(counts), -(-counts // size)
    block_ends = jnp.cumsum(blocks)

    def one_block(block: jax.Array, out: jax.Array) -> jax.Array:
        expert = jnp.searchsorted(block_ends, block, side="right")
        first = ends[expert] - counts[expert] + size * (block - block_ends[expert] + blocks[expert])
        places = first + jnp.arange(size)
        taken = jnp.take(order, places, mode="clip")
        weights = FeedForwardParams(*(take_matrix(w, expert) for w in (p.gate, p.up, p.down)))
        result = swiglu(weights, cfg, jnp.take(rows, taken // k, axis=0))
        return out.at[jnp.where(places < ends[expert], taken, pairs)].set(result, mode="drop")

    out: jax.Array = lax.fori_loop(0, block_ends[-1], one_block, jnp.zeros((pairs, rows.shape[-1]), jnp.float32))
    return out.reshape(*chosen.shape, rows.shape[-1])
