"""Compiles the C++ kernels on first use, for this processor, into the user's cache folder.

A compiler on the user's machine is the most robust way for a kernel that must fit the processor and needs only headers
that come with JAX: one file, two seconds, no Python ABI. Without one nothing breaks, see `matmul`.
"""

import collections
import functools
import os
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path

import jax

from sharpi_jax import folders
from sharpi_jax.errors import SharpiError

SOURCES = Path(__file__).parent
_AVX2 = ("avx2", "fma", "f16c")
# The paths, best first: what the processor must have, in Linux's words, and what the compiler is told.
PATHS = {
    "avx512": (
        (*_AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"),
        ("-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni"),
    ),
    "avx2": (_AVX2, ("-mavx2", "-mfma", "-mf16c")),
    "portable": ((), ()),
}
# No contraction: only what the source calls fma is one, so that all functions round alike.
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-ffp-contract=off")


NO_COMPILER = "no C++ compiler was found"


class BuildError(SharpiError):
    """A kernel cannot be had; the message says why, without a full stop."""


def paths_here() -> tuple[str, ...]:
    """The paths that this processor can run, best first."""
    have = set(folders.processor_flags())
    return tuple(name for name, (needs, _) in PATHS.items() if have.issuperset(needs))


_LOCKS: dict[tuple[str, ...], threading.Lock] = collections.defaultdict(threading.Lock)


def library(source: str, path: str, *defined: str) -> Path:
    """As `_library`, once at a time: a thread that needs what another one is compiling waits for it."""
    with _LOCKS[source, path, *defined]:
        return _library(source, path, *defined)


@functools.cache
def _library(source: str, path: str, *defined: str) -> Path:
    """The compiled kernel of one source and one path, built if need be.

    Args:
      source: a .cc file's name. defined: macros for it, NAME=VALUE.

    Raises:
      BuildError: there is no compiler, it fails, or the cache folder cannot be written.
    """
    compiler = next((c for c in (os.environ.get("CXX"), "c++", "g++", "clang++") if c and shutil.which(c)), None)
    if compiler is None:
        raise BuildError(NO_COMPILER)
    flags = (*_FLAGS, *PATHS[path][1], *(f"-D{macro}" for macro in defined))
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    sources = [file.read_text() for file in sorted(SOURCES.iterdir()) if file.suffix == ".h" or file.name == source]
    # JAX's own name stands for its headers: the calls keep their ABI, but nothing is gained by trusting it.
    name = folders.key(*sources, *flags, compiler, version, jax.__version__)
    target = folders.cache_folder() / "kernels" / f"{source.removesuffix('.cc')}-{path}-{name}.so"
    if not target.exists():
        _compile([compiler, *flags, "-w", "-isystem", jax.ffi.include_dir(), str(SOURCES / source)], target)
    return target


def _compile(command: list[str], target: Path) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            made = Path(folder) / target.name
            done = subprocess.run([*command, "-o", str(made)], capture_output=True, text=True, check=False)
            if done.returncode != 0:
                why = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[-200:])
                raise BuildError(f"{command[0]} failed: {why}")
            os.replace(made, target)  # whole or not at all, whoever else builds it
    except OSError as fault:
        raise BuildError(f"{target.parent} cannot be written ({fault.strerror})") from fault
