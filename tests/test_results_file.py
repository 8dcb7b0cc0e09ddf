"""results.jsonl: what a finished record survives, and what is never overwritten."""

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sharpi_jax import evaluation_files
from sharpi_jax.errors import OptionError
from sharpi_jax.evaluation_files import open_results

OPTIONS = {"p_min": [1.0, 0.5], "model": "sha:é", "K": 3, "none": None, "nested": {"b": 1, "a": [2]}}
RECORDS = [{"id": "a\n", "ids": [1, 2], "x": 0.1}, {"id": "é", "nested": {"a": None}}, {"id": "c"}]


def write(path, records=RECORDS, options=OPTIONS):
    with open_results(path, options) as results:
        for record in records[len(results.done) :]:
            results.append(record)
    return path.read_bytes()


def test_records_come_back_in_order(tmp_path):
    path = tmp_path / "new" / "folder" / "results.jsonl"
    data = write(path)
    lines = [json.loads(line) for line in data.splitlines()]
    assert lines[0]["options"] == OPTIONS
    assert lines[1:] == RECORDS
    assert data.isascii()
    assert data.count(b"\n") == 4
    with open_results(str(path), dict(reversed(OPTIONS.items()))) as results:  # the order of options means nothing
        assert results.done == RECORDS
    assert path.read_bytes() == data


def test_each_record_is_there_when_append_returns(tmp_path):
    path = tmp_path / "r.jsonl"
    with open_results(path, OPTIONS) as results:
        for count, record in enumerate(RECORDS, start=1):
            results.append(record)
            assert len(path.read_bytes().splitlines()) == 1 + count


def test_a_record_is_one_write_and_then_one_fsync(tmp_path, monkeypatch):
    calls = []
    for name in ("write", "fsync"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, name=name, real=real: calls.append(name) or real(*a))
    with open_results(tmp_path / "r.jsonl", OPTIONS) as results:
        calls.clear()
        results.append({"text": "x" * 1_000_000})
        assert calls == ["write", "fsync"]


with tempfile.TemporaryDirectory() as _folder:
    WHOLE = write(Path(_folder) / "r.jsonl")


def test_cut_at_any_byte_it_goes_on_to_the_same_end(tmp_path, monkeypatch):
    """All of them, in the header too: what is left are the whole lines, and nothing of the torn one."""
    monkeypatch.setattr(os, "fsync", lambda _: None)  # it is slow, and what it is for no test can see
    path = tmp_path / "r.jsonl"
    for length in range(len(WHOLE) + 1):
        path.write_bytes(WHOLE[:length])
        with open_results(path, OPTIONS) as results:
            assert results.done == RECORDS[: max(0, WHOLE[:length].count(b"\n") - 1)]
        assert path.read_bytes() == WHOLE[: max(WHOLE.rfind(b"\n", 0, length), WHOLE.find(b"\n")) + 1]
        assert write(path) == WHOLE


VALUES = st.recursive(st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False), st.lists)
FINITE = VALUES.filter(lambda v: "Infinity" not in json.dumps(v))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.dictionaries(st.text(), FINITE, max_size=3), max_size=4), st.data())
def test_whatever_the_records_cut_anywhere_they_are_a_beginning(records, data):
    with tempfile.TemporaryDirectory() as folder, mock.patch("os.fsync"):
        path = Path(folder) / "r.jsonl"
        whole = write(path, records)
        path.write_bytes(whole[: data.draw(st.integers(0, len(whole)))])
        with open_results(path, OPTIONS) as results:
            assert results.done == records[: len(results.done)]
        assert write(path, records) == whole


def test_a_torn_line_of_zeros_is_dropped(tmp_path):
    """As some file systems leave it when the power goes."""
    path = tmp_path / "r.jsonl"
    path.write_bytes(WHOLE + b"\0" * 512)
    assert write(path) == WHOLE


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"K": 4}, "(K was 3 and is 4)"),
        ({"K": 3.0}, "(K was 3 and is 3.0)"),
        ({"extra": "x"}, '(extra was not there and is "x")'),
        ({"p_min": [1.0], "model": "b"}, '(model was "sha:\\u00e9" and is "b"; p_min was [1.0, 0.5] and is [1.0])'),
        ({"nested": {"a": [2], "b": 2}}, 'nested was {"a": [2], "b": 1} and is {"a": [2], "b": 2}'),
        ({"model": "x" * 1000}, 'is "' + "x" * 39 + "...)"),
    ],
)
def test_other_options_are_named(tmp_path, changed, said):
    path = tmp_path / "r.jsonl"
    write(path)
    with pytest.raises(OptionError) as error:
        open_results(path, OPTIONS | changed)
    assert said in str(error.value)
    assert "another report_dir" in str(error.value)
    assert "\n" not in str(error.value)
    assert path.read_bytes() == WHOLE


def test_an_option_that_is_gone_and_another_version_are_named(tmp_path, monkeypatch):
    path = tmp_path / "r.jsonl"
    write(path)
    with pytest.raises(OptionError, match=r"\(K was 3 and is not there\)"):
        open_results(path, {key: value for key, value in OPTIONS.items() if key != "K"})
    monkeypatch.setattr(evaluation_files, "__version__", "9.9")
    with pytest.raises(OptionError, match=r'\(sharpi_jax.version was "[\d.]+" and is "9.9"\)'):
        open_results(path, OPTIONS)
    assert path.read_bytes() == WHOLE


HEADER, BODY = WHOLE.split(b"\n", 1)
FOREIGN = {
    "text": b"id,text\n1,a\n",
    "no newline": b"notes",
    "json": b'{"a": 1}\n{"b": 2}\n',
    "list": b"[1]\n",
    "bytes": bytes(range(256)),
    "blank": b"\n",
    "deep": b"[" * 100_000 + b"\n",
    "header of a newer kind": HEADER.replace(b'results": 1', b'results": 2') + b"\n" + BODY,
    "header with a wrong hash": HEADER.replace(b'"hash": "', b'"hash": "0') + b"\n" + BODY,
    "header without options": b'{"sharpi_jax_results": 1}\n',
    "crlf": WHOLE.replace(b"\n", b"\r\n"),
    "another's torn header": HEADER.replace(b'"K": 3', b'"K": 4'),
}


@pytest.mark.parametrize("data", FOREIGN.values(), ids=FOREIGN)
def test_what_is_not_ours_is_refused_and_left(tmp_path, data):
    path = tmp_path / "r.jsonl"
    path.write_bytes(data)
    with pytest.raises(OptionError, match="give another report_dir"):
        open_results(path, OPTIONS)
    assert path.read_bytes() == data


def test_a_header_of_a_later_kind_is_not_called_damaged(tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_bytes(FOREIGN["header of a newer kind"])
    with pytest.raises(OptionError, match="a header that this version cannot read"):
        open_results(path, OPTIONS)


@pytest.mark.parametrize("line", [b"", b"{", b"[1]", b"\xff", b"\0\0"])
def test_a_damaged_line_is_named_and_left(tmp_path, line):
    lines = WHOLE.split(b"\n")
    path = tmp_path / "r.jsonl"
    data = b"\n".join([*lines[:2], line, *lines[2:]])
    path.write_bytes(data)
    with pytest.raises(OptionError, match=r"^line 3 of .* is damaged; remove that line"):
        open_results(path, OPTIONS)
    assert path.read_bytes() == data


def test_what_cannot_be_written(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_text("x")
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/null")):
        with pytest.raises(OptionError, match="is no regular file"):
            open_results(path, OPTIONS)
    for path in (tmp_path / "file" / "r.jsonl", tmp_path / "a\0b", tmp_path / ("n" * 300)):
        with pytest.raises(OptionError, match=r"^cannot write "):
            open_results(path, OPTIONS)


def test_two_runs_cannot_share_a_file(tmp_path):
    path = tmp_path / "r.jsonl"
    with open_results(path, OPTIONS), pytest.raises(OptionError, match="another run is writing to"):
        open_results(path, OPTIONS)
    open_results(path, OPTIONS).close()


def test_what_json_cannot_hold_is_refused_before_it_is_written(tmp_path):
    path = tmp_path / "r.jsonl"
    with pytest.raises(ValueError):
        open_results(path, {"x": float("nan")})
    with open_results(path, OPTIONS) as results:
        for value in (float("nan"), float("inf"), object()):
            with pytest.raises((ValueError, TypeError)):
                results.append({"x": value})
        for record in RECORDS:
            results.append(record)
    assert path.read_bytes() == WHOLE


def test_a_full_disk_is_told_and_leaves_no_part(tmp_path):
    """A limit on the size of files does what a full disk does: it takes what fits, then fails."""
    path = tmp_path / "r.jsonl"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with open_results(path, OPTIONS) as results:
        results.append(RECORDS[0])
        before = path.read_bytes()
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, hard))
        try:
            with pytest.raises(OptionError, match=r"^cannot write .*: File too large"):
                results.append(RECORDS[1])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert path.read_bytes() == before
        for record in RECORDS[1:]:  # space is there again
            results.append(record)
    assert path.read_bytes() == WHOLE


WORKER = """
import sys
from sharpi_jax.evaluation_files import open_results
with open_results(sys.argv[1], {"K": 3}) as results:
    for i in range(len(results.done), int(sys.argv[2])):
        results.append({"id": i, "text": "x" * (i * 7919 % 200_000)})
        print(i, flush=True)
"""


def test_killed_again_and_again_it_ends_as_if_never_killed(tmp_path):
    total = 60

    def start(path):
        return subprocess.Popen([sys.executable, "-c", WORKER, str(path), str(total)], stdout=subprocess.PIPE)

    path, reached = tmp_path / "killed.jsonl", 0
    for wait in (5, 24):
        with start(path) as process:
            told = [int(process.stdout.readline()) for _ in range(wait - reached)]
            time.sleep(0.0007 * wait)
            process.send_signal(signal.SIGKILL)
            told += [int(line) for line in process.stdout.read().splitlines()]
        assert process.returncode == -signal.SIGKILL
        assert told[0] == reached  # it went on where the last one was
        with open_results(path, {"K": 3}) as results:
            assert [r["id"] for r in results.done] == list(range(len(results.done)))
            assert len(results.done) > told[-1]  # what append has returned from is there
            reached = len(results.done)
    path.write_bytes(path.read_bytes()[:-1000])  # and as if in the middle of a write
    with start(path) as process:
        assert int(process.stdout.readline()) == reached - 1
        process.stdout.read()
    assert process.returncode == 0
    whole = [{"id": i, "text": "x" * (i * 7919 % 200_000)} for i in range(total)]
    assert path.read_bytes() == write(tmp_path / "whole.jsonl", whole, {"K": 3})
