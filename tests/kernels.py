"""What the tests of the C++ kernels share."""

import subprocess
import sys
from pathlib import Path

import pytest

from sharpi_jax import kernel
from sharpi_jax.kernel.build import NO_COMPILER

# Where there is a compiler the kernels must work: one that does not compile fails its tests, and is not passed over.
needs_compiler = pytest.mark.skipif(kernel.problem() == NO_COMPILER, reason=NO_COMPILER)


def lines_by_threads(script: str) -> list[list[str]]:
    """What a script prints, line by line, with XLA's pool of 1, 2 and 5 threads; it may import the tests' modules."""
    prepared = f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n{script}"
    environment = {"PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu", "HOME": str(Path.home())}
    runs = (
        subprocess.run(
            [sys.executable, "-c", prepared],
            env=environment | {"NPROC": threads},
            capture_output=True,
            text=True,
            check=True,
        )
        for threads in "125"
    )
    return [run.stdout.splitlines() for run in runs]
