"""How fast this machine reads memory: the limit on decoding one stream, which reads every weight for each step."""

import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

READ_BYTES = 1 << 28  # many times what a processor's caches hold


class Bandwidth:
    """Reads a large array again and again: on the CPU by NumPy sums in threads, elsewhere by a reduction in JAX.

    Integer sums: NumPy's come within a few per cent of a streaming read in C++ and hold no lock, while floats' are
    summed in pairs, and XLA's reductions on the CPU run on one thread.

    Attributes:
      threads: that read at once, on the CPU.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._array = np.ones(READ_BYTES // 8, np.int64)
        self._on_cpu = jax.default_backend() == "cpu"
        if self._on_cpu:
            self._parts = np.array_split(self._array, threads)
            self._pool = ThreadPoolExecutor(threads)
        else:
            self._device_array = jax.device_put(self._array.view(np.int32))
            self._max = jax.jit(jnp.max)
        self.measure()  # pages are touched, threads started, the program compiled

    def measure(self) -> float:
        """Gigabytes (1e9) a second of one pass over the array."""
        began = time.perf_counter()
        if self._on_cpu:
            list(self._pool.map(np.sum, self._parts))
        else:
            jax.block_until_ready(self._max(self._device_array))
        return READ_BYTES / (time.perf_counter() - began) / 1e9
