"""A vocabulary that llama-server will load: python -m tools.peers.vocabulary --source=FILE.gguf --out=MODEL.gguf.

llama-server refuses a file without weights, so the tokenizer's metadata of any GGUF file goes, unchanged, into a model
of one tiny random layer. It writes nonsense, but its /tokenize and /apply-template are those of the vocabulary. With
--only the file gets no weights: tests/data/vocab/smollm.gguf.xz is such a file, compressed by `xz -9e`.
"""

import os
import pathlib

import gguf
import numpy as np
from absl import app, flags

from tools.gguf_writing import add_metadata, finish, metadata_of

FLAGS = ("-t", "1", "-c", "64", "--no-warmup")  # what llama-server needs for such a model
_WIDTH, _HEADS, _HIDDEN, _CONTEXT = 32, 2, 32, 512
_STRING = gguf.GGUFValueType.STRING


def wrap(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    pre: str | None = None,
    template: str | None = None,
    weights: bool = True,
) -> None:
    """Write a GGUF file with the tokenizer of another.

    Args:
      source: the other file.
      out: the file to write.
      pre, template: the pre-tokenizer's name and the chat template, where they are not to be those of `source`.
      weights: whether there is a layer, of random float16 weights.
    """
    fields = metadata_of(gguf.GGUFReader(source), "tokenizer.")
    writer = gguf.GGUFWriter(out, "llama")
    changes = {"tokenizer.ggml.pre": pre, "tokenizer.chat_template": template}
    changes = {name: value for name, value in changes.items() if value is not None}
    add_metadata(writer, {name: field for name, field in fields.items() if name not in changes})
    for name, value in changes.items():
        writer.add_key_value(name, value, _STRING)
    if weights:
        _add_layer(writer, len(fields["tokenizer.ggml.tokens"].data))
    finish(writer)


def _add_layer(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    writer.add_block_count(1)
    writer.add_context_length(_CONTEXT)
    writer.add_embedding_length(_WIDTH)
    writer.add_feed_forward_length(_HIDDEN)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocab_size)
    draw = np.random.default_rng(0)
    matrices = {"token_embd": vocab_size}  # without output.weight the two are tied
    matrices |= {f"blk.0.attn_{name}": _WIDTH for name in ("q", "k", "v", "output")}
    matrices |= {"blk.0.ffn_gate": _HIDDEN, "blk.0.ffn_up": _HIDDEN, "blk.0.ffn_down": _WIDTH}
    for name, rows in matrices.items():
        columns = _HIDDEN if name.endswith("ffn_down") else _WIDTH
        writer.add_tensor(f"{name}.weight", draw.normal(size=(rows, columns)).astype(np.float16))
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(_WIDTH, np.float32))


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]}")
    out = pathlib.Path(_OUT.value)
    wrap(_SOURCE.value, out, weights=not _ONLY.value)
    print(f"{out}: {out.stat().st_size} bytes")


if __name__ == "__main__":  # the tests import `wrap`, and flags belong to a command only
    _SOURCE = flags.DEFINE_string("source", None, "A GGUF file with a tokenizer.", required=True)
    _OUT = flags.DEFINE_string("out", None, "The GGUF file to write.", required=True)
    _ONLY = flags.DEFINE_bool("only", False, "Write the vocabulary without a layer.")
    app.run(main)
