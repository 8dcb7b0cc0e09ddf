"""One compilation cache and one folder of unpacked fixtures per test session, for workers and subprocesses alike."""

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

# Set before JAX is imported. pytest-xdist's workers inherit it from the controller, subprocesses from the workers.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", tempfile.mkdtemp(prefix="sharpi-jax-test-cache-"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

if "SHARPI_JAX_TEST_FIXTURES" not in os.environ:  # the fixtures that fixtures.py unpacks; workers share the folder
    os.environ["SHARPI_JAX_TEST_FIXTURES"] = tempfile.mkdtemp(prefix="sharpi-jax-test-fixtures-")
    atexit.register(shutil.rmtree, os.environ["SHARPI_JAX_TEST_FIXTURES"], ignore_errors=True)

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of the fixture models and their reference outputs."""
    return DATA


@pytest.fixture(scope="module", autouse=True)
def _forget_programs() -> Iterator[None]:
    """Between the files of tests, so that their compiled programs do not add up."""
    yield
    import models  # here, not above: it imports the package

    models.forget()
