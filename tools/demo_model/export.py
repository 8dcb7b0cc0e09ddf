"""Writes the trained model as GGUF: python -m tools.demo_model.export --folder=FOLDER [--type=T] --out=FILE.

As llama.cpp's converter writes Qwen3.5: norms whole (+1 applied), `ssm_a` = -exp(A_log), value heads tiled, which is
the order that the package computes in, so nothing is permuted here. Matrices take the type asked for; vectors and the
convolution's taps stay float32. F32_OF_Q8_0 is a float32 file of the Q8_0 file's own values: another engine computes
on it what exact arithmetic computes on the Q8_0 file.
"""

import pathlib

import gguf
import jax
import numpy as np
from absl import app, flags

from sharpi_jax.checkpoint import names
from sharpi_jax.model.config import ModelConfig
from sharpi_jax.model.params import ModelParams
from sharpi_jax.quant import Packed
from tools.demo_model.data import FOLDER, corpus
from tools.demo_model.model import CONFIG, init_trainable, to_params
from tools.demo_model.store import restore
from tools.demo_model.vocabulary import Vocabulary, train_vocabulary
from tools.gguf_writing import finish

KINDS = ("Q8_0", "F32", "F32_OF_Q8_0")
_TYPE = flags.DEFINE_enum("type", "Q8_0", list(KINDS), "Type of the matrices.")
_WEIGHTS = flags.DEFINE_enum(
    "weights", "refined", ["best", "unlearned", "refined"], "After train, after refine's first half, or after all."
)
_OUT = flags.DEFINE_string("out", None, "The GGUF to write.", required=True)


def write_gguf(path: pathlib.Path, cfg: ModelConfig, params: ModelParams, vocabulary: Vocabulary, kind: str) -> None:
    """Writes one file; `kind`, the type of its matrices, is one of KINDS."""
    q8_0 = gguf.GGMLQuantizationType.Q8_0
    writer = gguf.GGUFWriter(str(path), cfg.architecture)
    _write_config(writer, cfg)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0 if kind == "Q8_0" else gguf.LlamaFileType.ALL_F32)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _write_tokenizer(writer, vocabulary)
    for name, (value, is_matrix) in tensors(params).items():
        data, data_type = value, gguf.GGMLQuantizationType.F32
        if is_matrix and kind != "F32":
            data, data_type = gguf.quants.quantize(value, q8_0), q8_0
        if kind == "F32_OF_Q8_0":
            data, data_type = gguf.quants.dequantize(data, data_type), gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, data, raw_dtype=data_type)
    finish(writer)


def tensors(params: ModelParams) -> dict[str, tuple[np.ndarray, bool]]:
    """Every tensor by its GGUF name, float32, and whether it is a matrix; a tied table appears once."""
    found: dict[str, tuple[np.ndarray, bool]] = {}

    def add(table: tuple[names.Tensor, ...], prefix: str, holder: object) -> None:
        for row in table:
            value = getattr(holder, row.field)
            if row.fallback and (value is params.embed or value is params.head):
                continue
            array = value.blocks if isinstance(value, Packed) else value
            found[prefix + row.suffix] = (np.asarray(array, np.float32), row.kind == "matrix")

    add(names.MODEL, "", params)
    assert params.mtp is not None
    for index, layer in enumerate((*params.layers, params.mtp.layer)):
        prefix = f"blk.{index}."
        add(names.HYBRID_LAYER, prefix, layer)
        add(names.DELTA if hasattr(layer.mixer, "qkv") else names.GATED_ATTENTION, prefix, layer.mixer)
        add(names.FEED_FORWARD, prefix, layer.ffn)
    add(names.MTP, f"blk.{len(params.layers)}.", params.mtp)
    return found


def _write_config(writer: gguf.GGUFWriter, cfg: ModelConfig) -> None:
    arch, recurrent = cfg.architecture, [kind == "delta" for kind in cfg.layer_kinds]
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name("sharpi-jax demo")
    writer.add_description("A small model with an MTP head, trained on the World English Bible (public domain).")
    writer.add_license("apache-2.0")
    writer.add_block_count(len(cfg.layer_kinds) + 1)
    writer.add_uint32(f"{arch}.nextn_predict_layers", 1)
    writer.add_context_length(cfg.context_length)
    writer.add_embedding_length(cfg.width)
    writer.add_feed_forward_length(cfg.ffn_width)
    writer.add_head_count(cfg.heads)
    writer.add_head_count_kv(cfg.key_heads)
    writer.add_key_length(cfg.head_dim)
    writer.add_value_length(cfg.head_dim)
    writer.add_layer_norm_rms_eps(cfg.norm_eps)
    writer.add_rope_dimension_count(cfg.rope_dims)
    # Text has one position stream, so how the R/2 pairs are shared out changes nothing as long as they are all covered.
    half = cfg.rope_dims // 2
    writer.add_array(f"{arch}.rope.dimension_sections", [half - 2 * (half // 3), half // 3, half // 3, 0])
    writer.add_rope_freq_base(cfg.rope_base)
    writer.add_uint32(f"{arch}.full_attention_interval", cfg.layer_kinds.index("attention") + 1)
    writer.add_array(f"{arch}.attention.recurrent_layers", [*recurrent, False])
    writer.add_ssm_conv_kernel(cfg.conv_taps)
    writer.add_ssm_state_size(cfg.delta_head_dim)
    writer.add_ssm_group_count(cfg.delta_key_heads)
    writer.add_ssm_time_step_rank(cfg.delta_heads)
    writer.add_ssm_inner_size(cfg.delta_heads * cfg.delta_head_dim)


def _write_tokenizer(writer: gguf.GGUFWriter, vocabulary: Vocabulary) -> None:
    for key, value in vocabulary.metadata().items():
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case str():
                writer.add_string(key, value)
            case _:
                writer.add_array(key, list(value) if isinstance(value, list) else value.tolist())


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]}")
    folder, out = pathlib.Path(FOLDER.value), pathlib.Path(_OUT.value)
    weights = folder / f"{_WEIGHTS.value}.npz"
    if not weights.exists():
        raise SystemExit(f"{weights} does not exist; run tools.demo_model.train and tools.demo_model.refine first.")
    trained = restore(weights, init_trainable(CONFIG, jax.random.key(0)))
    write_gguf(out, CONFIG, to_params(trained), train_vocabulary(corpus(folder).train), _TYPE.value)
    print(f"{out}: {out.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    app.run(main)
