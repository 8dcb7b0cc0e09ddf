"""What a decode step costs by context: python bench/context.py [--draft_length=3] [--cache_dtype=float16].

The state of Qwen3.5-0.8B (24 layers) on matrices of width 16, so that only attention, recurrent states and commit cost.
A step reads the filled blocks of six layers' keys and values once, so it should not tell 1k slots from 32k, and from 64
filled positions to 4k it should grow by the bytes shown, at best at the speed at which memory is read.
"""

import dataclasses
import functools
import statistics
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import synthetic

from sharpi_jax.decode.controls import make_controls
from sharpi_jax.decode.decoder import _init
from sharpi_jax.decode.draft import MtpDrafter
from sharpi_jax.decode.loop import decode_loop
from sharpi_jax.decode.prefill import begin
from sharpi_jax.model.cache import BLOCK
from sharpi_jax.model.rope import rope_of

_DRAFT_LENGTH = flags.DEFINE_integer("draft_length", 0, "K.", lower_bound=0)
_CACHE_DTYPE = flags.DEFINE_string("cache_dtype", "float16", "type of keys and values")
CASES, STEPS, ROUNDS = ((1024, 64), (32768, 64), (32768, 4000)), 16, 5


def prepare(slots: int, filled: int):
    """The loop's program, its arguments, and a state that stands at `filled`."""
    kinds = tuple("attention" if i % 4 == 3 else "delta" for i in range(24))
    small = {"width": 16, "ffn_width": 16, "vocab_size": 128, "context_length": 1 << 16}
    cfg = dataclasses.replace(synthetic.REAL_LAYERS, layer_kinds=kinds, cache_dtype=_CACHE_DTYPE.value, **small)
    K, one = _DRAFT_LENGTH.value, jnp.ones(1, jnp.int32)
    params, controls = synthetic.random_model(cfg), make_controls([1.0], [1 << 30])
    trunk, mtp, last = _init(rope_of(cfg, slots), cfg=cfg, rows=1, drafting=K > 0)
    tokens = jnp.zeros((1, slots), jnp.int32)
    state = begin(params, trunk, mtp, last, tokens, filled * one, 10**6 * one, controls, cfg=cfg, K=K)
    state = jax.tree.map(lambda x: jnp.array(np.array(x)), state)  # each buffer once, to be taken over
    loop = jax.jit(functools.partial(decode_loop, cfg=cfg), donate_argnums=1)
    args = (controls, MtpDrafter())
    return loop.lower(params, state, *args, jnp.int32(1)).compile(), params, args, state


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]}")
    sides = {case: prepare(*case) for case in CASES}
    times: dict[tuple[int, int], list[float]] = {case: [] for case in CASES}
    for _ in range(1 + ROUNDS):
        for case, (loop, params, args, state) in sides.items():
            steps, until = int(state.counters.steps[0]), int(state.emitted[0]) + STEPS
            began = time.perf_counter()
            state = jax.block_until_ready(loop(params, state, *args, jnp.int32(until)))
            times[case].append((time.perf_counter() - began) / (int(state.counters.steps[0]) - steps))
            sides[case] = (loop, params, args, state)
    first = None
    print(f"{'slots':>6} {'filled':>7} {'ms/step':>8} {'ratio':>6} {'MB of keys and values read':>27}")
    for (slots, filled), seconds in times.items():
        median = statistics.median(seconds[1:])
        first = first or median
        row = 2 * 2 * 256 * (4 if _CACHE_DTYPE.value == "float32" else 2)  # keys and values, 2 heads of 256
        megabytes = 6 * -(-filled // BLOCK) * BLOCK * row / 1e6
        print(f"{slots:>6} {filled:>7} {median * 1e3:>8.2f} {median / first:>6.2f} {megabytes:>27.1f}")


if __name__ == "__main__":
    app.run(main)
