"""README, WORKSPACE and the flagfiles say what is true."""

import re
import runpy
import shlex
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.S)


def commands(*kinds):
    """Command lines of the README's blocks of some kinds, comments and continuation text dropped."""
    for kind, body in BLOCKS:
        if kind in kinds:
            for line in body.splitlines():
                if kind == "sh" or line.startswith("$ "):
                    yield line.removeprefix("$ ").split(" #")[0].strip()


def test_the_test_command_is_what_ci_runs():
    line = next(c for c in commands("sh") if "[test]" in c)
    ci = (ROOT / ".ci" / "run").read_text()
    assert all(part in ci for part in line.split(" && ")[1:]), line


@pytest.mark.parametrize("line", [c for c in commands("sh", "console") if c.startswith("sharpi-jax")])
def test_every_command_is_understood(line):
    """Every flag exists and every value is in range: only the model file is not there."""
    from sharpi_jax.cli.main import main

    argv = [a.replace("FILE.gguf", "no-such-file.gguf") for a in shlex.split(line)[1:]]
    if "--help" in argv or "FILE.gguf" not in line:  # what needs no file of the user's is run by a test of its own
        return
    assert main(argv) == 1


def test_the_first_example_prints_what_the_readme_shows(capfd, monkeypatch):
    from sharpi_jax.cli.main import main

    monkeypatch.setattr("sys.stdin", None)  # nobody pipes a prompt in
    shown = next(body for kind, body in BLOCKS if kind == "console" and "$ sharpi-jax --max" in body).splitlines()
    assert main(shlex.split(shown[0].removeprefix("$ sharpi-jax"))) == 0
    out, err = capfd.readouterr()
    text = len(out.splitlines())
    assert out.splitlines() == shown[3 : 3 + text]
    timed = re.compile(r"[\d.]+ (s\b|tokens/s|times)")
    printed = [timed.sub("", line) for line in err.splitlines()]
    assert printed == [timed.sub("", line) for line in [*shown[1:3], *shown[3 + text :]]]


def test_the_traced_example_prints_what_the_readme_shows(capfd, monkeypatch):
    from sharpi_jax.cli.main import main

    monkeypatch.chdir(ROOT)
    shown = next(body for kind, body in BLOCKS if kind == "console" and "--trace_mtp" in body).splitlines()
    assert main(shlex.split(shown[0].removeprefix("$ sharpi-jax"))) == 0
    err = "\n".join(capfd.readouterr().err.splitlines()[: len(shown) - 2])
    shown = "\n".join(shown[1:-1])
    figure = re.compile(r"p=(0\.\d+)")
    assert figure.sub("p=", err) == figure.sub("p=", shown)
    # One of them lies within 1e-6 of where its last digit turns, and processors round differently.
    differences = [float(a) - float(b) for a, b in zip(figure.findall(err), figure.findall(shown), strict=True)]
    assert max(map(abs, differences)) < 1.5e-4


def test_the_python_example_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    script = tmp_path / "example.py"
    script.write_text(next(body for kind, body in BLOCKS if kind == "python" and "import sharpi_jax" in body))
    names = runpy.run_path(str(script))
    assert names["result"].text in capsys.readouterr().out
    assert names["scores"].mtp_logits.shape == names["scores"].logits.shape


def test_files_that_the_documents_name_exist():
    text = README + (ROOT / "WORKSPACE.md").read_text()
    for path in set(re.findall(r"`((?:configs|tests|\.ci|sharpi_jax)/[\w./-]+)`", text)):
        assert (ROOT / path).exists(), path
    for room, files in re.findall(r"^\| `(\w+)/` \| (.*) \|$", (ROOT / "WORKSPACE.md").read_text(), re.M):
        for name in re.findall(r"`(\w+)`", re.sub(r"`[A-Z]\w*`|`while_loop`|`read\(path\)`|`inspect`", "", files)):
            assert (ROOT / "sharpi_jax" / room / f"{name}.py").exists(), f"{room}/{name}"


def test_no_tracked_file_is_large():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    files = [ROOT / f for f in listed.split("\0") if f]
    assert sum(f.stat().st_size for f in files if f.is_file() and "tests/data" in str(f)) < 40e6
