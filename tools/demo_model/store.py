"""Pytrees on disk, leaf by leaf: what training saves and export reads."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np


def save(path: pathlib.Path, tree: object) -> None:
    """A pytree's leaves, in order; the file is replaced whole."""
    partial = path.with_suffix(".part.npz")
    np.savez(partial, *jax.tree.leaves(tree))
    partial.replace(path)


def restore(path: pathlib.Path, like: object) -> object:
    """The pytree that `save` wrote, or `like` itself where there is no file."""
    if not path.exists():
        return like
    with np.load(path) as file:
        leaves = [jnp.asarray(file[f"arr_{i}"]) for i in range(len(file.files))]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)
