"""What a mixture of experts costs as experts are added that nobody chooses: python bench/experts.py.

One layer's experts in Q8_0, a decode window, 4 experts a position. Only chosen experts are read, so for one position 64
of them read as many bytes as 8 do, though 8 may stay in the processor's cache where 64 do not; a window of four
positions chooses at most 8 of 8 and at most 16 of 64. The dense pass beside it, which runs all and keeps the chosen,
costs in proportion. Sides alternate, medians of 15.
"""

import statistics
import time

import gguf
import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from sharpi_jax.model.config import ModelConfig
from sharpi_jax.model.feed_forward import mixture_of_experts, swiglu
from sharpi_jax.model.params import ExpertsParams, FeedForwardParams
from sharpi_jax.model.window import Window, window_at
from sharpi_jax.quant import matmul, pack, take_matrix

_WIDTH = flags.DEFINE_integer("width", 1024, "D.", lower_bound=32)
_EXPERT_WIDTH = flags.DEFINE_integer("expert_width", 512, "F of each expert.", lower_bound=32)
COUNTS, USED, POSITIONS, ROUNDS = (8, 64), 4, (1, 4), 15


def make(experts: int) -> tuple[ExpertsParams, ModelConfig]:
    """Random experts in Q8_0."""
    D, F, rng = _WIDTH.value, _EXPERT_WIDTH.value, np.random.default_rng(0)
    q8_0 = gguf.GGMLQuantizationType.Q8_0

    def stack(*shape: int):
        weights = rng.standard_normal(shape, np.float32) * np.float32(shape[-1] ** -0.5)
        return pack(gguf.quants.quantize(weights, q8_0), "Q8_0", "experts")

    router = pack((rng.standard_normal((experts, D), np.float32) / 8).view(np.uint8), "F32", "router")
    params = ExpertsParams(router, stack(experts, F, D), stack(experts, F, D), stack(experts, D, F))
    cfg = ModelConfig("qwen3moe", (), False, D, 0, 0, 0, 1, 1, 1, 0, 1.0, 1e-6, experts=experts, experts_used=USED)
    return params, cfg


def dense_pass(p: ExpertsParams, cfg: ModelConfig, y: jax.Array, window: Window) -> jax.Array:
    """Every expert on every position, weighted by its share or by zero."""
    top, chosen = jax.lax.top_k(matmul(y, p.router), cfg.experts_used)
    shares = jax.nn.one_hot(chosen, cfg.experts) * jax.nn.softmax(top)[..., None]

    def one(expert: jax.Array, out: jax.Array) -> jax.Array:
        weights = FeedForwardParams(*(take_matrix(w, expert) for w in (p.gate, p.up, p.down)))
        return out + jnp.sum(shares, axis=-2)[..., expert, None] * swiglu(weights, cfg, y)

    out: jax.Array = jax.lax.fori_loop(0, cfg.experts, one, jnp.zeros_like(y))
    return out


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]}")
    for positions in POSITIONS:
        rng = np.random.default_rng(1)
        width = max(positions, 2)
        window = window_at(jnp.zeros(1, jnp.int32), jnp.full(1, positions), width, row_exact=True)
        sides = {}
        for name, layer in (("chosen", mixture_of_experts), ("dense", dense_pass)):
            for experts in COUNTS:
                params, cfg = make(experts)
                run = jax.jit(layer, static_argnums=1)
                y = jnp.asarray(rng.standard_normal((1, width, cfg.width), np.float32))
                jax.block_until_ready(run(params, cfg, y, window))
                sides[name, experts] = (run, params, cfg)
        seconds: dict[tuple[str, int], list[float]] = {side: [] for side in sides}
        for _ in range(ROUNDS):
            y = jnp.asarray(rng.standard_normal((1, width, _WIDTH.value), np.float32))
            for side, (run, params, cfg) in sides.items():
                began = time.perf_counter()
                jax.block_until_ready(run(params, cfg, y, window))
                seconds[side].append(time.perf_counter() - began)
        medians = {side: statistics.median(times) for side, times in seconds.items()}
        few, many = COUNTS
        for name in ("chosen", "dense"):
            ratio = medians[name, many] / medians[name, few]
            print(
                f"{positions} positions, {name}: {many} experts take {ratio:.2f} times {few} "
                f"({medians[name, few] * 1e3:.1f} and {medians[name, many] * 1e3:.1f} ms)"
            )


if __name__ == "__main__":
    app.run(main)
