"""Where this package keeps what it made on this machine: compiled programs and kernels, one folder per processor."""

import hashlib
import os
import platform as host
from pathlib import Path


def cache_folder() -> Path:
    """The user's own: XDG_CACHE_HOME, or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sharpi_jax"


def processor_flags() -> tuple[str, ...]:
    """What the processor can do, in Linux's words; its name elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    found = next((line for line in lines if line.startswith(("flags", "Features"))), host.processor())
    return tuple(found.partition(":")[2].split() or [found])


def key(*parts: str) -> str:
    """A name for a folder or file that holds for these parts, this machine and this processor only."""
    whole = "\n".join((host.machine(), " ".join(processor_flags()), *parts))
    return hashlib.sha256(whole.encode()).hexdigest()[:16]
