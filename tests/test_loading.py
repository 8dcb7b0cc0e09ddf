"""What loading costs: one copy of each tensor, no page of the map left behind, a header alone, a bar that waits."""

import contextlib
import io
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import models
import numpy as np
import pytest
from crafted import gguf, tensor
from gguf import GGMLQuantizationType, GGUFReader
from rewriting import rewrite

from sharpi_jax import checkpoint
from sharpi_jax.checkpoint.mapped_file import MappedFile
from sharpi_jax.cli import progress
from sharpi_jax.cli.main import main
from sharpi_jax.quant import Tiled

TINY = models.fixture("qwen35-tiny-q8_0")
MEGABYTE = 1_000_000

linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from Linux's /proc")

_MEMORY = """
import json, re, sys
def memory(field):
    return 1024 * int(re.search(field + r":\\s*(\\d+)", open("/proc/self/status").read())[1])
"""


def measured(script: str, *argv: str | Path) -> dict[str, float]:
    """Runs a script in a process of its own, and returns the numbers that it prints; memory(...) is in bytes."""
    done = subprocess.run(
        [sys.executable, "-c", _MEMORY + script, *map(str, argv)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


# --- memory -----------------------------------------------------------------------------------------------------------


def test_a_copy_is_the_files_bytes_and_its_own_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = np.random.default_rng(0).integers(0, 256, 300_000, np.uint8)
    (tmp_path / "data").write_bytes(data.tobytes())
    file = MappedFile(tmp_path / "data")
    monkeypatch.setattr("sharpi_jax.checkpoint.mapped_file._PIECE", 1000)
    for offset, nbytes in ((0, 300_000), (1, 1), (4095, 2), (999, 1001), (299_999, 1), (123, 5000)):
        copied = file.copy(offset, nbytes)
        assert copied.tobytes() == data[offset : offset + nbytes].tobytes()
        assert copied.ctypes.data % 64 == 0
        assert copied.flags.writeable  # not the map
        assert file.view(offset, nbytes).tobytes() == copied.tobytes()  # released pages come back


def test_bytes_are_compared_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(b"0123456789" * 100)
    (tmp_path / "b").write_bytes(b"xx" + b"0123456789" * 99 + b"012345678!")
    monkeypatch.setattr("sharpi_jax.checkpoint.mapped_file._PIECE", 7)
    a, b = MappedFile(tmp_path / "a"), MappedFile(tmp_path / "b")
    assert a.same_bytes(0, b, 2, 999)
    assert not a.same_bytes(0, b, 2, 1000)
    assert not a.same_bytes(1, b, 2, 5)


@linux
def test_no_more_than_a_piece_of_the_map_is_resident(tmp_path: Path) -> None:
    """300 MB of a file (sparse, so that it costs no disk) are copied: that much memory is taken, not twice that."""
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(300 * MEGABYTE)
    found = measured(
        """
from pathlib import Path
from sharpi_jax.checkpoint.mapped_file import MappedFile
file = MappedFile(Path(sys.argv[1]))
before, mapped = memory("VmRSS"), memory("RssFile")
copied = file.copy(0, file.size)
print(json.dumps({"peak": memory("VmHWM") - before, "mapped": memory("RssFile") - mapped}))
""",
        tmp_path / "sparse",
    )
    assert 290 * MEGABYTE < found["peak"] < 330 * MEGABYTE
    assert found["mapped"] < 5 * MEGABYTE


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="other devices have memory of their own")
def test_the_device_takes_over_the_one_copy_of_plain_floats_that_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: dict[int, int] = {}
    copy = MappedFile.copy

    def recorded(self: MappedFile, offset: int, nbytes: int) -> np.ndarray:
        copied = copy(self, offset, nbytes)
        copies[copied.ctypes.data] = nbytes
        return copied

    monkeypatch.setattr(MappedFile, "copy", recorded)
    read = checkpoint.read(TINY)
    weights = jax.tree.leaves(read.params, is_leaf=models.is_weight)
    plain = {id(x): x for x in jax.tree.leaves([x for x in weights if not isinstance(x, Tiled)])}.values()
    assert len(plain) > 10
    assert {array.unsafe_buffer_pointer(): array.nbytes for array in plain}.items() <= copies.items()


@linux
def test_loading_takes_hardly_more_than_the_tensors(tmp_path: Path) -> None:
    """60 MB of weights, after another file and two small tensors, so that no import and no compilation is counted."""
    ffn = {f"blk.{i}.ffn_{kind}.weight": (256, 24576) for i in range(3) for kind in ("gate", "up")}
    ffn |= {f"blk.{i}.ffn_down.weight": (24576, 256) for i in range(3)}
    rng = np.random.default_rng(0)
    add = {
        name: (rng.integers(0, 100, (rows, columns // 32 * 34), np.uint8), GGMLQuantizationType.Q8_0)
        for name, (columns, rows) in ffn.items()
    }
    meta = {"feed_forward_length": 24576}
    path = rewrite(tmp_path / "large.gguf", "qwen35-tiny256-q8_0", meta=meta, add=add)
    tensors = sum(int(t.n_bytes) for t in GGUFReader(path).tensors)
    assert tensors > 60 * MEGABYTE
    found = measured(
        """
import numpy as np
from sharpi_jax import checkpoint, quant
checkpoint.read(sys.argv[1])
for columns in (256, 24576):
    quant.pack(np.zeros((16, columns // 32 * 34), np.uint8), "Q8_0", "warm", quant.choose_engine()[0])
before, mapped = memory("VmRSS"), memory("RssFile")
read = checkpoint.read(sys.argv[2])
print(json.dumps({"peak": memory("VmHWM") - before, "mapped": memory("RssFile") - mapped}))
""",
        TINY,
        path,
    )
    assert 0.9 * tensors < found["peak"] < 1.25 * tensors
    assert found["mapped"] < 5 * MEGABYTE


@linux
def test_inspect_reads_the_header_alone(tmp_path: Path) -> None:
    rows = 100_000
    header = gguf([], [tensor(f"blk.{i}.ffn_up.weight", [10_000, rows], 0, 4 * 10_000 * rows * i) for i in range(8)])
    path = tmp_path / "large.gguf"
    try:
        with path.open("wb") as file:
            file.write(header)
            file.truncate(len(header) + 8 * 4 * 10_000 * rows)
    except OSError:
        pytest.skip("this file system holds no sparse file of 32 GB")
    assert path.stat().st_size > 32_000 * MEGABYTE
    if path.stat().st_blocks * 512 > 100 * MEGABYTE:
        pytest.skip("this file system makes no sparse files")
    found = measured(
        """
import time
from sharpi_jax.cli.main import main
from sharpi_jax.quant import Tiled
main(["inspect", sys.argv[1]])
before, began = memory("VmHWM"), time.perf_counter()
assert main(["inspect", sys.argv[2], "--tensors"]) == 0
seconds = time.perf_counter() - began
print(json.dumps({"grown": memory("VmHWM") - before, "seconds": seconds}))
""",
        TINY,
        path,
    )
    assert found["grown"] < 5 * MEGABYTE
    assert found["seconds"] < 1.0


# --- progress ---------------------------------------------------------------------------------------------------------


def test_a_library_caller_may_watch() -> None:
    seen: list[tuple[int, int]] = []
    checkpoint.read(TINY, on_progress=lambda done, total: seen.append((done, total)))
    sizes = [int(t.n_bytes) for t in GGUFReader(TINY).tensors]
    assert [total for _, total in seen] == [sum(sizes)] * len(sizes)
    steps = np.diff([0, *(done for done, _ in seen)])
    assert sorted(steps.tolist()) == sorted(sizes)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "delay", "shown"), [(Terminal, 0.2, True), (Terminal, 60, False), (io.StringIO, 0.2, False)]
)
def test_the_bar_waits_and_wants_a_terminal(
    monkeypatch: pytest.MonkeyPatch, stream: Callable[[], io.StringIO], delay: float, shown: bool
) -> None:
    errors = stream()
    monkeypatch.setattr(sys, "stderr", errors)
    monkeypatch.setattr(progress, "DELAY_S", delay)
    with progress.loading_bar() as show:
        show(250_000_000, 1_000_000_000)
        assert errors.getvalue() == ""  # too early
        time.sleep(0.3)
        show(500_000_000, 1_000_000_000)
        assert ("loading:  50%" in errors.getvalue()) == shown
        assert ("500M/1.00G" in errors.getvalue()) == shown
    assert (errors.getvalue() == "") == (not shown)
    assert re.sub(r".*\r", "", errors.getvalue()).strip() == ""  # and it is gone


def test_a_run_moves_the_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert progress.DELAY_S == 1
    seen: list[tuple[int, int]] = []

    @contextlib.contextmanager
    def bar() -> Iterator[Callable[[int, int], None]]:
        yield lambda done, total: seen.append((done, total))

    monkeypatch.setattr("sharpi_jax.cli.model_file.loading_bar", bar)
    assert main([f"--model={TINY}", "--prompt_ids=99999"]) == 1  # refused once the model is loaded: nothing compiles
    assert "token id 99999 is outside the vocabulary" in capsys.readouterr().err
    assert seen[-1][0] == seen[-1][1] > 0
