"""An MTP head that lies in a file of its own, beside the file that holds the trunk.

The two are joined as if they had been one file, so that config and weights know nothing of it. As in llama.cpp, the
sidecar's own embedding, output and norm serve its head where it has them. They are normally copies of the trunk's, in
which case the trunk's serve both and nothing is loaded twice.
"""

import dataclasses
from types import MappingProxyType
from typing import Any

import numpy as np

from sharpi_jax.checkpoint.config import read_config
from sharpi_jax.checkpoint.gguf_file import GGUFFile, TensorInfo
from sharpi_jax.checkpoint.names import block_of
from sharpi_jax.checkpoint.vocabulary import shown
from sharpi_jax.errors import CheckpointError

_TOP = ("token_embd.weight", "output_norm.weight", "output.weight")
# What an MTP block and a trunk layer must have in common, as far as both files give it.
_SHARED_KEYS = (
    *("embedding_length", "feed_forward_length"),
    *("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length"),
    *("attention.layer_norm_rms_epsilon", "rope.dimension_count", "rope.freq_base"),
    *("expert_count", "expert_used_count", "expert_feed_forward_length", "expert_shared_feed_forward_length"),
)


def is_head_alone(file: GGUFFile) -> bool:
    """Whether a file holds an MTP head and no trunk."""
    blocks = list(map(block_of, file.tensors))
    return any(is_nextn for _, is_nextn in blocks) and all(block for block, _ in blocks)


def join_sidecar(trunk: GGUFFile, sidecar: GGUFFile) -> tuple[GGUFFile, tuple[str, ...]]:
    """The trunk's file with the sidecar's MTP head in place of its own, and remarks for the user.

    Raises:
      CheckpointError: the sidecar is none, or belongs to a model of another kind, shape or vocabulary.
    """
    if not is_head_alone(sidecar):
        holds = "a trunk" if any(name.startswith("blk.0.") for name in sidecar.tensors) else "no MTP head"
        raise CheckpointError(
            f"{sidecar.path} holds {holds}; give a file that holds an MTP head alone as --mtp_model, "
            "or leave --mtp_model out."
        )
    config, _ = read_config(trunk)
    first = len(config.layer_kinds)
    _check_same_model(trunk, sidecar, config.architecture)
    blocks = {block for name in sidecar.tensors if (block := block_of(name)[0]) >= 0}
    if min(blocks) != first:
        raise CheckpointError(
            f"{sidecar.path} holds an MTP head for a trunk of {min(blocks)} layers, but {trunk.path} has {first}."
        )
    tensors = {name: info for name, info in trunk.tensors.items() if block_of(name)[0] < first}
    tensors |= {name: info for name, info in sidecar.tensors.items() if name not in _TOP}
    tensors |= _own_tables(trunk, sidecar, f"blk.{first}.nextn.")
    metadata = dict(trunk.metadata)
    metadata[f"{config.architecture}.block_count"] = first + len(blocks)
    metadata[f"{config.architecture}.nextn_predict_layers"] = len(blocks)
    joined = dataclasses.replace(
        trunk,
        metadata=MappingProxyType(metadata),
        tensors=MappingProxyType(tensors),
        files=trunk.files + sidecar.files,
    )
    replaced = (f"the MTP head of {sidecar.path.name} is used in place of the model file's own",)
    return joined, replaced if config.has_mtp else ()


def _check_same_model(trunk: GGUFFile, sidecar: GGUFFile, architecture: str) -> None:
    """Refuses a head whose metadata show that it was made for another trunk."""
    # The vocabulary as a whole: one of the same size but of another model would draft nonsense without a word.
    keys = [f"{architecture}.{key}" for key in _SHARED_KEYS]
    for key in ("general.architecture", *keys, "tokenizer.ggml.tokens"):
        own, wanted = sidecar.metadata.get(key), trunk.metadata.get(key)
        if own is not None and wanted is not None and not _equal(own, wanted):
            differ = f"{_shown(own)}, not {_shown(wanted)}" if _shown(own) != _shown(wanted) else "another"
            raise CheckpointError(f"{sidecar.path} does not belong to {trunk.path}: its {key} is {differ}.")
    unknown = [name for name in sidecar.tensors if block_of(name)[0] < 0 and name not in _TOP]
    if unknown:
        raise CheckpointError(f"{sidecar.path}: tensor {unknown[0]} is not known for an MTP head.")


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return np.array_equal(np.unique(a), np.unique(b))  # one value per layer, of which the two have not equally many
    return bool(a == b)


def _shown(value: Any) -> str:
    return f"a list of {len(value)}" if isinstance(value, list) else shown(value)


def _own_tables(trunk: GGUFFile, sidecar: GGUFFile, prefix: str) -> dict[str, TensorInfo]:
    """The sidecar's embedding, head and norm under the names of the MTP block's own, less those equal to the trunk's.

    A model without an output tensor is tied: its embedding is its head. So the sidecar's embedding is its head only
    where neither file has an output tensor.
    """
    has_output = any("output.weight" in file.tensors for file in (trunk, sidecar))
    head = "output.weight" if has_output else "token_embd.weight"
    sources = {
        "embed_tokens.weight": "token_embd.weight",
        "shared_head_norm.weight": "output_norm.weight",
        "shared_head_head.weight": head,
    }
    return {
        prefix + own: sidecar.tensors[name]
        for own, name in sources.items()
        if name in sidecar.tensors and prefix + own not in sidecar.tensors and not _same(name, trunk, sidecar)
    }


def _same(name: str, trunk: GGUFFile, sidecar: GGUFFile) -> bool:
    """Whether both files hold a tensor of this name, and the same bytes in it."""
    a, b = trunk.tensors.get(name), sidecar.tensors[name]
    if a is None or (a.dims, a.type_id) != (b.dims, b.type_id):
        return False
    return a.file.same_bytes(a.offset, b.file, b.offset, a.nbytes)
