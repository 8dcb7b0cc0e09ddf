"""The program: which subcommand, and what becomes of its faults.

Exit status: 0 done, 2 not a command (UsageError), 130 interrupted, 1 everything else. Every fault is one line on
standard error; with SHARPI_DEBUG=1 an unexpected one shows its traceback before that line.
"""

import os
import sys
import traceback
from collections.abc import Callable, Sequence

from sharpi_jax.cli.terminal import note, printable
from sharpi_jax.cli.usage import UsageError
from sharpi_jax.errors import SharpiError


def _run(argv: Sequence[str]) -> int:
    from sharpi_jax.cli import run  # each subcommand imports only what it needs

    return run.main(argv)


def _inspect(argv: Sequence[str]) -> int:
    from sharpi_jax.cli import inspect_file

    return inspect_file.main(argv)


def _perplexity(argv: Sequence[str]) -> int:
    from sharpi_jax.cli import perplexity

    return perplexity.main(argv)


def _bench(argv: Sequence[str]) -> int:
    from sharpi_jax.cli import bench

    return bench.main(argv)


def _eval(argv: Sequence[str]) -> int:
    from sharpi_jax.cli import eval as evaluation

    return evaluation.main(argv)


SUBCOMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "run": _run,
    "inspect": _inspect,
    "perplexity": _perplexity,
    "bench": _bench,
    "eval": _eval,
}


def main(argv: Sequence[str]) -> int:
    """Runs one command.

    Args:
      argv: the arguments, without the program's name.

    Returns:
      The exit status.
    """
    try:
        return _dispatch(argv)
    except UsageError as error:
        return _fault(f"{error}", 2)
    except SharpiError as error:
        return _fault(f"{error}", 1)
    except KeyboardInterrupt:
        note()
        return 130
    except BrokenPipeError:  # the reader has had enough: `| head`
        return 1
    except OSError as error:
        name = f"{error.filename}: " if error.filename else ""
        return _fault(f"{name}{error.strerror or error}", 1)
    except Exception as error:
        if os.environ.get("SHARPI_DEBUG") == "1":
            traceback.print_exc()
        summary = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        return _fault(f"internal error: {summary}; set SHARPI_DEBUG=1 to see where", 1)


def run() -> None:
    """The console script."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller (`>&-`): what is written there is lost, as asked for
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  (for as long as the program runs)
        getattr(sys, name).reconfigure(errors="replace")  # a character that the locale lacks must not end a run
    status = main(sys.argv[1:])
    try:
        sys.stdout.flush()
    except OSError:  # what could not be written would fail once more, loudly, when the interpreter exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = status or 1
    sys.exit(status)


def _dispatch(argv: Sequence[str]) -> int:
    if not argv or argv[0].startswith("-"):
        return _run(argv)
    name, *rest = argv
    if name not in SUBCOMMANDS:
        hint = f"; did you mean --model={name}?" if name.endswith(".gguf") else "."
        raise UsageError(f"unknown subcommand {name!r}; the subcommands are {', '.join(SUBCOMMANDS)}{hint}")
    return SUBCOMMANDS[name](rest)


def _fault(message: str, status: int) -> int:
    note(f"sharpi-jax: error: {printable(message)}")
    return status
