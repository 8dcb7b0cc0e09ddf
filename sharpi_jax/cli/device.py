"""What must be settled before JAX starts: the platform, the number of threads, where compiled programs are kept.

JAX reads JAX_PLATFORMS when it is imported. XLA's CPU client sizes its thread pool by NPROC when it starts (seen with
jax 0.10.2: NPROC=1 keeps a matrix product on one core, NPROC=8 makes eight threads on two). An affinity mask could only
make the pool smaller, and `intra_op_parallelism_threads` in XLA_FLAGS changes nothing.
"""

import contextlib
import importlib.metadata
import os
from pathlib import Path

from sharpi_jax import folders
from sharpi_jax.errors import OptionError

# A second name is a fallback, so that JAX starts and `check` can say in one line what it found instead.
_JAX_PLATFORMS = {"cpu": "cpu", "gpu": "cuda,cpu", "tpu": "tpu,cpu"}
_EXTRAS = {"gpu": "cuda", "tpu": "tpu"}


def configure(platform: str | None, threads: int | None, *, compile_cache: bool = True) -> None:
    """Sets the environment that JAX will read; None leaves it as it is."""
    if platform is not None:
        os.environ["JAX_PLATFORMS"] = _JAX_PLATFORMS[platform]
    if threads is not None:
        os.environ["NPROC"] = str(threads)
    if not compile_cache:
        os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    elif "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        folder = _cache_folder()
        with contextlib.suppress(OSError):  # a home that cannot be written costs compiling anew, nothing else
            folder.mkdir(parents=True, exist_ok=True)
            os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)
            os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")


def _cache_folder() -> Path:
    """The user's own, so that only the first run with a shape compiles it: a second run starts in a moment.

    A folder per processor, since a home directory may be shared by machines: programs hold its instructions.
    """
    return folders.cache_folder() / f"xla-{folders.key(importlib.metadata.version('jaxlib'))}"


def check(platform: str | None) -> None:
    """Starts JAX and makes sure that it runs where it should.

    Raises:
      OptionError: the platform is not available.
    """
    import jax  # here, not above: flags and files are checked before the seconds that this takes

    try:
        found, reason = jax.default_backend(), ""
    except (RuntimeError, AssertionError) as error:  # an assertion is how jax 0.10 says that no platform is left
        found, reason = "", str(error).partition("\n")[0]
    if platform is None and not found:
        raise OptionError(f"JAX cannot start on {os.environ.get('JAX_PLATFORMS', 'this machine')}: {reason}")
    if platform is not None and found != platform:
        extra = _EXTRAS.get(platform)
        fix = f"on a machine that has one, install the extra: pip install 'sharpi-jax[{extra}]'." if extra else reason
        raise OptionError(f"--platform={platform}: JAX finds no {platform.upper()} here; {fix}")
