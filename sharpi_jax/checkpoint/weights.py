"""Fills the params from a GGUF's tensors: no field unfilled, and no tensor left unused in silence."""

import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from sharpi_jax.checkpoint import names
from sharpi_jax.checkpoint.architectures import ARCHITECTURES
from sharpi_jax.checkpoint.config import ROPE_FACTORS
from sharpi_jax.checkpoint.expansion import expansion_notes
from sharpi_jax.checkpoint.gguf_file import GGUFFile, TensorInfo
from sharpi_jax.errors import CheckpointError
from sharpi_jax.model.config import LayerKind, ModelConfig
from sharpi_jax.model.params import (
    AttentionParams,
    DeltaParams,
    ExpertsParams,
    FeedForwardParams,
    LayerParams,
    ModelParams,
    MtpParams,
)
from sharpi_jax.quant import Packed, dequantise, pack

_BLOCK = re.compile(r"blk\.(\d+)\.")


def read_weights(file: GGUFFile, cfg: ModelConfig) -> tuple[ModelParams, tuple[str, ...]]:
    """Every tensor of the model on the device, packed as in the file, and a remark where one could not stay packed.

    Raises:
      CheckpointError: a tensor is missing, has other dimensions or a type that is not supported, or is not known.
    """
    reader = _Reader(file, cfg)
    return reader.model(), expansion_notes(reader.used)


class _Reader:
    def __init__(self, file: GGUFFile, cfg: ModelConfig):
        self._file = file
        self._cfg = cfg
        self._kind = ARCHITECTURES[cfg.architecture]
        self._sizes = names.sizes(cfg)
        self._loaded: dict[str, Packed | jax.Array] = {}
        self._used = {ROPE_FACTORS}  # which config.py reads

    @property
    def used(self) -> list[TensorInfo]:
        """What has been loaded so far."""
        return [self._file.tensors[name] for name in self._used if name in self._file.tensors]

    def model(self) -> ModelParams:
        if self._cfg.has_mtp and not any(name.startswith("blk.0.") for name in self._file.tensors):
            raise CheckpointError(f"{self._file.path} holds only an MTP head; give the file that holds the trunk.")
        top = self._fill(names.MODEL, "")
        layers = tuple(self._layer(i, kind) for i, kind in enumerate(self._cfg.layer_kinds))
        mtp = None
        if self._cfg.has_mtp:
            block = len(layers)
            mtp = MtpParams(layer=self._layer(block, "attention"), **self._fill(names.MTP, f"blk.{block}."))
        self._refuse_unused()
        return ModelParams(layers=layers, mtp=mtp, **top)

    def _layer(self, index: int, kind: LayerKind) -> LayerParams:
        prefix = f"blk.{index}."
        mixer: AttentionParams | DeltaParams
        if kind == "attention":
            mixer = AttentionParams(**self._fill(self._kind.attention, prefix))
        else:
            mixer = DeltaParams(**self._fill(names.DELTA, prefix))
        return LayerParams(mixer=mixer, ffn=self._feed_forward(prefix), **self._fill(self._kind.layer, prefix))

    def _feed_forward(self, prefix: str) -> FeedForwardParams | ExpertsParams:
        if self._kind.experts == "none":
            return FeedForwardParams(**self._fill(names.FEED_FORWARD, prefix))
        shared: dict[str, Any] = {}
        if self._kind.experts == "routed and shared":
            shared = self._fill(names.SHARED_GATE, prefix)
            shared["shared"] = FeedForwardParams(**self._fill(names.SHARED_EXPERT, prefix))
        return ExpertsParams(**self._fill(names.EXPERTS, prefix), **shared)

    def _fill(self, table: Sequence[names.Tensor], prefix: str) -> dict[str, Any]:
        return {row.field: self._tensor(row, table, prefix) for row in table}

    def _tensor(self, row: names.Tensor, table: Sequence[names.Tensor], prefix: str) -> Packed | jax.Array | None:
        name = prefix + row.suffix
        present = [n for n in (name, *row.fallback) if n in self._file.tensors]
        if present:
            if present[0] not in self._loaded:
                self._loaded[present[0]] = self._load(row, present[0])
            return self._loaded[present[0]]
        if row.fused and prefix + row.fused in self._file.tensors:
            return self._part(row, table, prefix + row.fused)
        if row.optional:
            return None
        raise CheckpointError(f"{self._file.path}: tensor {name} is missing.")

    def _load(self, row: names.Tensor, name: str) -> Packed | jax.Array:
        raw, type_name = self._raw(name, self._dims(row))
        packed = pack(raw, type_name, name)
        return packed if row.kind == "matrix" else dequantise(packed).reshape(self._dims(row)[::-1])

    def _part(self, row: names.Tensor, table: Sequence[names.Tensor], name: str) -> Packed:
        """Its rows of a tensor that holds several."""
        heights = {r.field: self._dims(r)[1] for r in table if r.fused == row.fused}
        inputs, height, *stack = self._dims(row)
        raw, type_name = self._raw(name, (inputs, sum(heights.values()), *stack))
        start = sum(list(heights.values())[: list(heights).index(row.field)])
        return pack(np.ascontiguousarray(raw[..., start : start + height, :]), type_name, name)

    def _dims(self, row: names.Tensor) -> tuple[int, ...]:
        return tuple(self._sizes[letter] for letter in row.dims.split())

    def _raw(self, name: str, expected: tuple[int, ...]) -> tuple[np.ndarray, str]:
        """A tensor's bytes, [.., N, bytes per row], and type; marks it as used."""
        info = self._file.tensors[name]
        if info.dims not in (expected, (*expected, 1)):  # converters differ on a last dimension of 1
            raise CheckpointError(
                f"{self._file.path}: tensor {name} has dimensions {list(info.dims)}; "
                f"the metadata ask for {list(expected)}."
            )
        self._used.add(name)
        return self._file.raw(name), info.type_name

    def _refuse_unused(self) -> None:
        """Names what the table does not know. MTP blocks that config.py has told the user are not used are exempt."""
        first = len(self._cfg.layer_kinds) + (1 if self._cfg.has_mtp else 0)
        exempt = range(first, int(np.max(self._file.metadata[f"{self._cfg.architecture}.block_count"])))
        unused = [
            name
            for name in self._file.tensors
            if name not in self._used and not ((m := _BLOCK.match(name)) and int(m.group(1)) in exempt)
        ]
        if unused:
            more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
            raise CheckpointError(
                f"{self._file.path}: tensor {unused[0]}{more} is not known for architecture {self._cfg.architecture}."
            )
