"""Where this package keeps what it made on this machine: compiled programs and kernels, and what it measured."""

import contextlib
import hashlib
import os
import platform as host
import tempfile
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


def kept(name: str) -> str | None:
    """The text of a file in the cache folder; None where there is none, or none that can be read."""
    try:
        return (cache_folder() / name).read_text(encoding="utf-8")
    except (OSError, RuntimeError, ValueError):  # no such file, no home folder, no text
        return None


def keep(name: str, text: str) -> None:
    """Writes a file of the cache folder, whole or not at all, whoever else writes it; quietly not where it cannot."""
    with contextlib.suppress(OSError, RuntimeError):
        target = cache_folder() / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            made = Path(folder) / target.name
            made.write_text(text, encoding="utf-8")
            os.replace(made, target)
