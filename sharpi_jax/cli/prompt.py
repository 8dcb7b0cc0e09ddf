"""Where the prompt comes from: a flag, a file, or a pipe."""

import sys
from pathlib import Path

from sharpi_jax.assets import DEMO_PROMPT
from sharpi_jax.cli.run_flags import RunFlags
from sharpi_jax.cli.usage import UsageError
from sharpi_jax.errors import OptionError


def read_prompt(flags: RunFlags) -> str | tuple[int, ...] | None:
    """Returns the text or the token ids; None for a conversation on the terminal.

    Raises:
      UsageError: there is no prompt at all.
      OptionError: the prompt is empty, or its file cannot be read.
    """
    if flags.prompt_ids is not None:
        return flags.prompt_ids
    if flags.prompt is not None:
        text = flags.prompt
    elif flags.prompt_file is not None and flags.prompt_file != "-":
        text = read_text(flags.prompt_file, "prompt")
    elif flags.prompt_file is None and _is_terminal():
        if flags.chat:
            return None
        if not flags.is_demo:
            raise UsageError("no prompt; give --prompt, --prompt_file or --prompt_ids, pipe a text in, or use --chat.")
        text = DEMO_PROMPT
    else:
        text = read_text("-", "prompt")
        if not text and flags.is_demo and flags.prompt_file is None:
            text = DEMO_PROMPT  # standard input is /dev/null, as under many launchers
    if not text:
        raise OptionError("the prompt is empty; give at least one token.")
    return text


def _is_terminal() -> bool:
    """Whether nobody pipes anything in; a closed standard input counts as a terminal that says nothing."""
    return sys.stdin is None or sys.stdin.isatty()


def _read_standard_input() -> bytes:
    return sys.stdin.buffer.read() if sys.stdin is not None else b""


def read_text(path: str, what: str) -> str:
    """UTF-8 text less one final newline: editors and `echo` add it, and nobody means it as part of the text.

    Args:
      path: a file, or - for standard input; a closed one is empty. what: "prompt" or "text", for messages.

    Raises:
      OptionError: the file cannot be read, or is no UTF-8 text.
    """
    source = "standard input" if path == "-" else path
    try:
        data = _read_standard_input() if path == "-" else Path(path).read_bytes()
        text = data.decode()
    except UnicodeDecodeError as error:
        raise OptionError(f"the {what} in {source} is not UTF-8 text (byte {error.start}).") from error
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise OptionError(f"cannot read the {what} file {path!r}: {reason}.") from error
    return text.removesuffix("\n").removesuffix("\r") if text.endswith("\n") else text
