"""Where --output_json goes: found out to be impossible before the model runs, and never left half written."""

import errno
import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

from sharpi_jax.errors import OptionError


def check_writable(path: str) -> None:
    """Tries the very thing `write` will do.

    Raises:
      OptionError: the path cannot be written.
    """
    if path == "-":
        return
    try:
        if os.path.isdir(path) or path.endswith(os.sep):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if _is_special(path):  # not opened here: a reader at its other end would take the closing for the end
            if not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return
        temporary = _temporary(path)
        temporary.open("x").close()
        temporary.unlink()
    except (OSError, ValueError) as error:
        raise _refusal(path, error) from error


def write(path: str, document: dict[str, Any]) -> None:
    """Writes the document: a new file takes the old one's place in one step; `-` is standard output."""
    text = json.dumps(document, allow_nan=False, indent=1) + "\n"  # ASCII: readable under any locale
    if path == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    try:
        if _is_special(path):
            Path(path).write_text(text)
            return
        temporary = _temporary(path)
        try:
            temporary.write_text(text)
            temporary.replace(os.path.realpath(path))
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise _refusal(path, error) from error


def _temporary(path: str) -> Path:
    """A sibling of the file that a symbolic link leads to: a rename cannot cross file systems."""
    target = Path(os.path.realpath(path))
    return target.with_name(f".{target.name}.{os.getpid()}.tmp")


def _is_special(path: str) -> bool:
    """Whether the path is there and no regular file (a device, a pipe, a folder): it must never be replaced."""
    return os.path.exists(path) and not stat.S_ISREG(os.stat(path).st_mode)


def _refusal(path: str, error: OSError | ValueError) -> OptionError:
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return OptionError(f"--output_json={path} cannot be written: {reason}.")
