"""The lines of `results.jsonl`: a header that says whose results they are, then one finished record to a line.

Here are only bytes; `evaluation_files` reads and writes them.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from sharpi_jax.errors import OptionError

_MARK = "sharpi_jax_results"  # the header's first key, and the format's version
_FORMAT = 1
_SHOWN = 40  # characters of an option's value in a message


def header_line(options: Mapping[str, Any], version: str) -> bytes:
    """The first line: the options and the package's version, and a hash of both, by which runs are told apart.

    Args:
      options: what can be written as JSON; all that the results depend on.

    Raises:
      ValueError, TypeError: an option that JSON cannot hold.
    """
    ordered = json.loads(_written(dict(options)))  # the order in which options are given means nothing
    return record_line({_MARK: _FORMAT, "hash": _hash(options, version), "version": version, "options": ordered})


def record_line(record: Mapping[str, Any]) -> bytes:
    """One line of ASCII; a line feed is its last byte and nowhere else, so that a torn line shows.

    Raises:
      ValueError, TypeError: a value that JSON cannot hold, such as NaN.
    """
    return json.dumps(dict(record), allow_nan=False).encode() + b"\n"


def parse_results(data: bytes, options: Mapping[str, Any], version: str, name: str) -> tuple[list[dict[str, Any]], int]:
    """The finished records of an earlier run with these options, and how many bytes of the file are whole lines.

    What follows the last line feed was being written when the run ended, and is not counted. A header of which only a
    part was written counts as no file: 0 bytes.

    Args:
      data: the whole file. name: it, for messages.

    Raises:
      OptionError: the file is of a run with other options, is damaged, or is none of ours.
    """
    expected = header_line(options, version)
    if len(data) < len(expected) and expected.startswith(data):
        return [], 0
    first, newline, _ = data.partition(b"\n")
    if first + newline != expected:
        raise _refusal(_object(first) if newline else None, options, version, name)
    end = data.rindex(b"\n") + 1
    records = []
    for number, line in enumerate(data[len(expected) : end].split(b"\n")[:-1], start=2):
        record = _object(line)
        if record is None:
            raise OptionError(
                f"line {number} of {name} is damaged; remove that line, and its prompt is decoded again, or give "
                "another report_dir."
            )
        records.append(record)
    return records, end


def _hash(options: Mapping[str, Any], version: str) -> str:
    whole = _written({"version": version, "options": dict(options)})
    return hashlib.sha256(whole.encode()).hexdigest()


def _written(value: Any) -> str:
    return json.dumps(value, sort_keys=True, allow_nan=False)


def _object(line: bytes) -> dict[str, Any] | None:
    """The JSON object in a line, or None if there is none."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _refusal(header: dict[str, Any] | None, options: Mapping[str, Any], version: str, name: str) -> OptionError:
    """Why a file whose first line is not the expected one cannot be gone on with."""
    if header is None or _MARK not in header:
        return OptionError(f"{name} holds no results of ours and is left as it is; give another report_dir.")
    theirs, there = header.get("options"), header.get("version")
    if header[_MARK] != _FORMAT or not isinstance(theirs, dict) or not isinstance(there, str):
        return OptionError(f"{name} has a header that this version cannot read; give another report_dir.")
    # Keys with dots come from no flag, so the version cannot be taken for an option.
    before, now = {"sharpi_jax.version": there} | theirs, {"sharpi_jax.version": version} | dict(options)
    differences = [
        f"{key} was {_shown(before, key)} and is {_shown(now, key)}"
        for key in sorted(before.keys() | now.keys())
        if key not in before or key not in now or json.dumps(before[key], sort_keys=True) != _written(now[key])
    ]
    if not differences:
        return OptionError(f"{name} has a damaged header; give another report_dir.")
    return OptionError(
        f"{name} holds results with other options ({'; '.join(differences)}); give another report_dir, or the options "
        "as they were."
    )


def _shown(options: Mapping[str, Any], key: str) -> str:
    if key not in options:
        return "not there"
    text = json.dumps(options[key])
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
