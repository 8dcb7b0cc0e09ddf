"""Fills the params from a GGUF's tensors: no field unfilled, and no tensor left unused in silence."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

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
from sharpi_jax.quant import Weight, dequantise, lays_out, pack

_Value = TypeVar("_Value", Weight, jax.Array, Weight | jax.Array)
OnProgress = Callable[[int, int], None]  # bytes that are on the device, bytes in all


def read_weights(
    file: GGUFFile, cfg: ModelConfig, engine: str, on_progress: OnProgress | None = None
) -> tuple[ModelParams, tuple[str, ...]]:
    """Every tensor of the model on the device, packed, and a remark where some could not stay packed.

    They go there one by one, so that no two are held twice.

    Args:
      engine: what is to multiply by them, one of quant.ENGINES.
      on_progress: called after each tensor.

    Raises:
      CheckpointError: a tensor is missing, has other dimensions or a type that is not supported, or is not known.
    """
    reader = _Reader(file, cfg, engine, on_progress or (lambda done, total: None))
    return reader.model(), expansion_notes(list(reader.used))


class _Reader:
    def __init__(self, file: GGUFFile, cfg: ModelConfig, engine: str, on_progress: OnProgress):
        self._file = file
        self._cfg = cfg
        self._engine = engine
        self._kind = ARCHITECTURES[cfg.architecture]
        self._sizes = names.sizes(cfg)
        self._loaded: dict[TensorInfo, Weight | jax.Array] = {}
        self._on_progress = on_progress
        self._done, self._total = 0, sum(info.nbytes for info in set(file.tensors.values()))
        self.used: dict[TensorInfo, None] = {}  # in the order in which they were read

    def model(self) -> ModelParams:
        top = self._fill(names.MODEL, "")
        layers = tuple(self._layer(i, kind) for i, kind in enumerate(self._cfg.layer_kinds))
        mtp = None
        if self._cfg.has_mtp:
            block = len(layers)
            mtp = MtpParams(layer=self._layer(block, "attention"), **self._fill(names.MTP, f"blk.{block}."))
        self._refuse_unused()
        if self._done < self._total:  # what is not used does not keep a bar from its end
            self._on_progress(self._total, self._total)
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

    def _tensor(self, row: names.Tensor, table: Sequence[names.Tensor], prefix: str) -> Weight | jax.Array | None:
        name = prefix + row.suffix
        present = [n for n in (name, *row.fallback) if n in self._file.tensors]
        if present:
            info = self._file.tensors[present[0]]
            if info not in self._loaded:
                self._loaded[info] = self._load(row, present[0])
            return self._loaded[info]
        if row.fused and prefix + row.fused in self._file.tensors:
            return self._part(row, table, prefix + row.fused)
        if row.optional:
            return None
        raise CheckpointError(f"{self._path_of_block(name)}: tensor {name} is missing.")

    def _path_of_block(self, name: str) -> Path:
        """The file that should hold a missing tensor: the one that holds others of its block."""
        block = names.block_of(name)[0]
        found = (i.file.path for other, i in self._file.tensors.items() if 0 <= block == names.block_of(other)[0])
        return next(found, self._file.path)

    def _load(self, row: names.Tensor, name: str) -> Weight | jax.Array:
        info = self._file.tensors[name]
        type_name = info.type_name
        if row.kind == "matrix" and lays_out(type_name, self._engine):  # straight from the map: no copy in between
            view = self._bytes(name, self._dims(row), self._file.raw)
            return self._settled(name, pack(view, type_name, name, self._engine, info.file.release_view))
        raw = self._bytes(name, self._dims(row))
        if row.kind == "matrix":
            return self._settled(name, pack(raw, type_name, name, self._engine))
        return self._settled(name, dequantise(pack(raw, type_name, name)).reshape(self._dims(row)[::-1]))

    def _part(self, row: names.Tensor, table: Sequence[names.Tensor], name: str) -> Weight:
        """Its rows of a tensor that holds several."""
        heights = {r.field: self._dims(r)[1] for r in table if r.fused == row.fused}
        inputs, height, *stack = self._dims(row)
        whole = self._bytes(name, (inputs, sum(heights.values()), *stack))
        start = sum(list(heights.values())[: list(heights).index(row.field)])
        part = np.ascontiguousarray(whole[..., start : start + height, :])
        return self._settled(name, pack(part, self._file.tensors[name].type_name, name, self._engine))

    def _settled(self, name: str, value: _Value) -> _Value:
        """The value once it is on the device, so that no copy of it waits on the host while the next one is read."""
        jax.block_until_ready(value)
        info = self._file.tensors[name]
        if info not in self.used:
            self.used[info] = None
            self._done += info.nbytes
        self._on_progress(self._done, self._total)
        return value

    def _dims(self, row: names.Tensor) -> tuple[int, ...]:
        return tuple(self._sizes[letter] for letter in row.dims.split())

    def _bytes(
        self, name: str, expected: tuple[int, ...], get: Callable[[str], np.ndarray] | None = None
    ) -> np.ndarray:
        """A tensor's bytes, [..., N, bytes per row]: a copy, unless another way to `get` them is given."""
        info = self._file.tensors[name]
        if info.dims not in (expected, (*expected, 1)):  # converters differ on a last dimension of 1
            raise CheckpointError(
                f"{info.file.path}: tensor {name} has dimensions {list(info.dims)}; "
                f"the metadata ask for {list(expected)}."
            )
        return (get or self._file.load)(name).reshape(*expected[:0:-1], -1)

    def _refuse_unused(self) -> None:
        """Names what the table does not know. MTP blocks that config.py has told the user are not used are exempt."""
        first = len(self._cfg.layer_kinds) + (1 if self._cfg.has_mtp else 0)
        exempt = set(range(first, int(np.max(self._file.metadata[f"{self._cfg.architecture}.block_count"]))))
        # Later heads that the metadata do not count.
        exempt |= {block for block in names.nextn_blocks(self._file.tensors) if block >= first}
        unused = [
            name
            for name, info in self._file.tensors.items()
            if not (name == ROPE_FACTORS and self._kind.rope_factors)  # config.py reads it
            and info not in self.used
            and names.block_of(name)[0] not in exempt
        ]
        if unused:
            more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
            raise CheckpointError(
                f"{self._file.tensors[unused[0]].file.path}: tensor {unused[0]}{more} is not known for architecture "
                f"{self._cfg.architecture}."
            )
