"""Tables of flags: from one table come the absl flags, the checks and the `--help` text.

A table is a tuple of Sections of Flags. Each parse builds its own FlagValues, so importing the package defines no
global flag, and parsing twice in one process starts from the defaults twice.
"""

import dataclasses
import difflib
import textwrap
from collections.abc import Sequence
from typing import Any

from absl import flags

from sharpi_jax.cli.argv import LONG_NAMES, normalise
from sharpi_jax.cli.usage import UsageError
from sharpi_jax.version import __version__


@dataclasses.dataclass(frozen=True)
class Flag:
    """One flag.

    Attributes:
      name: spelled with underscores.
      help: what it does, for `--help`.
      parser: turns the typed text into the value; its ValueError becomes the message of a usage error.
      metavar: stands for the value in `--help`; a flag without one is boolean.
      default: as it would be typed; None means not given, false for a boolean that is not optional.
      repeated: may be given several times; the value is a list.
      optional: a boolean that is None when it is not given.
    """

    name: str
    help: str
    metavar: str = ""
    parser: flags.ArgumentParser[Any] = flags.ArgumentParser()  # noqa: RUF009  (absl's parsers are stateless and shared)
    default: str | None = None
    repeated: bool = False
    optional: bool = False


@dataclasses.dataclass(frozen=True)
class Section:
    """Flags that `--help` shows under one heading."""

    title: str
    flags: tuple[Flag, ...]


@dataclasses.dataclass(frozen=True)
class Parsed:
    """The result of one parse: every flag's value, and what was no flag."""

    values: dict[str, Any]
    positional: tuple[str, ...]


class Integer(flags.ArgumentParser[int]):
    """A decimal integer between two bounds; `upper` None means no limit."""

    def __init__(self, lower: int, upper: int | None = None) -> None:
        self.lower, self.upper = lower, upper

    def parse(self, argument: str) -> int:
        wanted = f"an integer of at least {self.lower}" if self.upper is None else f"{self.lower} to {self.upper}"
        try:
            value = int(argument, 10)
        except ValueError:
            raise ValueError(f"must be {wanted}") from None
        if value < self.lower or (self.upper is not None and value > self.upper):
            raise ValueError(f"must be {wanted}")
        return value


class Boolean(flags.BooleanParser):
    """absl's boolean, with a message for people."""

    def parse(self, argument: str | int) -> bool:
        try:
            return bool(super().parse(argument))
        except ValueError:
            raise ValueError("must be true or false") from None


class Choice(flags.ArgumentParser[str]):
    """One of a few words."""

    def __init__(self, *words: str) -> None:
        self.words = words

    def parse(self, argument: str) -> str:
        if argument not in self.words:
            raise ValueError(f"must be one of {', '.join(self.words)}")
        return argument


COMMON = Section(
    "Other",
    (
        Flag("flagfile", "read flags from FILE, one --name=value a line; lines that begin with # are comments", "FILE"),
        Flag("help", "show this text and exit"),
        Flag("version", "show the version and exit"),
    ),
)


def parse(argv: Sequence[str], sections: Sequence[Section]) -> Parsed:
    """Parses argv (without the program's name) against the table.

    Raises:
      UsageError: an unknown flag (the nearest one is named), or a value that its parser refuses.
    """
    table = _define(sections)
    tokens = normalise(argv, table)
    try:
        positional = table(["sharpi-jax", *tokens])[1:]
    except flags.UnrecognizedFlagError as error:
        raise UsageError(_unknown(error.flagname, list(table))) from error
    except (flags.Error, ValueError) as error:
        raise UsageError(f"{str(error).rstrip('.')}.") from error
    return Parsed(table.flag_values_dict(), tuple(positional))


def answered(parsed: Parsed, help_text: str, sections: Sequence[Section]) -> bool:
    """Prints what --help or --version asks for; False where neither was given."""
    if parsed.values["help"]:
        print(help_text + "\n" + render(sections))
    elif parsed.values["version"]:
        print(f"sharpi-jax {__version__}")
    else:
        return False
    return True


def _define(sections: Sequence[Section]) -> flags.FlagValues:
    table = flags.FlagValues()  # type: ignore[no-untyped-call]
    table.set_gnu_getopt(True)  # flags and arguments in any order
    for flag in (f for section in (*sections, COMMON) for f in section.flags):
        if flag.name == "flagfile":  # absl's own, expanded before the parse
            continue
        kind = flags.MultiFlag if flag.repeated else flags.Flag
        parser = flag.parser if flag.metavar else Boolean()
        default = flag.default if flag.metavar or flag.optional else flag.default or "false"
        flags.DEFINE_flag(kind(parser, None, flag.name, default, flag.help, boolean=not flag.metavar), table)
    return table


def _unknown(name: str, known: Sequence[str]) -> str:
    """The message for a flag that does not exist, with the nearest one that does."""
    typed = name.strip().replace("-", "_")
    names = [*known, *LONG_NAMES, "flagfile"]
    near = (
        difflib.get_close_matches(typed, names, n=1, cutoff=0.75)
        or [n for n in names if len(typed) > 1 and n.startswith(typed)][:1]
    )
    dashes = "-" if len(name) == 1 else "--"
    hint = f"did you mean --{near[0]}?" if near else "see --help."
    if " " in name:
        hint = "in a flagfile a value follows an equals sign: --name=value."
    return f"unknown flag {dashes}{name}; {hint}"


def render(sections: Sequence[Section], width: int = 100) -> str:
    """The table as text: a heading per section, then each flag with its help and its default."""
    lines: list[str] = []
    for section in (*sections, COMMON):
        lines += ["", f"{section.title}:"]
        for flag in section.flags:
            default = f" (default: {flag.default})" if flag.default is not None else ""
            repeat = " (may be repeated)" if flag.repeated else ""
            head = f"  --{flag.name}={flag.metavar}" if flag.metavar else f"  --{flag.name}"
            body = textwrap.wrap(flag.help + default + repeat, width - 30)
            first = [f"{head:<29} {body.pop(0)}"] if len(head) < 29 else [head]
            lines += first + [" " * 30 + line for line in body]
    return "\n".join(lines)
