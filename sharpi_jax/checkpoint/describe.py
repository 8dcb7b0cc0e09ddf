"""What a GGUF file says about itself, for `inspect`.

Read from the header alone, and for any architecture: nothing here may refuse a file because the model cannot be run, so
every key is optional and a value of an unexpected kind counts as absent.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from sharpi_jax.checkpoint.chat import ChatTemplate
from sharpi_jax.checkpoint.config import read_config
from sharpi_jax.checkpoint.gguf_file import GGUFFile
from sharpi_jax.checkpoint.names import block_of, nextn_blocks
from sharpi_jax.checkpoint.sidecar import is_head_alone
from sharpi_jax.checkpoint.tokenizer import Tokenizer
from sharpi_jax.errors import CheckpointError


@dataclasses.dataclass(frozen=True)
class TypeShare:
    """The tensors stored in one type."""

    name: str
    tensors: int
    parameters: int
    nbytes: int


@dataclasses.dataclass(frozen=True)
class Mtp:
    """The multi-token-prediction head.

    Attributes:
      promised: MTP layers that the metadata declares.
      blocks: the blocks that hold nextn tensors.
      remark: where metadata and tensors disagree, else empty.
    """

    promised: int
    blocks: tuple[int, ...]
    remark: str

    @property
    def present(self) -> bool:
        """Whether the tensors of a head are in the file."""
        return bool(self.blocks)


@dataclasses.dataclass(frozen=True)
class TokenizerFacts:
    """The tokenizer's kind, its size, and the special ids by name (`eos`, `bos`, ...) with their texts."""

    model: str | None
    pre: str | None
    size: int
    special: Mapping[str, tuple[int, str]]


@dataclasses.dataclass(frozen=True)
class Description:
    """The facts. None stands for what the file does not say.

    Attributes:
      file_bytes: size of the file, or of all shards together. parameters: weights in all tensors together.
      sizes: the architecture's own numbers by their key without the prefix, scalars only.
      layers: the trunk's layers counted by kind; MTP layers are not among them.
      types: how the weights are stored, the largest share first.
      chat_template: its length in characters; 0 when there is none.
      obstacle: why the model cannot be run here, as far as its metadata tell; empty when nothing speaks against it.
    """

    architecture: str | None
    name: str | None
    file_bytes: int
    parameters: int
    sizes: Mapping[str, int]
    layers: Mapping[str, int]
    mtp: Mtp
    types: tuple[TypeShare, ...]
    tokenizer: TokenizerFacts | None
    chat_template: int
    obstacle: str


def describe(file: GGUFFile) -> Description:
    """The facts of an open file."""
    metadata = file.metadata
    architecture = _text(metadata, "general.architecture")
    prefix = f"{architecture}."
    own = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    sizes = {key: size for key, value in own.items() if (size := _integer(value)) is not None}
    mtp = _mtp(file, sizes)
    trunk = max(sizes.get("block_count", _blocks(file)) - mtp.promised, 0)
    if not mtp.promised and mtp.present:  # undeclared: the head's block may be counted as a layer or not
        trunk = min(trunk, mtp.blocks[0])
    return Description(
        architecture=architecture,
        name=_text(metadata, "general.name"),
        file_bytes=sum(mapped.size for mapped in file.files),
        parameters=sum(tensor.n_elements for tensor in file.tensors.values()),
        sizes=sizes,
        layers=_layers(own, trunk),
        mtp=mtp,
        types=_types(file),
        tokenizer=_tokenizer(metadata),
        chat_template=len(_text(metadata, "tokenizer.chat_template") or ""),
        obstacle=_obstacle(file),
    )


def _obstacle(file: GGUFFile) -> str:
    """The first complaint of those who would read the file for a run, less its path."""
    try:
        read_config(file)
        Tokenizer.from_metadata(file.metadata)
        ChatTemplate.from_metadata(file.metadata)
    except CheckpointError as error:
        return str(error).removeprefix(f"{file.path}: ")
    return "it holds an MTP head alone; give it as --mtp_model beside its trunk." if is_head_alone(file) else ""


def _text(metadata: Mapping[str, Any], key: str) -> str | None:
    value = metadata.get(key)
    return value if isinstance(value, str) else None


def _integer(value: Any) -> int | None:
    """A whole number: a scalar, or an array by layer whose entries agree."""
    if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
        value = value[0].item()
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _blocks(file: GGUFFile) -> int:
    """One more than the highest block number among the tensors."""
    return max((block_of(name)[0] + 1 for name in file.tensors), default=0)


def _layers(own: Mapping[str, Any], trunk: int) -> dict[str, int]:
    """The trunk's layers by kind; plain layers in architectures that do not mix kinds by these keys.

    Counted without a list of layers: the number comes from the file and may be absurd.
    """
    recurrent, interval = own.get("attention.recurrent_layers"), _integer(own.get("full_attention_interval"))
    if isinstance(recurrent, bool):
        deltas = trunk if recurrent else 0
    elif isinstance(recurrent, np.ndarray) and recurrent.size >= trunk:
        deltas = int(np.count_nonzero(recurrent[:trunk]))
    elif interval is not None and interval > 0:
        deltas = trunk - trunk // interval
    else:
        return {"layer": trunk} if trunk else {}
    kinds = {"gated delta net": deltas, "attention": trunk - deltas}
    return {kind: count for kind, count in kinds.items() if count}


def _mtp(file: GGUFFile, sizes: Mapping[str, int]) -> Mtp:
    promised = max(sizes.get("nextn_predict_layers", 0), 0)
    blocks = nextn_blocks(file.tensors)
    remark = ""
    if promised and not blocks:
        remark = f"the metadata promises {promised}, and the file holds no nextn tensor"
    elif blocks and not promised:
        remark = "the metadata does not mention it"
    elif len(blocks) != promised:
        remark = f"the metadata promises {promised}"
    if blocks and not any(name.startswith("blk.0.") for name in file.tensors):
        remark = "; ".join(filter(None, (remark, "the file holds no trunk: it is a sidecar, for --mtp_model")))
    return Mtp(promised, tuple(blocks), remark)


def _types(file: GGUFFile) -> tuple[TypeShare, ...]:
    shares = []
    for name in {tensor.type_name for tensor in file.tensors.values()}:
        tensors = [tensor for tensor in file.tensors.values() if tensor.type_name == name]
        parameters = sum(tensor.n_elements for tensor in tensors)
        shares.append(TypeShare(name, len(tensors), parameters, sum(tensor.nbytes for tensor in tensors)))
    return tuple(sorted(shares, key=lambda share: (-share.nbytes, share.name)))


def _tokenizer(metadata: Mapping[str, Any]) -> TokenizerFacts | None:
    prefix, suffix = "tokenizer.ggml.", "_token_id"
    if not any(key.startswith(prefix) for key in metadata):
        return None
    tokens = metadata.get(prefix + "tokens")
    texts = tokens if isinstance(tokens, list) else []
    special = {}
    for key, value in metadata.items():
        token = _integer(value)
        if key.startswith(prefix) and key.endswith(suffix) and token is not None:
            text = texts[token] if 0 <= token < len(texts) else "outside the vocabulary"
            special[key.removeprefix(prefix).removesuffix(suffix)] = (token, text)
    return TokenizerFacts(_text(metadata, prefix + "model"), _text(metadata, prefix + "pre"), len(texts), special)
