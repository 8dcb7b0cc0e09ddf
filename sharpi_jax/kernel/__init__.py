"""The C++ kernel: sources, compilation on first use, and XLA's names for it. quant/native.py calls it."""

import ctypes
import functools

import jax

from sharpi_jax.kernel.build import PATHS, BuildError, library, paths_here

__all__ = ["PATHS", "paths_here", "problem", "target"]


@functools.cache
def problem() -> str:
    """Why there is no kernel here, in words that a sentence can end with; empty where there is one."""
    try:
        target("matmul")
    except (BuildError, OSError) as fault:
        return str(fault)
    return ""


@functools.cache
def target(call: str, path: str | None = None) -> str:
    """XLA's name for one call of the kernel, which is compiled, loaded and registered if need be.

    Args:
      call: "matmul".
      path: one of PATHS that the processor can run; the best unless given.

    Raises:
      BuildError: it cannot be compiled. OSError: it cannot be loaded.
    """
    path = path or paths_here()[0]
    name = f"sharpi_{call}_{path}"
    function = getattr(ctypes.cdll.LoadLibrary(str(library(path))), f"sharpi_{call}")
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(function), platform="cpu")
    return name
