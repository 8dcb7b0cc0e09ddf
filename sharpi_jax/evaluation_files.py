"""The files of a batch evaluation: prompts that are read, results that are appended to and resumed.

What must not go wrong here: a finished record is on the disk before the next begins, and a file that holds anything
but the results of this very run is never written to.
"""

import contextlib
import fcntl
import os
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from sharpi_jax.assets import BUILTIN_PROMPTS, DEMO_MODEL
from sharpi_jax.errors import OptionError
from sharpi_jax.evaluate.evaluation import (
    Bench,
    results_from,
    run_options,
    run_sweep,
    time_settings,
)
from sharpi_jax.evaluate.prompts import Prompt, parse_prompts
from sharpi_jax.evaluate.results import RunResult, SettingTiming
from sharpi_jax.evaluate.results_log import header_line, parse_results, record_line
from sharpi_jax.evaluate.sweep import Progress, Sweep, Task
from sharpi_jax.version import __version__

RESULTS = "results.jsonl"
DEMO_DOMAIN = "demo"  # of the built-in prompts: what the demo model was trained on


def read_prompts(path: str | Path, *, on_error: str = "stop") -> tuple[list[Prompt], list[str]]:
    """The prompts of a JSONL file, and a sentence for each line that was skipped: see `parse_prompts`.

    Raises:
      OptionError: the file cannot be read, has a bad line (with on_error="stop"), or holds no prompt.
    """
    try:
        data = Path(path).read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        raise OptionError(f"cannot read the prompts in {str(path)!r}: {_reason(error)}.") from error
    return parse_prompts(data, str(path), on_error=on_error)


def builtin_prompts() -> list[Prompt]:
    """The prompts that ship with the package: nine kinds of work, and the demo model's own domain, "demo"."""
    return read_prompts(BUILTIN_PROMPTS)[0]


def default_prompts(model: Path) -> list[Prompt]:
    """Of the built-in ones, those for a model: the demo model's domain for it, nine kinds of work for all others."""
    return [p for p in builtin_prompts() if (p.domain == DEMO_DOMAIN) == (model == DEMO_MODEL)]


class ResultsFile:
    """A file of results, open for more: made by `open_results`, and held by one process at a time.

    Attributes:
      path: the file. done: the records that earlier runs finished, in the file's order.
    """

    def __init__(self, path: Path, descriptor: int, done: list[dict[str, Any]]):
        self.path = path
        self.done = done
        self._descriptor = descriptor

    def append(self, record: Mapping[str, Any]) -> None:
        """Writes one finished record; when this returns, it is on the disk.

        Raises:
          OptionError: the disk is full, or fails. No part of the record stays.
          ValueError, TypeError: the record holds what JSON cannot, such as NaN.
        """
        self._write(record_line(record))

    def arrange(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Puts the records, all of the file, in this order: the old file is replaced by the new one in one step.

        Raises:
          OptionError: the disk is full, or fails; the old file stays. ValueError, TypeError: as `append`.
        """
        old = self.path.read_bytes()
        new = b"".join((old.partition(b"\n")[0] + b"\n", *map(record_line, records)))
        if new == old:
            return
        target = Path(os.path.realpath(self.path))  # what a symbolic link leads to
        beside = target.with_name(f".{target.name}.tmp")
        try:
            with beside.open("wb") as file:
                file.write(new)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(target)
            _sync_folder(target.parent)
        except OSError as error:
            with contextlib.suppress(OSError):
                beside.unlink()
            raise OptionError(f"cannot write {str(self.path)!r}: {_reason(error)}.") from error
        self.close()  # the name is another file's now

    def close(self) -> None:
        """Lets the file go; a second time does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> "ResultsFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, line: bytes) -> None:
        end = os.lseek(self._descriptor, 0, os.SEEK_END)
        try:
            written = os.write(self._descriptor, line)
            if written < len(line):  # a full disk takes what fits; asked again, it says so
                os.write(self._descriptor, line[written:])
            os.fsync(self._descriptor)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, end)
            raise OptionError(f"cannot write {str(self.path)!r}: {_reason(error)}.") from error


def evaluate_tasks(
    bench: Bench,
    tasks: Sequence[Task],
    sweep: Sweep,
    model: str,
    folder: str | Path | None,
    on_progress: Callable[[Progress], None],
) -> tuple[list[RunResult], list[SettingTiming]]:
    """Runs a sweep, going on from what `folder` holds of the same one, then times its settings.

    Every run is written to results.jsonl as it finishes; once all are there, the file is put in the order of the sweep.

    Args:
      model: its name. folder: None keeps nothing.

    Raises:
      OptionError: the folder holds other results, or cannot be written.
    """
    if folder is None:
        results = run_sweep(bench, tasks, sweep, on_progress=on_progress)
    else:
        with open_results(Path(folder) / RESULTS, run_options(bench, tasks, sweep, model)) as file:
            done = results_from(file.done, str(file.path))
            results = run_sweep(
                bench,
                tasks,
                sweep,
                done=done,
                on_result=lambda run: file.append(run.as_dict()),
                on_progress=on_progress,
            )
            file.arrange(run.as_dict() for run in results)
    return results, time_settings(bench, tasks, sweep, on_progress=on_progress)


def open_results(path: str | Path, options: Mapping[str, Any]) -> ResultsFile:
    """Opens the results of a run with these options, or begins them; a half-written last line is cut off.

    Args:
      path: the file; its folder is made if it is not there.
      options: all that the results depend on (what the model and the prompts are, too), as JSON can hold it.

    Raises:
      OptionError: the file is not a run's with these options, another run has it open, or it cannot be written.
    """
    path, descriptor = Path(path), -1
    if "\0" in str(path):
        raise OptionError(f"cannot write {str(path)!r}: a null character in the path.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not stat.S_ISREG(path.stat().st_mode):  # not opened: a device or pipe might act on it
            raise OptionError(f"{str(path)!r} is no regular file; give another report_dir.")
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        _lock(descriptor, path)
        data = _read_all(descriptor)
        done, length = parse_results(data, options, __version__, str(path))
        results = ResultsFile(path, descriptor, done)
        if length < len(data):
            os.ftruncate(descriptor, length)
        if length == 0:
            results._write(header_line(options, __version__))
            _sync_folder(path.parent)
        return results
    except BaseException as error:
        if descriptor >= 0:
            os.close(descriptor)
        if isinstance(error, OSError):
            raise OptionError(f"cannot write {str(path)!r}: {_reason(error)}.") from error
        raise


def _lock(descriptor: int, path: Path) -> None:
    """Keeps the file from other runs, until it is closed or the process ends, however it ends."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OptionError(
            f"another run is writing to {str(path)!r}; wait for it to end, or give another report_dir."
        ) from None
    except OSError:  # a network file system without locks
        pass


def _read_all(descriptor: int) -> bytes:
    with os.fdopen(descriptor, "rb", closefd=False) as file:
        return file.read()


def _sync_folder(folder: Path) -> None:
    """Puts a new file's name on the disk, where the file system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
