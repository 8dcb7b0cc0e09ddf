"""The prompts of a batch evaluation: one JSON object to a line, checked line by line before anything is decoded.

Nothing is guessed: a line that is not wholly understood is a fault, as a prompt that is silently something else would
spoil the figures without a trace.
"""

import codecs
import dataclasses
import difflib
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from sharpi_jax.errors import OptionError

Message = dict[str, str]

KEYS = ("id", "domain", "prompt", "messages", "prompt_ids", "max_tokens", "reference")
_CONTENTS = ("prompt", "messages", "prompt_ids")
_MESSAGE_KEYS = ("role", "content")
_MAX_LINE = 1 << 24  # bytes: more than the ids of a million tokens take
_MAX_INT = (1 << 31) - 1  # ids and positions are int32
_SHOWN = 40  # characters of the user's own text in a message


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One prompt, as text, as a conversation or as token ids: exactly one of the three is given.

    Attributes:
      id: unique among the prompts of a run; the line number where the file gives none.
      domain: a group that figures are given for; None for none.
      text: to continue, as it is. messages: for the model's chat template, each with "role" and "content".
      prompt_ids: token ids as they are; whether they are in the vocabulary is the model's to say.
      max_tokens: of this prompt alone, at least 1; None for the run's.
      reference: what the answer should be (`text_metrics.matches_reference`), never blank; None for none.
    """

    id: str
    domain: str | None = None
    text: str | None = None
    messages: tuple[Message, ...] | None = None
    prompt_ids: tuple[int, ...] | None = None
    max_tokens: int | None = None
    reference: str | None = None


class _LineError(Exception):
    """What is wrong with one line, without its place."""


def parse_prompts(data: bytes, name: str, *, on_error: str = "stop") -> tuple[list[Prompt], list[str]]:
    """The prompts of a JSONL file, and a sentence for each line that could not be used.

    A line is an object with one of "prompt" (text), "messages" or "prompt_ids", and optionally "id", "domain",
    "max_tokens" and "reference"; null is the same as not given. Blank lines, CRLF and a byte order mark at the start
    are allowed.

    Args:
      data: the file. name: it, for messages.
      on_error: "stop" at the first bad line, or "skip" bad lines.

    Returns:
      The prompts in the file's order, and the faults; each names file and line. With "stop" there are none.

    Raises:
      OptionError: a bad line (with "stop"), or no prompt at all.
    """
    if on_error not in ("stop", "skip"):
        raise OptionError(f"on_error must be stop or skip, not {on_error!r}.")
    prompts: list[Prompt] = []
    faults: list[str] = []
    lines: dict[str, int] = {}  # of each id
    for number, line in _lines(data):
        try:
            prompt = _prompt(line, number)
            if prompt.id in lines:
                raise _LineError(f"the id {_shown(prompt.id)} is taken by line {lines[prompt.id]}; give each its own")
        except _LineError as fault:
            message = f"{name}, line {number}: {fault}."
            if on_error == "stop":
                raise OptionError(message) from None
            faults.append(message)
        else:
            lines[prompt.id] = number
            prompts.append(prompt)
    if not prompts:
        why = f"; {len(faults)} bad lines were skipped, the first is {faults[0]}" if faults else "."
        raise OptionError(f"{name} holds no prompt{why}")
    return prompts, faults


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """A hash of all that the prompts say, in their order: for the options that a resumed run must share."""
    whole = json.dumps([dataclasses.asdict(prompt) for prompt in prompts])
    return hashlib.sha256(whole.encode()).hexdigest()


def _lines(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, with their numbers from 1. Only a line feed ends one: text may hold U+2028."""
    for number, line in enumerate(data.removeprefix(codecs.BOM_UTF8).split(b"\n"), start=1):
        if line.strip():
            yield number, line


def _prompt(line: bytes, number: int) -> Prompt:
    fields = {key: value for key, value in _object(line).items() if value is not None}
    _check_keys(fields, KEYS)
    contents = [key for key in _CONTENTS if key in fields]
    if len(contents) != 1:
        found = " and ".join(contents) if contents else "none"
        raise _LineError(f"exactly one of prompt, messages and prompt_ids is needed, but there is {found}")
    identity = fields.get("id", number)
    if type(identity) is not int:  # numbers are what many files have; a bool is no number
        identity = _text("id", identity)
    taken: dict[str, Any] = {"id": str(identity)}
    readers: dict[str, tuple[str, Callable[[str, Any], Any]]] = {
        "domain": ("domain", _text),
        "prompt": ("text", _text),
        "messages": ("messages", _messages),
        "prompt_ids": ("prompt_ids", _ids),
        "max_tokens": ("max_tokens", lambda key, value: _whole(key, value, least=1)),
        "reference": ("reference", _reference),
    }
    for key, (field, read) in readers.items():
        if key in fields:
            taken[field] = read(key, fields[key])
    return Prompt(**taken)


def _object(line: bytes) -> dict[str, Any]:
    """The JSON object of a line, read strictly: no NaN, and no key twice."""
    if len(line) > _MAX_LINE:
        raise _LineError(f"the line has {len(line)} bytes, more than the {_MAX_LINE} allowed; cut it down")
    try:
        found = json.loads(line.decode(), parse_constant=_refuse_constant, object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        raise _LineError(f"it is not UTF-8 text (byte {error.start} of the line)") from None
    except json.JSONDecodeError as error:
        raise _LineError(f"it is not JSON ({error.msg}, column {error.colno})") from None
    except RecursionError:
        raise _LineError("it is nested too deeply") from None
    except ValueError:  # Python's bound on the digits of a whole number
        raise _LineError("a number in it has too many digits") from None
    if not isinstance(found, dict):
        raise _LineError('it is no JSON object; write {"prompt": "..."}')
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise _LineError(f"{name} is no number of JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _LineError(f"the key {_shown(key)} is there twice")
        found[key] = value
    return found


def _check_keys(found: dict[str, Any], known: Sequence[str], where: str = "") -> None:
    for key in found:
        if key not in known:
            near = difflib.get_close_matches(key[:_SHOWN].lower(), known, n=1)
            hint = f"the nearest known one is {near[0]}" if near else f"known are {', '.join(known)}"
            raise _LineError(f"unknown key {_shown(key)}{where}; {hint}")


def _text(what: str, value: Any, *, empty: bool = False) -> str:
    if not isinstance(value, str):
        raise _LineError(f"{what} must be text, not {_shown(value)}")
    if not (value or empty):
        raise _LineError(f"{what} is empty; give at least one character")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _LineError(f"{what} holds half of a surrogate pair, which is no character") from None
    return value


def _reference(what: str, value: Any) -> str:
    text = _text(what, value)
    if not text.strip():  # it would match an answer that says nothing
        raise _LineError(f"{what} is blank; leave it out")
    return text


def _whole(what: str, value: Any, *, least: int) -> int:
    if type(value) is not int:  # not isinstance: a bool is an int
        raise _LineError(f"{what} must be a whole number, not {_shown(value)}")
    if not least <= value <= _MAX_INT:
        raise _LineError(f"{what} must be {least} to {_MAX_INT}, not {_shown(value)}")
    return value


def _list(what: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise _LineError(f"{what} must be a list, not {_shown(value)}")
    if not value:
        raise _LineError(f"{what} is empty; give at least one")
    return value


def _ids(what: str, value: Any) -> tuple[int, ...]:
    return tuple(_whole(f"{what}[{i}]", token, least=0) for i, token in enumerate(_list(what, value)))


def _messages(what: str, value: Any) -> tuple[Message, ...]:
    return tuple(_message(f"{what}[{i}]", message) for i, message in enumerate(_list(what, value)))


def _message(what: str, value: Any) -> Message:
    if not isinstance(value, dict):
        raise _LineError(f"{what} must be an object with role and content, not {_shown(value)}")
    _check_keys(value, _MESSAGE_KEYS, f" in {what}")
    for key in _MESSAGE_KEYS:
        if key not in value:
            raise _LineError(f"{what} has no {key}")
    content = _text(f"content of {what}", value["content"], empty=True)  # an empty system message is meant so
    return {"role": _text(f"role of {what}", value["role"]), "content": content}


def _shown(value: Any) -> str:
    """A value in a message: as JSON, in ASCII, cut short."""
    if isinstance(value, list | dict):  # it may be nested too deeply to be written
        return "a list" if isinstance(value, list) else "an object"
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
