"""Parts of bench/gpu.py: what the memory gives, and the products by packed weights, right and fast."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bench.blocks import NAMES, PLAIN, random_rows
from sharpi_jax.quant import Tiled, choose_engine, matmul, pack

BLOCKS = tuple(name for name in NAMES if name not in PLAIN)
TIMED = ("Q4_K", "Q6_K", "Q8_0")
ROWS = (1, 2, 4, 8)
PASSES, ROUNDS = 16, 3


def engines() -> tuple[str, ...]:
    """The one that this device takes by itself, and the plain expression beside it."""
    return tuple(dict.fromkeys((choose_engine()[0], "xla")))


def seconds(call: Callable[[], Any], rounds: int = ROUNDS) -> float:
    """The median time of a call, after one that compiles."""
    jax.block_until_ready(call())
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def peak(nbytes: int) -> dict[str, float]:
    """GB/s at which the device reads one large array, and at which it reads and writes it: the limits of the rest."""
    array = jnp.ones(nbytes // 4, jnp.int32)

    @jax.jit
    def read(x: jax.Array) -> jax.Array:  # i keeps a pass from being moved in front of the loop
        return lax.fori_loop(0, PASSES, lambda i, most: jnp.maximum(most, jnp.max(x ^ i)), jnp.int32(0))

    @jax.jit
    def copy(x: jax.Array) -> jax.Array:
        return lax.fori_loop(0, PASSES, lambda i, x: x ^ i, x)

    moved = PASSES * array.nbytes / 1e9
    return {
        "array_gb": array.nbytes / 1e9,
        "read_gb_per_s": moved / seconds(lambda: read(array)),
        "read_and_write_gb_per_s": 2 * moved / seconds(lambda: copy(array)),
    }


def checks(names: Sequence[str] = BLOCKS, row_names: Sequence[str] = TIMED) -> list[dict[str, Any]]:
    """Each format's product against float64, in units of 2^-24 of the sum of magnitudes, and whether a row's bits stay.

    Returns:
      an entry per format and engine; "rows_exact" is None where it was not looked at.
    """
    multiply, found = jax.jit(matmul), []
    rng = np.random.default_rng(0)
    for name in names:
        raw = random_rows(rng, name, 57, 768, 0.05)
        weights = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name]).astype(np.float64)
        x = rng.standard_normal((8, 768), np.float32)
        want, size = x @ weights.T, np.abs(x) @ np.abs(weights.T)
        for engine in engines():
            weight = pack(raw, name, name, engine)
            got = np.asarray(multiply(x, weight))
            exact = None
            if name in row_names:
                exact = all(np.array_equal(np.asarray(multiply(x[:n], weight)), got[:n]) for n in (1, 2, 3, 5))
            error = float(np.max(np.abs(got - want) / size) * 2**24)
            found.append({"format": name, "engine": engine, "error": error, "rows_exact": exact})
    return found


def products(columns: int, inputs: int, read_gb_per_s: float) -> list[dict[str, Any]]:
    """Products by one [columns, inputs] matrix, PASSES of them in one program, by format, engine and rows."""

    @jax.jit
    def chain(x: jax.Array, weight: Tiled) -> jax.Array:  # each product waits for the one before
        return lax.fori_loop(0, PASSES, lambda _, x: x + 1e-30 * matmul(x, weight)[:, :1], x)

    found = []
    for name in TIMED:
        raw = random_rows(np.random.default_rng(0), name, columns, inputs, inputs**-0.5)
        laid_out = pack(raw, name, name, "xla")
        nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(laid_out))
        for engine in engines():
            weight = laid_out.replace(engine=engine)  # type: ignore[attr-defined, union-attr]
            for rows in ROWS:
                x = jnp.ones((rows, inputs), jnp.float32)
                ms = 1e3 * seconds(lambda x=x, weight=weight: chain(x, weight)) / PASSES
                speed = nbytes / ms / 1e6
                entry = {"format": name, "engine": engine, "rows": rows, "mb": nbytes / 1e6, "ms": ms}
                found.append(entry | {"gb_per_s": speed, "share": speed / read_gb_per_s})
    return found
