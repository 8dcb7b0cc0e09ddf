"""Spelling: what people type becomes what absl reads.

absl knows `--spec_draft_p_min=0.1` and `--noignore_eos`. People also type the names they know from llama.cpp: dashes
for underscores, `--no-x`, and a few short or older names. Each flag leaves here as one token, `--name=value`, so that
a value is never mistaken for a flag: `--prompt --x` continues the text `--x`, and `--prompt --flagfile=y` reads no
file. Flagfiles are expanded by absl's own reader and go through the same rules.
"""

from collections.abc import Iterator, Sequence

from absl import flags

from sharpi_jax.cli.usage import UsageError

# Other programs' names for our flags, already with underscores; translated only where they are no flags themselves.
SHORT_NAMES = {"-h": "help", "-m": "model", "-p": "prompt", "-n": "max_tokens", "-c": "ctx_size", "-s": "seed"}
LONG_NAMES = {
    "n_predict": "max_tokens",
    "temp": "temperature",
    "draft_max": "spec_draft_n_max",
    "draft_min": "spec_draft_n_min",
}


def normalise(argv: Sequence[str], known: flags.FlagValues) -> list[str]:
    """Returns argv with every known flag spelled as one absl token; the rest is untouched.

    Args:
      argv: the arguments, without the program's name.
      known: the flags that exist.

    Raises:
      UsageError: a flag lacks its value, or a flagfile cannot be read.
    """
    out: list[str] = []
    tokens = iter(argv)
    for token in tokens:
        if token == "--":  # all that follows is positional, whatever it looks like
            return [*out, token, *tokens]
        head, equals, value = token.partition("=")
        name = _flag_name(head, known)
        if name == "flagfile":
            out += _read_flagfile(value if equals else _next_value(token, tokens), known)
        elif name is None:
            out.append(token)
        elif equals:
            out.append(f"--{name}={value}")
        elif name not in known or known[name].boolean:  # `--x` or `--nox`
            out.append(f"--{name}")
        else:
            out.append(f"--{name}={_next_value(token, tokens)}")
    return out


def _flag_name(head: str, known: flags.FlagValues) -> str | None:
    """absl's name for `head`, `noNAME` for a negated boolean, or None for what is no known flag."""
    if head in SHORT_NAMES:
        name = SHORT_NAMES[head]
    elif head.startswith("--"):
        name = head[2:].replace("-", "_")
    else:
        return None
    name = name if name in known else LONG_NAMES.get(name, name)
    if name in known or name == "flagfile":
        return name
    positive = name[2:].lstrip("_") if name.startswith("no") else ""
    return f"no{positive}" if positive in known and known[positive].boolean else None


def _next_value(flag: str, tokens: Iterator[str]) -> str:
    value = next(tokens, None)
    if value is None:
        raise UsageError(f"flag {flag} needs a value.")
    return value


def _read_flagfile(path: str, known: flags.FlagValues) -> list[str]:
    """The file's flags (comments, blank lines and nested flagfiles resolved by absl), normalised."""
    try:
        lines = known.read_flags_from_files([f"--flagfile={path}"])
    except flags.Error as error:  # absl's message wraps the system's: say it once
        cause = error.__context__
        reason = cause.strerror if isinstance(cause, OSError) else str(error)
        raise UsageError(f"cannot read the flagfile {path!r}: {reason}.") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"cannot read the flagfile {path!r}: it is not UTF-8 text.") from error
    return normalise(lines, known)
