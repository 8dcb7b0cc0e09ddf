"""Writes a GGUF file of random weights in the shape of a real model: for speed, where what it says does not matter.

    python -m bench.make_model --shape=qwen3.5-0.8b --type=q4_k_m --kind=ceiling --out=FILE.gguf

Shapes are those of Qwen3.5 with its MTP block and a tied head. `--kind` says how many drafts are accepted:
  ceiling   every one: the blocks add nothing (their last products have scales of 0, and cost what they always do), and
            the MTP block hands the draft's embedding on (eh_proj is [I | 0]). Trunk and head say the last token again.
  floor     none: as ceiling, but eh_proj is random, so the head always says one same wrong token.
  random    what random weights make of it: none, in practice.

The formats of the tensors are llama.cpp's choice for the type (mix.py). Codes that have no 0 (IQ4_NL, IQ4_XS) cannot
hold an identity: there eh_proj is Q8_0. The vocabulary is made up, of as many tokens and merges as the real one.
"""

import dataclasses
import logging
import random
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
from absl import app, flags

from bench.blocks import has_zero, identity_rows, random_rows, row_bytes
from bench.mix import TYPES, format_of


@dataclasses.dataclass(frozen=True)
class Shape:
    """A Qwen3.5: full attention in each fourth layer, Gated DeltaNet in the others, one MTP block on top."""

    width: int
    layers: int
    heads: int
    key_heads: int
    delta_heads: int
    delta_key_heads: int
    ffn: int
    vocabulary: int = 248_320


SHAPES = {
    "qwen3.5-0.8b": Shape(1024, 24, 8, 2, 16, 16, 3584),
    "qwen3.5-4b": Shape(2560, 32, 16, 4, 32, 16, 9216),
    "tiny": Shape(256, 4, 4, 1, 2, 2, 512, 512),
}
HEAD_DIM, ROPE_DIMS, STATE, TAPS = 256, 64, 128, 4
KINDS = ("ceiling", "floor", "random")
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MIN_VOCABULARY = 320
_CHUNK = 1 << 24  # bytes that are made and written at once


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor to write: a matrix of random weights of deviation `std` or an identity, or a float32 constant."""

    name: str
    shape: tuple[int, ...]
    format: str = "F32"
    std: float = 0.0
    constant: float | None = None
    is_identity: bool = False

    def row_bytes(self) -> int:
        return row_bytes(self.format, self.shape[-1])

    def nbytes(self) -> int:
        return self.row_bytes() * int(np.prod(self.shape[:-1]))

    def chunks(self, rng: np.random.Generator) -> Iterator[np.ndarray]:
        """Its bytes, some rows at a time."""
        if self.constant is not None:
            yield np.full(self.shape, self.constant, np.float32)
        elif self.is_identity:
            yield identity_rows(self.format, *self.shape)
        else:
            rows, columns = self.shape
            step = max(_CHUNK // self.row_bytes(), 1)
            for begin in range(0, rows, step):
                yield random_rows(rng, self.format, min(step, rows - begin), columns, self.std)


def write(path: Path, shape: Shape, file_type: str, kind: str, seed: int = 0) -> None:
    """Writes the file, in little memory: the same bytes for the same seed.

    Args:
      file_type: of mix.TYPES. kind: of KINDS.
    """
    writer = gguf.GGUFWriter(path, "qwen35")
    _add_shape(writer, shape)
    writer.add_file_type(TYPES[file_type][1])
    _add_vocabulary(writer, shape.vocabulary)
    todo = list(tensors(shape, file_type, kind))
    for t in todo:
        writer.add_tensor_info(t.name, t.shape, np.dtype(np.float32), t.nbytes(), gguf.GGMLQuantizationType[t.format])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    rng = np.random.default_rng(seed)
    (file,) = writer.fout or ()
    for t in todo:
        writer.write_padding(file, file.tell())
        for chunk in t.chunks(rng):
            file.write(chunk.data)
        writer.write_padding(file, file.tell())
    writer.close()


def tensors(shape: Shape, file_type: str, kind: str) -> Iterator[Tensor]:
    """Every tensor of the file, in order."""
    D, blocks = shape.width, shape.layers + 1

    def matrix(block: int, name: str, rows: int, columns: int) -> Tensor:
        prefix = f"blk.{block}." if block >= 0 else ""
        is_silent = kind != "random" and name in ("attn_output", "ssm_out", "ffn_down")
        std = 0.0 if is_silent else columns**-0.5
        return Tensor(f"{prefix}{name}.weight", (rows, columns), format_of(file_type, name, block, blocks), std)

    yield matrix(-1, "token_embd", shape.vocabulary, D)
    yield Tensor("output_norm.weight", (D,), constant=1.0)
    for block in range(blocks):
        for name in ("attn_norm", "post_attention_norm"):
            yield Tensor(f"blk.{block}.{name}.weight", (D,), constant=1.0)
        for name, rows, columns in (("gate", shape.ffn, D), ("up", shape.ffn, D), ("down", D, shape.ffn)):
            yield matrix(block, f"ffn_{name}", rows, columns)
        is_attention = block == shape.layers or block % 4 == 3
        for name, *size in _attention(shape) if is_attention else _delta(shape):
            yield matrix(block, name, *size)
        vectors = _ATTENTION_VECTORS if is_attention else _delta_vectors(shape)
        for name, (size, value) in vectors.items():
            yield Tensor(f"blk.{block}.{name}", size, constant=value)
    proj = matrix(shape.layers, "nextn.eh_proj", D, 2 * D)
    if kind == "ceiling":
        proj = dataclasses.replace(proj, is_identity=True, format=proj.format if has_zero(proj.format) else "Q8_0")
    yield proj
    for name in ("enorm", "hnorm", "shared_head_norm"):
        yield Tensor(f"blk.{shape.layers}.nextn.{name}.weight", (D,), constant=1.0)


_ATTENTION_VECTORS = {f"attn_{name}_norm.weight": ((HEAD_DIM,), 1.0) for name in "qk"}


def _attention(shape: Shape) -> Iterator[tuple[str, int, int]]:
    yield "attn_q", 2 * shape.heads * HEAD_DIM, shape.width  # each query with its gate
    yield "attn_k", shape.key_heads * HEAD_DIM, shape.width
    yield "attn_v", shape.key_heads * HEAD_DIM, shape.width
    yield "attn_output", shape.width, shape.heads * HEAD_DIM


def _delta(shape: Shape) -> Iterator[tuple[str, int, int]]:
    yield "attn_qkv", _channels(shape), shape.width
    yield "attn_gate", shape.delta_heads * STATE, shape.width
    yield "ssm_alpha", shape.delta_heads, shape.width
    yield "ssm_beta", shape.delta_heads, shape.width
    yield "ssm_out", shape.width, shape.delta_heads * STATE


def _delta_vectors(shape: Shape) -> dict[str, tuple[tuple[int, ...], float]]:
    return {
        "ssm_a": ((shape.delta_heads,), -1.0),
        "ssm_dt.bias": ((shape.delta_heads,), 1.0),
        "ssm_conv1d.weight": ((_channels(shape), TAPS), 0.25),
        "ssm_norm.weight": ((STATE,), 1.0),
    }


def _channels(shape: Shape) -> int:
    return (2 * shape.delta_key_heads + shape.delta_heads) * STATE


def _add_shape(writer: gguf.GGUFWriter, shape: Shape) -> None:
    writer.add_block_count(shape.layers + 1)
    writer.add_nextn_predict_layers(1)
    writer.add_context_length(32_768)
    writer.add_embedding_length(shape.width)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.key_heads)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(ROPE_DIMS)
    writer.add_rope_dimension_sections([11, 11, 10, 0])
    writer.add_rope_freq_base(1e7)
    writer.add_full_attention_interval(4)
    writer.add_ssm_conv_kernel(TAPS)
    writer.add_ssm_state_size(STATE)
    writer.add_ssm_group_count(shape.delta_key_heads)
    writer.add_ssm_time_step_rank(shape.delta_heads)
    writer.add_ssm_inner_size(shape.delta_heads * STATE)


def _add_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    """The 256 bytes, pairs of known ASCII tokens merged in random order, and special tokens.

    Of ASCII, so that what is repeated for ever is text: llama-server answers with an error where it is no UTF-8.
    """
    if size < MIN_VOCABULARY:
        raise ValueError(f"a vocabulary of {size} tokens is too small; at least {MIN_VOCABULARY} are needed")
    visible = [chr(c) for c in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))]
    single = visible + [chr(c) for c in range(0x100, 0x100 + 256 - len(visible))]
    draw = random.Random(0)
    known, seen, merges = ["Ġ", *"abcdefghijklmnopqrstuvwxyz"], set(single), []
    wanted = size - len(SPECIAL) - len(single)
    while len(merges) < wanted:
        for left, right in zip(draw.choices(known, k=4096), draw.choices(known, k=4096), strict=True):
            text = left + right
            if len(text) <= 12 and text not in seen and len(merges) < wanted:
                seen.add(text)
                known.append(text)
                merges.append(f"{left} {right}")
    texts = [*single, *(merge.replace(" ", "") for merge in merges), *SPECIAL]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen35")
    writer.add_token_list(texts)
    control = [gguf.TokenType.CONTROL] * len(SPECIAL)
    writer.add_token_types([gguf.TokenType.NORMAL] * (size - len(SPECIAL)) + control)
    writer.add_token_merges(merges)
    writer.add_eos_token_id(size - 1)
    writer.add_pad_token_id(size - len(SPECIAL))
    writer.add_add_bos_token(False)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]}")
    values = flags.FLAGS
    shape = SHAPES[values.shape]
    shape = dataclasses.replace(
        shape, layers=values.layers or shape.layers, vocabulary=values.vocab_size or shape.vocabulary
    )
    path = Path(values.out)
    logging.getLogger("gguf.gguf_writer").setLevel(logging.WARNING)
    try:
        write(path, shape, values.type, values.kind, values.seed)
    except OSError as error:
        raise SystemExit(f"make_model: cannot write {path}: {error.strerror}") from None
    print(f"{path}: {path.stat().st_size / 1e6:.0f} MB")


if __name__ == "__main__":
    flags.DEFINE_enum("shape", "qwen3.5-0.8b", list(SHAPES), "whose shape")
    flags.DEFINE_enum("type", "q4_k_m", list(TYPES), "as llama-quantize names it")
    flags.DEFINE_enum("kind", "ceiling", KINDS, "which drafts are accepted")
    flags.DEFINE_string("out", None, "the file to write", required=True)
    flags.DEFINE_integer("layers", None, "trunk layers, if not the shape's", lower_bound=1)
    flags.DEFINE_integer("vocab_size", None, "tokens, if not the shape's", lower_bound=MIN_VOCABULARY)
    flags.DEFINE_integer("seed", 0, "of the weights", lower_bound=0)
    app.run(main)
