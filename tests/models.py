"""The fixture models, each read once per test process, and decoders that share their compiled programs."""

import functools

import jax
import numpy as np
from fixtures import DATA, arrays, fixture, quantised, reference

from sharpi_jax import checkpoint
from sharpi_jax.api import Model, load
from sharpi_jax.decode.decoder import Decoder
from sharpi_jax.decode.state import DecodeState
from sharpi_jax.model.cache import DeltaState, KVCache
from sharpi_jax.quant import Packed, Tiled, Weight

__all__ = ["DATA", "arrays", "fixture", "quantised", "reference"]  # and what stands below

KEPT = 6  # models at a time: see `forget`


@functools.lru_cache(KEPT)
def read(name: str) -> checkpoint.Checkpoint:
    """A fixture GGUF by its name without the ending."""
    return checkpoint.read(fixture(name))


@functools.lru_cache(KEPT)
def decoder(name: str) -> Decoder:
    """A decoder on a fixture's weights."""
    found = read(name)
    return Decoder(found.params, found.config)


@functools.lru_cache(KEPT)
def model(name: str) -> Model:
    """The facade over the same decoder: programs compiled by one test serve all."""
    facade = Model(read(name), "float32", "float32")
    facade.decoder = decoder(name)
    return facade


@functools.cache
def demo() -> Model:
    """The model that ships with the package: the one with a trained head."""
    return load()


def forget() -> None:
    """Lets all models go, with their compiled programs.

    XLA maps memory for every kernel, and Linux allows a process 65,530 maps by default: with every fixture's programs
    kept to the end, a compilation would be aborted for want of them.
    """
    for kept in (read, decoder, model, demo):
        kept.cache_clear()
    jax.clear_caches()


def committed(state: DecodeState, row: int) -> list[np.ndarray]:
    """Keys and values below a row's length, conv windows, delta states, and the hidden of its last position.

    The hidden is there because no cache holds what the last layer makes of its attention.
    """
    length, behind = int(state.length[row]), int(state.behind[row])
    arrays: list[np.ndarray] = [np.asarray(state.window_hidden[row])[behind]]
    for layer in jax.device_get(state.trunk.layers):
        match layer:
            case KVCache():
                arrays += [layer.k[row, :length], layer.v[row, :length]]
            case DeltaState():
                arrays += [layer.conv[row], layer.recurrent[row]]
    return arrays


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal shape, type and bytes: -0.0 differs from 0.0, and a NaN equals itself."""
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def same_params(a, b) -> bool:
    """The same tree of arrays, bit for bit."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return jax.tree.structure(a) == jax.tree.structure(b) and all(same_bits(*map(np.asarray, p)) for p in pairs)


def packed_weights(params) -> list[Weight]:
    """Every matrix of a model, shared ones once."""
    leaves = jax.tree.leaves(params, is_leaf=is_weight)
    return list({id(jax.tree.leaves(x)[0]): x for x in leaves if is_weight(x)}.values())


def is_weight(x) -> bool:
    return isinstance(x, Packed | Tiled)
