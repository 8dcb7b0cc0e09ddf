"""One packed product by format, engine and rows, against the bandwidth at which memory is read in the same run.

    python -m bench.products [--format=Q4_K,Q6_K,Q8_0] [--engine=native,xla] [--rows=1,2,4,8] [--int8=true] [--rounds=9]

The weight is [65536, 2048], over 70 MB in every format: larger than a cache. Sides in turn, medians. XLA's form is that
of decode windows.
"""

import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from bench.blocks import random_rows
from sharpi_jax.evaluate.bandwidth import Bandwidth
from sharpi_jax.quant import for_few_rows, matmul, pack

_FORMAT = flags.DEFINE_list("format", ["Q4_K", "Q6_K", "Q8_0"], "block formats")
_ENGINE = flags.DEFINE_list("engine", ["native", "xla"], "what multiplies")
_ROWS = flags.DEFINE_list("rows", ["1", "2", "4", "8"], "rows of activations")
_INT8 = flags.DEFINE_bool("int8", True, "activations as int8, as --act_quant=q8 has them")
_ROUNDS = flags.DEFINE_integer("rounds", 9, "runs of each, after one that compiles", lower_bound=1)
N, K = 65536, 2048


def main(argv: list[str]) -> None:
    del argv
    rng, bandwidth = np.random.default_rng(0), Bandwidth(2)
    product = jax.jit(matmul, static_argnums=2)
    for name in _FORMAT.value:
        raw = np.tile(random_rows(rng, name, 1024, K, K**-0.5), (N // 1024, 1))
        sides = {engine: for_few_rows(pack(raw, name, "bench", engine)) for engine in _ENGINE.value}
        nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(next(iter(sides.values()))))
        inputs = {int(n): jnp.asarray(rng.standard_normal((int(n), K), np.float32)) for n in _ROWS.value}
        times = {(engine, n): [] for engine in sides for n in inputs}
        read = []
        for _ in range(1 + _ROUNDS.value):
            for engine, n in times:
                began = time.perf_counter()
                jax.block_until_ready(product(inputs[n], sides[engine], "int8" if _INT8.value else "float32"))
                times[engine, n].append(time.perf_counter() - began)
            read.append(bandwidth.measure())
        best = max(read)
        for (engine, n), taken in times.items():
            seconds = statistics.median(taken[1:])
            rate = nbytes / seconds / 1e9
            share = f"{rate / best:.1%} of {best:.1f}"
            print(f"{name:<7}{engine:<7}{n:>2} rows {seconds * 1e6:>9.0f} us {rate:>6.1f} GB/s  {share}", flush=True)


if __name__ == "__main__":
    app.run(main)
