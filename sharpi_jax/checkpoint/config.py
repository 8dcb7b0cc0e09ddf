"""The model's shape: from a GGUF's metadata, from which tensors it has, and from Llama 3's tensor of rope factors."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from sharpi_jax.checkpoint import names
from sharpi_jax.checkpoint.architectures import ARCHITECTURES, Architecture
from sharpi_jax.checkpoint.gguf_file import GGUFFile
from sharpi_jax.errors import CheckpointError
from sharpi_jax.model.config import LayerKind, ModelConfig

ROPE_FACTORS = "rope_freqs.weight"


def read_config(file: GGUFFile) -> tuple[ModelConfig, tuple[str, ...]]:
    """The configuration, and remarks for the user about what the file promises and does not hold.

    Raises:
      CheckpointError: an unsupported architecture or variant, or a key that is missing or does not fit the others.
    """
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"{file.path}: architecture {architecture!r} is not supported; supported: {', '.join(ARCHITECTURES)}."
        )
    keys, kind = _Keys(file, architecture), ARCHITECTURES[architecture]
    trunk_layers, has_mtp, notes = _count_layers(file, keys)
    if has_mtp and not kind.hybrid:
        raise CheckpointError(f"{file.path}: an MTP head in architecture {architecture} is not supported.")
    heads, width = keys.size("attention.head_count"), keys.size("embedding_length")
    head_dim = keys.size("attention.key_length", default=None if kind.hybrid else max(width // heads, 1))
    config = ModelConfig(
        architecture=architecture,
        layer_kinds=_layer_kinds(keys, kind, trunk_layers),
        has_mtp=has_mtp,
        width=width,
        vocab_size=_vocabulary(file),
        context_length=keys.size("context_length"),
        ffn_width=keys.size("feed_forward_length") if kind.experts == "none" else 0,
        heads=heads,
        key_heads=keys.size("attention.head_count_kv", default=None if kind.hybrid else heads),
        head_dim=head_dim,
        rope_dims=keys.size("rope.dimension_count", default=head_dim),
        rope_base=keys.number("rope.freq_base", default=None if kind.hybrid else 10000.0),
        norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        gated=kind.hybrid,
        rope_interleaved=kind.rope_interleaved,
        **_delta_sizes(keys, kind),
        **_expert_sizes(keys, kind),
    )
    config = dataclasses.replace(config, rope_factors=_rope_factors(file, keys, kind, config.rope_dims // 2))
    _check(keys, kind, config)
    return config, notes


def _delta_sizes(keys: "_Keys", kind: Architecture) -> dict[str, Any]:
    if not kind.hybrid:
        return {}
    return {
        "delta_heads": keys.size("ssm.time_step_rank"),
        "delta_key_heads": keys.size("ssm.group_count"),
        "delta_head_dim": keys.size("ssm.state_size"),
        "conv_taps": keys.size("ssm.conv_kernel"),
    }


def _expert_sizes(keys: "_Keys", kind: Architecture) -> dict[str, Any]:
    if kind.experts == "none":
        if keys.size("expert_count", default=0, least=0):
            raise keys.fault("expert_count", "asks for experts, which are not supported in this architecture")
        return {}
    found = {
        "experts": keys.size("expert_count"),
        "experts_used": keys.size("expert_used_count"),
        "expert_width": keys.size("expert_feed_forward_length"),
    }
    if kind.experts == "routed and shared":
        found["shared_expert_width"] = keys.size("expert_shared_feed_forward_length")
    if found["experts_used"] > found["experts"]:
        raise keys.fault("expert_used_count", f"is more than the {found['experts']} experts that there are")
    if keys.size("expert_gating_func", default=1, least=0) not in (0, 1):
        raise keys.fault("expert_gating_func", "must be 1 (softmax); other routers are not supported")
    if keys.number("expert_weights_scale", default=1.0) not in (0.0, 1.0):
        raise keys.fault("expert_weights_scale", "must be 1; other scales are not supported")
    return found


def _rope_factors(file: GGUFFile, keys: "_Keys", kind: Architecture, count: int) -> tuple[float, ...]:
    """What the rotary frequencies are divided by, one for all (linear scaling) or each by its own (Llama 3's tensor).

    As in llama.cpp: scaling is linear where no type is given, its factor has an older name, and 0 stands for 1.
    """
    scaling = keys.get("rope.scaling.type")
    if not (scaling is None or (isinstance(scaling, str) and scaling in ("none", "linear"))):
        raise keys.fault("rope.scaling.type", f"asks for {scaling!r} scaling, which is not supported")
    given = keys.number("rope.scaling.factor", default=keys.number("rope.scale_linear", default=0.0))
    factor = 1.0 if scaling == "none" else given or 1.0
    if not 0 < factor < math.inf:
        raise keys.fault("rope.scaling.factor", "must be a positive number")
    info = file.tensors.get(ROPE_FACTORS) if kind.rope_factors else None
    if info is None:
        return () if factor == 1 else (factor,)
    if info.type_name != "F32" or info.dims != (count,):
        raise CheckpointError(f"{file.path}: tensor {ROPE_FACTORS} must be {count} numbers of type F32.")
    factors = file.load(ROPE_FACTORS).view(np.float32).astype(np.float64)
    if not (np.isfinite(factors) & (factors > 0)).all():
        raise CheckpointError(f"{file.path}: tensor {ROPE_FACTORS} must hold positive numbers.")
    return tuple((factor * factors).tolist())


class _Keys:
    """The architecture's own metadata keys, each with a clear complaint when it is missing or of the wrong kind."""

    def __init__(self, file: GGUFFile, architecture: str):
        self._metadata: Mapping[str, Any] = file.metadata
        self._path = file.path
        self._prefix = architecture

    def get(self, key: str) -> Any:
        return self._metadata.get(f"{self._prefix}.{key}")

    def fault(self, key: str, problem: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: metadata key {self._prefix}.{key} {problem}.")

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.fault(key, "is missing")
        values = np.unique(np.asarray(value).ravel())  # some architectures store one value per layer
        if values.size != 1 or values.dtype.kind not in "iuf":
            raise self.fault(key, "must be one number; values that differ by layer are not supported")
        return float(values[0])

    def size(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        value = self.number(key, default)
        if not (value.is_integer() and least <= value < 2**31):
            raise self.fault(key, f"is {value:g}, not a whole number from {least} to {2**31 - 1}")
        return int(value)


def _count_layers(file: GGUFFile, keys: _Keys) -> tuple[int, bool, tuple[str, ...]]:
    """Trunk layers, whether an MTP block is there to use, and remarks where metadata and tensors disagree."""
    blocks = keys.size("block_count")
    promised = keys.size("nextn_predict_layers", default=0, least=0)
    found = names.nextn_blocks(file.tensors)
    if blocks > len(file.tensors):
        raise keys.fault("block_count", f"is {blocks}, but the file has only {len(file.tensors)} tensors")
    if promised >= blocks:
        raise keys.fault("nextn_predict_layers", f"is {promised}, which leaves no trunk in {blocks} blocks")
    more = (f"the file has {len(found)} MTP layers; only the first is used",) if len(found) > 1 else ()
    if promised:
        trunk_layers = blocks - promised
        if not found:
            return trunk_layers, False, (f"the metadata promises {promised} MTP layer(s), but the tensors are absent",)
        if found[0] != trunk_layers:
            raise keys.fault("nextn_predict_layers", f"puts the MTP head in block {trunk_layers}, not {found[0]}")
        return trunk_layers, True, more
    if not found:
        return blocks, False, ()
    if found[0] not in (blocks - len(found), blocks):
        raise CheckpointError(f"{file.path}: block {found[0]} holds an MTP head, but it is not the last of {blocks}.")
    return found[0], True, (f"the metadata does not mention the MTP head found in block {found[0]}; it is used", *more)


def _layer_kinds(keys: _Keys, kind: Architecture, layers: int) -> tuple[LayerKind, ...]:
    if not kind.hybrid:
        return tuple("attention" for _ in range(layers))
    recurrent = keys.get("attention.recurrent_layers")
    if recurrent is None:
        interval = keys.size("full_attention_interval", default=4)
        return tuple("attention" if (i + 1) % interval == 0 else "delta" for i in range(layers))
    flags = np.asarray(recurrent)
    flags = np.repeat(flags, layers) if flags.ndim == 0 else flags
    if flags.dtype.kind not in "b" or flags.size < layers:
        raise keys.fault("attention.recurrent_layers", f"must hold a true or false for each of {layers} layers")
    return tuple("delta" if flag else "attention" for flag in flags[:layers])


def _vocabulary(file: GGUFFile) -> int:
    table = file.tensors.get("token_embd.weight")
    if table is None or len(table.dims) != 2:
        raise CheckpointError(f"{file.path}: tensor token_embd.weight is missing or is not a table.")
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) != table.dims[1]:  # of another kind: the tokenizer says so
        raise CheckpointError(
            f"{file.path}: the tokenizer has {len(tokens)} tokens, but token_embd.weight has {table.dims[1]} rows."
        )
    return table.dims[1]


def _check(keys: _Keys, kind: Architecture, cfg: ModelConfig) -> None:
    """Refuses what the equations here do not cover, by the key that asks for it."""
    if (
        keys.size("attention.value_length", default=cfg.head_dim if kind.hybrid else max(cfg.width // cfg.heads, 1))
        != cfg.head_dim
    ):
        raise keys.fault("attention.value_length", "must equal attention.key_length")
    if keys.get("attention.key_length") is None and cfg.width % cfg.heads:
        raise keys.fault("attention.head_count", "must divide embedding_length where there is no attention.key_length")
    if cfg.heads % cfg.key_heads:
        raise keys.fault("attention.head_count", "must be a multiple of attention.head_count_kv")
    if kind.hybrid:
        _check_delta(keys, cfg)
    if cfg.rope_dims % 2 or cfg.rope_dims > cfg.head_dim:
        raise keys.fault("rope.dimension_count", "must be even and at most attention.key_length")
    sections = keys.get("rope.dimension_sections")
    if sections is not None and (np.asarray(sections).dtype.kind not in "iu" or np.sum(sections) < cfg.rope_dims // 2):
        raise keys.fault("rope.dimension_sections", "must cover half of rope.dimension_count")
    if not 0 < cfg.norm_eps < 1 or not 1 < cfg.rope_base < math.inf:
        raise keys.fault("attention.layer_norm_rms_epsilon", "or rope.freq_base is out of range")


def _check_delta(keys: _Keys, cfg: ModelConfig) -> None:
    if cfg.delta_heads % cfg.delta_key_heads:
        raise keys.fault("ssm.time_step_rank", "must be a multiple of ssm.group_count")
    if keys.size("ssm.inner_size") != cfg.delta_heads * cfg.delta_head_dim:
        raise keys.fault("ssm.inner_size", "must equal ssm.time_step_rank * ssm.state_size")
    if cfg.conv_taps < 2:
        raise keys.fault("ssm.conv_kernel", "must be at least 2")
