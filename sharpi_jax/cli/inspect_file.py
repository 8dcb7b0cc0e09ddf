"""`sharpi-jax inspect`: what is in a GGUF file, from its header alone. No weight is read and JAX is not needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sharpi_jax.cli.flagset import Flag, Section, answered, parse
from sharpi_jax.cli.terminal import count, printable
from sharpi_jax.cli.usage import UsageError

if TYPE_CHECKING:
    from sharpi_jax.checkpoint.describe import Description, Mtp, TokenizerFacts
    from sharpi_jax.checkpoint.gguf_file import GGUFFile

SECTIONS = (
    Section(
        "Inspect",
        (
            Flag("model", "the GGUF file, or any shard of a split one (-m, or without a flag)", "FILE"),
            Flag("tensors", "list every tensor: name, type, dimensions (in-features first), bytes"),
            Flag("metadata", "list every metadata key: type and value; long values are cut"),
        ),
    ),
)

HELP = """\
sharpi-jax inspect: what is in a GGUF file, supported or not. Reads the header only.

usage: sharpi-jax inspect FILE.gguf [--tensors] [--metadata]"""

_SHOWN_ITEMS = 8
_SHOWN_CHARACTERS = 80


def main(argv: Sequence[str]) -> int:
    """The subcommand: argv without its name."""
    parsed = parse(argv, SECTIONS)
    if answered(parsed, HELP, SECTIONS):
        return 0
    model = parsed.values["model"]
    paths = [*([model] if model else []), *parsed.positional]
    if len(paths) != 1:
        raise UsageError(f"inspect takes one file, not {len(paths)}; give sharpi-jax inspect FILE.gguf.")
    from sharpi_jax.checkpoint.describe import describe
    from sharpi_jax.checkpoint.gguf_file import open_gguf

    file = open_gguf(paths[0])
    lines = _summary(file, describe(file))
    if parsed.values["metadata"]:
        lines += ["", "metadata:", *_metadata(file)]
    if parsed.values["tensors"]:
        lines += ["", "tensors:", *_tensors(file)]
    print("\n".join(lines))
    return 0


def _summary(file: GGUFFile, facts: Description) -> list[str]:
    sizes = facts.sizes
    shards = f", the first of {len(file.files)} files" if len(file.files) > 1 else ""
    rows = [
        ("file", f"{file.path} ({_bytes(facts.file_bytes)}, GGUF version {file.version}{shards})"),
        ("architecture", facts.architecture or "not given"),
        ("name", facts.name or "not given"),
        ("parameters", f"{facts.parameters:,}"),
        ("context length", _number(sizes.get("context_length"))),
        ("width", _number(sizes.get("embedding_length"))),
        ("layers", _layers(facts)),
        ("heads", _heads(sizes)),
        *([("experts", _experts(sizes))] if "expert_count" in sizes else []),
        ("MTP head", _mtp(facts.mtp)),
        ("tokenizer", _tokenizer(facts.tokenizer)),
        ("chat template", f"yes, {facts.chat_template} characters" if facts.chat_template else "no"),
        ("supported", f"no: {facts.obstacle}" if facts.obstacle else "yes"),
    ]
    lines = [f"{name + ':':<16}{printable(value)}" for name, value in rows]
    total = sum(share.nbytes for share in facts.types) or 1
    table = [
        (s.name, count(s.tensors, "tensor"), f"{s.parameters:,} weights", _bytes(s.nbytes), f"{s.nbytes / total:.1%}")
        for s in facts.types
    ]
    return [*lines, "quantisation:" if table else "quantisation:   none", *_columns(table, right=(2, 3, 4))]


def _layers(facts: Description) -> str:
    parts = [f"{count} {kind}" if kind != "layer" else f"{count}" for kind, count in facts.layers.items()]
    mtp = f", {len(facts.mtp.blocks)} MTP" if facts.mtp.present else ""
    return (" + ".join(parts) or "none") + mtp


def _heads(sizes: Any) -> str:
    def shown(*keys: str) -> str:
        return " / ".join(_number(sizes.get(key)) for key in keys)

    text = f"{shown('attention.head_count', 'attention.head_count_kv')} (query / key-value)"
    if "attention.key_length" in sizes:
        text += f" of {shown('attention.key_length')}"
    if "ssm.time_step_rank" in sizes:
        text += f"; gated delta net {shown('ssm.time_step_rank', 'ssm.group_count')} (value / key)"
        text += f" of {shown('ssm.state_size')}"
    return text


def _experts(sizes: Any) -> str:
    text = f"{_number(sizes.get('expert_count'))}, {_number(sizes.get('expert_used_count'))} used"
    for key, what in (("expert_feed_forward_length", "width"), ("expert_shared_feed_forward_length", "shared width")):
        text += f", {what} {sizes[key]}" if key in sizes else ""
    return text


def _mtp(mtp: Mtp) -> str:
    text = f"yes, block {', '.join(map(str, mtp.blocks))}" if mtp.present else "no"
    return f"{text} ({mtp.remark})" if mtp.remark else text


def _tokenizer(facts: TokenizerFacts | None) -> str:
    if facts is None:
        return "none"
    special = "".join(f", {name} {token} {text}" for name, (token, text) in facts.special.items())
    return f"{facts.model or 'unnamed'}, pre-tokenizer {facts.pre or 'not given'}, {facts.size} tokens{special}"


def _metadata(file: GGUFFile) -> list[str]:
    rows = [(key, file.metadata_types[key], _value(value)) for key, value in file.metadata.items()]
    return _columns([tuple(map(printable, row)) for row in rows])


def _value(value: Any) -> str:
    """A value on one line; what is left out is counted."""
    if isinstance(value, str):
        return _short(value)
    if not hasattr(value, "__len__"):
        return str(value).lower() if isinstance(value, bool) else str(value)
    items = value[:_SHOWN_ITEMS] if isinstance(value, list) else value[:_SHOWN_ITEMS].tolist()
    texts = [repr(item) if isinstance(item, str) else _value(item) for item in items]
    more = f", ... {len(value)} in all" if len(value) > len(items) else ""
    return _short(f"[{', '.join(texts)}{more}]", 2 * _SHOWN_CHARACTERS)


def _short(text: str, limit: int = _SHOWN_CHARACTERS) -> str:
    return text if len(text) <= limit else f"{text[:limit]}... {len(text)} characters in all"


def _tensors(file: GGUFFile) -> list[str]:
    rows = [
        (printable(t.name), t.type_name, " x ".join(map(str, t.dims)), f"{t.nbytes:,}") for t in file.tensors.values()
    ]
    return _columns(rows, right=(3,))


def _columns(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Rows as aligned text; the columns in `right` are flushed right, the last one is never padded."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            f"{cell:>{width}}" if index in right else f"{cell:<{width}}"
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(("  " + "  ".join(cells)).rstrip())
    return lines


def _number(value: int | None) -> str:
    return "not given" if value is None else str(value)


def _bytes(count: int) -> str:
    """A size for people, in powers of ten."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1000
    return f"{size:.2f} TB"
