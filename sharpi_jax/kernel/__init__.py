"""The C++ kernels: sources, compilation on first use, and XLA's names for them."""

import concurrent.futures
import ctypes
import functools
import os

import jax

from sharpi_jax.kernel.build import PATHS, BuildError, library, paths_here

__all__ = ["PATHS", "compile_ahead", "paths_here", "problem", "target"]


@functools.cache
def problem() -> str:
    """Why there are no kernels here, in words that a sentence can end with; empty where there are."""
    try:
        target("norms")
    except (BuildError, OSError) as fault:
        return str(fault)
    return ""


def compile_ahead(*wanted: tuple[str, ...]) -> None:
    """Begins to compile kernels, as many at a time as there are processors, and does not wait.

    Args:
      wanted: (call, macros...) each, as for `target`, which waits for what is still being compiled.
    """
    pool = concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1)
    for call, *defined in wanted:
        pool.submit(library, f"{call}.cc", paths_here()[0], *defined)
    pool.shutdown(wait=False)


@functools.cache
def target(call: str, *defined: str, path: str | None = None) -> str:
    """XLA's name for a call of a kernel, which is compiled, loaded and registered if need be.

    Args:
      call: the name of a source without .cc; its handler is called sharpi_ and this name.
      defined: macros for the source, NAME=VALUE.
      path: one of PATHS that the processor can run; the best unless given.

    Raises:
      BuildError: it cannot be compiled. OSError: it cannot be loaded.
    """
    path = path or paths_here()[0]
    name = "_".join(("sharpi", call, path, *defined))
    function = getattr(ctypes.cdll.LoadLibrary(str(library(f"{call}.cc", path, *defined))), f"sharpi_{call}")
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(function), platform="cpu")
    return name
