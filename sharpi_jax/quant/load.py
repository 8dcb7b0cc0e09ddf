"""From a tensor's bytes to a weight on the device: plain floats as they are, block formats in tiles, slab by slab."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from sharpi_jax import kernel
from sharpi_jax.errors import CheckpointError, OptionError
from sharpi_jax.quant import native
from sharpi_jax.quant.expand import can_expand, expand
from sharpi_jax.quant.formats import FORMATS
from sharpi_jax.quant.packed import Packed
from sharpi_jax.quant.tiles import LANES, Tiled, tile

ENGINES = ("native", "triton", "xla")  # the C++ kernel (CPU), the Pallas kernel (GPU), what XLA compiles by itself
_BACKEND = {"native": "cpu", "triton": "gpu"}
_BOUNDARY = 64  # bytes
_SLAB = 1 << 18  # weights that are laid out at a time: a shape to compile per width, and little memory in between


def choose_engine(wanted: str = "auto") -> tuple[str, tuple[str, ...]]:
    """The engine to use, and a note where it is not the fastest for want of a compiler.

    Raises:
      OptionError: the name is not known, or the engine cannot work here.
    """
    if wanted not in ("auto", *ENGINES):
        raise OptionError(f"engine must be one of auto, {', '.join(ENGINES)}, not {wanted!r}.")
    here = jax.default_backend()
    engine = {"cpu": "native", "gpu": "triton"}.get(here, "xla") if wanted == "auto" else wanted
    if engine != "xla" and _BACKEND[engine] != here:
        raise OptionError(f"engine {engine} is for a {_BACKEND[engine].upper()}, and this runs on {here}; use auto.")
    problem = kernel.problem() if engine == "native" else ""
    if not problem:
        return engine, ()
    fix = "install g++ or name a compiler in CXX"
    if wanted == "native":
        raise OptionError(f"engine native is not available: {problem}; {fix}, or use engine auto.")
    return "xla", (f"the C++ kernel for CPUs is not available ({problem}): decoding is slower; {fix}.",)


def lays_out(type_name: str, engine: str | None) -> bool:
    """Whether `pack` makes memory of its own, slab by slab, of a tensor of this type."""
    return engine is not None and type_name in FORMATS and not FORMATS[type_name].is_plain


def pack(
    raw: np.ndarray,
    type_name: str,
    tensor: str,
    engine: str | None = None,
    release: Callable[[np.ndarray], None] = lambda rows: None,
) -> Packed | Tiled:
    """A tensor's bytes, put on the device; of a type without a decoder here, expanded to bfloat16.

    Args:
      raw: [..., N, bytes per row] uint8, as it lies in the file. Where it is not laid out the device may take it over
        without a copy, on CPU: then it must never change, and is best memory of its own, not a view of a mapped file.
      type_name: ggml's name of its type.
      tensor: the tensor's name, for the message.
      engine: what is to multiply by it, one of ENGINES: block formats are laid out in tiles for it. None leaves them
        as they are in the file.
      release: called with rows of `raw` that will not be read again, some of them more than once.

    Raises:
      CheckpointError: the type is not supported.
    """
    if type_name not in FORMATS:
        if not can_expand(type_name):
            raise CheckpointError(
                f"tensor {tensor} has type {type_name}, which is not supported; "
                f"convert the file to one of {', '.join(FORMATS)}."
            )
        raw, type_name = expand(raw, type_name), "BF16"
    if engine is not None and lays_out(type_name, engine):
        if engine == "native":
            native.compile_ahead(type_name)
        return _lay_out(raw, type_name, engine, release)
    return Packed(jax.device_put(raw.view(jnp.dtype(FORMATS[type_name].dtype))), type_name)


def _lay_out(raw: np.ndarray, type_name: str, engine: str, release: Callable[[np.ndarray], None]) -> Tiled:
    """A tensor's bytes [..., N, bytes per row] of a block format in tiles, on the device."""
    *lead, N, width = raw.shape
    stacks = [_lay_out_one(matrix, type_name, release) for matrix in raw.reshape(-1, N, width)]
    fields = jax.tree.map(lambda *same: np.stack(same).reshape(*lead, *same[0].shape), *stacks) if lead else stacks[0]
    placed: Tiled = jax.tree.map(jax.device_put, fields)
    return placed.replace(engine=engine)  # type: ignore[attr-defined, no-any-return]


def _lay_out_one(raw: np.ndarray, type_name: str, release: Callable[[np.ndarray], None]) -> Tiled:
    """One matrix in tiles, in aligned memory of the host."""
    N, width = raw.shape
    fmt = FORMATS[type_name]
    slab = max(_SLAB // (width // fmt.block_bytes * fmt.block_size) // LANES, 1) * LANES
    whole: Tiled | None = None
    for at in range(0, N, slab):
        rows = raw[at : at + slab]
        whole_slab = np.pad(rows, ((0, slab - len(rows)), (0, 0))) if len(rows) < slab else rows
        piece = jax.block_until_ready(_tile_program(whole_slab, type_name))
        release(raw[: at + slab])  # from the start: a system that reads ahead maps pages around those that are touched
        if whole is None:
            whole = jax.tree.map(lambda field: _aligned((-(-N // LANES), *field.shape[1:]), field.dtype), piece)
        jax.tree.map(functools.partial(_put, at // LANES), whole, piece)
    assert whole is not None
    return whole.replace(out_features=N)  # type: ignore[attr-defined, no-any-return]


def _put(at: int, whole: np.ndarray, piece: jax.Array) -> None:
    part = whole[at : at + len(piece)]
    part[:] = np.asarray(piece)[: len(part)]


@functools.partial(jax.jit, static_argnums=1)
def _tile_program(rows: jax.Array, type_name: str) -> Tiled:
    return tile(Packed(rows, type_name))


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Memory that a CPU device can take over without a copy."""
    nbytes = int(np.prod(shape)) * dtype.itemsize
    room = np.empty(nbytes + _BOUNDARY, np.uint8)
    start = -room.ctypes.data % _BOUNDARY
    return room[start : start + nbytes].view(dtype).reshape(shape)
