"""A GGUF file's own values in float32: python -m tools.peers.float32 --source=FILE.gguf --out=FLOAT32.gguf.

llama.cpp quantises activations where weights are quantised, and its prebuilt server does that with instructions which
not every processor has. On float32 weights it does neither: what it computes on this file is what exact arithmetic
computes on the other.
"""

import os

import gguf
from absl import app, flags

from tools.gguf_writing import add_metadata, finish, metadata_of


def write_float32(source: str | os.PathLike[str], out: str | os.PathLike[str]) -> None:
    """Writes `out`: the metadata of `source`, and its tensors dequantised."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(out, reader.fields["general.architecture"].contents())
    add_metadata(writer, metadata_of(reader))
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type))
    finish(writer)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]}")
    write_float32(_SOURCE.value, _OUT.value)


if __name__ == "__main__":  # the tests import `write_float32`, and flags belong to a command only
    _SOURCE = flags.DEFINE_string("source", None, "The GGUF file.", required=True)
    _OUT = flags.DEFINE_string("out", None, "The GGUF file to write.", required=True)
    app.run(main)
