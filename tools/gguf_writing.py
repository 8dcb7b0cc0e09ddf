"""Writing GGUF files with the gguf package: what the tools, the benchmarks and the tests share."""

from collections.abc import Mapping

import gguf


def metadata_of(reader: gguf.GGUFReader, prefix: str = "") -> dict[str, gguf.ReaderField]:
    """A file's metadata that a writer does not make by itself; only the keys with a prefix, if one is given."""
    own = ("GGUF.", "general.architecture")
    return {k: field for k, field in reader.fields.items() if k.startswith(prefix) and not k.startswith(own)}


def add_metadata(writer: gguf.GGUFWriter, fields: Mapping[str, gguf.ReaderField]) -> None:
    """Metadata of another file, each value with the type that it has there."""
    for name, field in fields.items():
        item = field.types[-1] if len(field.types) > 1 else None
        writer.add_key_value(name, field.contents(), field.types[0], item)


def finish(writer: gguf.GGUFWriter) -> None:
    """Writes what was added, and closes the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
