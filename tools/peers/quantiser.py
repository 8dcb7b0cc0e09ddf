"""Which format llama.cpp's quantiser gives each tensor of a small qwen35 model, for every type that bench/ writes.

    python -m tools.peers.quantiser --library=LIBLLAMA_SO --out=tests/data/quantiser.json.xz

`llama_model_quantize` of a libllama shared library is called directly; its libraries must be found (LD_LIBRARY_PATH).
tests/test_bench_model.py holds bench/mix.py to what is stored.
"""

import ctypes
import dataclasses
import json
import lzma
import pathlib
import tempfile

import gguf
from absl import app, flags

from bench.make_model import SHAPES, write
from bench.mix import TYPES

LAYERS = 24  # so that every rule about a tensor's place comes to bear


class Params(ctypes.Structure):
    """`llama_model_quantize_params` of llama.h."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("threads", "file_type", "output_type", "embedding_type")),
        *(
            (name, ctypes.c_bool)
            for name in ("requantise", "with_output", "only_copy", "pure", "keep_split", "dry_run")
        ),
        *((name, ctypes.c_void_p) for name in ("importance", "metadata", "tensor_types", "pruned")),
        ("buffer", ctypes.c_size_t),
    )


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]}")
    library = ctypes.CDLL(flags.FLAGS.library)
    library.llama_model_quantize_default_params.restype = Params
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        source, target = pathlib.Path(folder) / "f32.gguf", pathlib.Path(folder) / "out.gguf"
        write(source, dataclasses.replace(SHAPES["tiny"], layers=LAYERS), "f32", "random")
        for name, (_, file_type) in TYPES.items():
            params = library.llama_model_quantize_default_params()
            params.file_type = int(file_type)
            if library.llama_model_quantize(bytes(source), bytes(target), ctypes.byref(params)):
                raise RuntimeError(f"llama.cpp cannot quantise to {name}")
            found[name] = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(target).tensors}
    text = json.dumps({"layers": LAYERS, "formats": found}, sort_keys=True)
    pathlib.Path(flags.FLAGS.out).write_bytes(lzma.compress(text.encode(), preset=9))


if __name__ == "__main__":
    flags.DEFINE_string("library", None, "libllama.so", required=True)
    flags.DEFINE_string("out", None, "the table to write", required=True)
    app.run(main)
