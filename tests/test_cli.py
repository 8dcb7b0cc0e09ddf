"""The command line as a user meets it. Expected ids and counts are llama.cpp's own, from the fixture's files."""

import io
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fixtures import fixture

from sharpi_jax.cli.main import main

CapSys = pytest.CaptureFixture[str]
CONFIGS = Path(__file__).parent.parent / "configs"


@pytest.fixture(scope="module")
def spec(data_dir: Path) -> dict[str, Any]:
    """llama.cpp's tokens and counts for the fixture's prompt."""
    with open(data_dir / "qwen35-tiny.spec.json") as file:
        return dict(json.load(file))


@pytest.fixture(scope="module")
def base(data_dir: Path, spec: dict[str, Any]) -> list[str]:
    """The model and the prompt by ids; 63 tokens is where our counts and llama.cpp's for 64 must agree."""
    ids = ",".join(map(str, spec["prompt_ids"]))
    return [f"--model={data_dir / 'qwen35-tiny-f32.gguf'}", f"--prompt_ids={ids}", "--max_tokens=63"]


def program(*argv: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """The program as a process of its own, with the test run's compilation cache."""
    options = {"capture_output": True, "timeout": 300, "encoding": "utf-8", **options}
    return subprocess.run([sys.executable, "-m", "sharpi_jax", *map(str, argv)], check=False, **options)


def started(*argv: str, **options: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "sharpi_jax", *argv], **options)


def one_line(err: str) -> str:
    assert err.startswith("sharpi-jax: error: ")
    assert err.count("\n") == 1
    assert err.endswith("\n")
    assert "Traceback" not in err
    return err


# --- whole runs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("flag", "kept"), [("--compile_cache", True), ("--no_compile_cache", False)])
def test_compiled_programs_are_kept_unless_told_not_to(flag: str, kept: bool, tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")} | {"XDG_CACHE_HOME": str(tmp_path)}
    argv = [f"--model={fixture('qwen35-tiny-nomtp-f16')}", "--prompt=Why does", "--max_tokens=2", flag]
    assert program(*argv, env=environment | {"JAX_PLATFORMS": "cpu"}).returncode == 0
    assert any(path.is_file() for path in tmp_path.glob("sharpi_jax/xla-*/*")) == kept


def test_greedy_run(base: list[str], spec: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    done = program(*base, "--spec-draft-n-max", "3", f"--output_json={path}")
    assert done.returncode == 0, done.stderr
    expected = spec["spec_f32kv"]["n3"]
    document = json.loads(path.read_text())
    assert set(document) == {"prompt_ids", "output_ids", "text", "finish_reason", "options", "stats"}
    assert document["prompt_ids"] == spec["prompt_ids"]
    assert document["output_ids"] == expected["tokens"][:63]
    assert spec["greedy_text"].startswith(document["text"])
    assert done.stdout == document["text"] + "\n"
    assert document["finish_reason"] == "length"
    stats = document["stats"]
    assert (stats["drafted"], stats["accepted"]) == (expected["draft_n"], expected["draft_n_accepted"])
    assert stats["accepted_argmax"] == stats["accepted"]
    assert sum(stats["accepted_per_position"]) == stats["accepted"]
    assert set(stats) == {
        *("steps", "drafted", "accepted", "accepted_argmax", "accepted_p_min", "drafted_per_position"),
        *("accepted_per_position", "acceptance_rate", "mean_accepted_length"),
        *("prefill_tokens_per_s", "decode_tokens_per_s", "compile_s"),
    }
    options = document["options"]
    assert options["model"].endswith("qwen35-tiny-f32.gguf")
    assert (options["spec_type"], options["spec_draft_n_max"], options["spec_draft_p_min"]) == ("auto", 3, 1.0)
    assert options["drafting"] is True
    assert (options["spec_draft_vocab"], options["draft_vocab"]) == ("auto", 512)
    assert options["ctx_size"] >= 42 + 63
    assert "MTP: drafting up to 3 tokens per step" in done.stderr
    assert "accepted: 38/74 (51.4%), 38 by argmax, 0 by p_min" in done.stderr
    assert "finish:   length" in done.stderr
    assert not any(char < " " and char != "\n" for char in done.stderr)


def test_lossy_run_from_a_pipe(data_dir: Path, spec: dict[str, Any]) -> None:
    argv = [f"--model={data_dir / 'qwen35-tiny-f32.gguf'}", f"--flagfile={CONFIGS / 'lossy.cfg'}", "-n", "63"]
    done = program(*argv, "--spec_draft_p_min=0.05", "--output_json=-", input=spec["prompt_text"] + "\n")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)  # nothing but the document
    assert document["prompt_ids"] == spec["prompt_ids"]
    assert "--spec_draft_p_min=0.05 is lossy" in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("[mtp] ")]
    stats = document["stats"]
    assert len(lines) == len(document["steps"]) == stats["steps"]
    assert sum(line.count(" ACCEPT") for line in lines) == stats["accepted"]
    assert sum(line.count(" ACCEPT(p_min)") for line in lines) == stats["accepted_p_min"] > 0
    by_p_min = [
        step["probabilities"][index]
        for step in document["steps"]
        for index in range(step["accepted"])
        if not step["argmax"][index]
    ]
    assert len(by_p_min) == stats["accepted_p_min"]
    assert min(by_p_min) >= np.float32(0.05)
    assert max(by_p_min) <= 0.5


def test_threads_are_those_asked_for(base: list[str]) -> None:
    script = (
        "import sys, pathlib; from sharpi_jax.cli.main import main; assert main(sys.argv[1:]) == 0;"
        "names = [p.read_text() for p in pathlib.Path('/proc/self/task').glob('*/comm')];"
        "print('pool', sum('XLAEigen' in name for name in names))"
    )
    argv = [*base, "--max_tokens=1", "--threads=5"]
    done = subprocess.run([sys.executable, "-c", script, *argv], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("pool 5\n")


def test_a_platform_that_is_not_there(base: list[str]) -> None:
    done = program(*base, "--platform=tpu")
    assert done.returncode == 1
    assert "--platform=tpu: JAX finds no TPU here" in one_line(done.stderr)
    assert "sharpi-jax[tpu]" in done.stderr
    assert done.stdout == ""


def test_interrupted(base: list[str]) -> None:
    with started(*base, "--max_tokens=4000", stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.read(1)  # the text has begun
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.endswith(b"\n\n")
    assert b"Traceback" not in err
    assert b"finish:" not in err


def test_reader_goes_away(base: list[str]) -> None:
    with started(*base, "--max_tokens=4000", stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        err = process.stderr.read()
    assert process.returncode == 1
    assert err.startswith(b"MTP: drafting")
    assert err.count(b"\n") == 1  # the notice alone: quiet


def test_conversation_on_a_terminal(data_dir: Path) -> None:
    ours, theirs = pty.openpty()
    argv = ["--chat", f"--model={data_dir / 'qwen35-tiny-f32.gguf'}", "--max_tokens=8"]
    typed = [b"Why does the forest wait?\n", b"\n", b"And the river?\n", b"\x04"]
    out = b""
    with started(*argv, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE) as process:
        os.close(theirs)
        try:
            while piece := os.read(ours, 4096):
                out += piece
                if typed and out.endswith(b"> "):
                    os.write(ours, typed.pop(0))
        except OSError:  # the other end is closed
            pass
        assert process.stderr is not None
        err = process.stderr.read()
    os.close(ours)
    assert process.returncode == 0, err
    assert not typed
    assert err.count(b" tokens/s, accepted ") == 2


# --- in this process -------------------------------------------------------------------------------------------


def test_without_mtp(base: list[str], spec: dict[str, Any], capsys: CapSys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARPI_DISABLE_MTP", "1")
    assert main([*base, "--output-json=-"]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert document["output_ids"] == spec["spec_f32kv"]["n0"]["tokens"][:63]
    assert (document["stats"]["drafted"], document["stats"]["acceptance_rate"]) == (0, 0)
    assert document["options"]["spec_type"] == "none"
    assert "MTP: off (--spec_type=none)" in err
    assert "accepted" not in err


def test_a_file_without_a_head(capsys: CapSys) -> None:
    argv = [f"--model={fixture('qwen35-tiny-nomtp-f16')}", "--prompt=Why does", "--max_tokens=2"]
    assert main(argv) == 0
    assert "MTP: off, the file has no MTP head" in capsys.readouterr().err
    assert main([*argv, "--spec_type=mtp"]) == 1
    out, err = capsys.readouterr()
    assert "no MTP head" in one_line(err)
    assert out == ""


def test_prompt_file_and_prompt_are_one(data_dir: Path, spec: dict[str, Any], tmp_path: Path, capsys: CapSys) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text(spec["prompt_text"])
    model = f"--model={data_dir / 'qwen35-tiny-f32.gguf'}"
    for prompt in (["--prompt", spec["prompt_text"]], ["--prompt-file", str(path)]):
        assert main([model, *prompt, "--max_tokens=4", "--output_json=-"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert document["prompt_ids"] == spec["prompt_ids"]
        assert document["output_ids"] == spec["spec_f32kv"]["n0"]["tokens"][:4]


@pytest.mark.parametrize("name", ["greedy", "baseline", "f16_cache", "fixture"])
def test_exact_configs(
    name: str, spec: dict[str, Any], capsys: CapSys, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(CONFIGS.parent)
    assert main(["--flagfile=configs/fixture.cfg", f"--flagfile=configs/{name}.cfg", "--output_json=-"]) == 0
    document = json.loads(capsys.readouterr().out)
    cache = "spec_default_f16kv" if name == "f16_cache" else "spec_f32kv"
    assert document["output_ids"] == spec[cache]["n0"]["tokens"]
    assert document["text"] == spec["greedy_text"]


def test_chat_renders_the_template(data_dir: Path, capsys: CapSys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Why?\n")))
    argv = [f"--flagfile={CONFIGS / 'chat.cfg'}", f"--model={data_dir / 'qwen35-tiny-f32.gguf'}", "-n", "2"]
    assert main([*argv, "--system_prompt=Be brief.", "--output_json=-"]) == 0
    document = json.loads(capsys.readouterr().out)
    from sharpi_jax.checkpoint.gguf_file import open_gguf
    from sharpi_jax.checkpoint.tokenizer import Tokenizer

    text = Tokenizer.from_metadata(open_gguf(data_dir / "qwen35-tiny-f32.gguf").metadata).decode(document["prompt_ids"])
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_stop_text_ends_the_run(base: list[str], spec: dict[str, Any], capsys: CapSys) -> None:
    assert main([*base, "--stop=kitchen"]) == 0
    out, err = capsys.readouterr()
    assert out == spec["greedy_text"].partition("kitchen")[0] + "\n"
    assert "finish:   stop" in err


# --- faults -----------------------------------------------------------------------------------------------------


def _typed(data: bytes, tensor: bytes, type_id: int) -> bytes:
    """The file with another type at a tensor of two dimensions."""
    at = data.index(tensor) + len(tensor) + 4 + 2 * 8
    return data[:at] + type_id.to_bytes(4, "little") + data[at + 4 :]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda data: b"", ["is empty"]),
        (lambda data: b"a text that is no model", ["not a GGUF file"]),
        (lambda data: data[:100], ["bytes left", "download it again"]),
        (lambda data: data[:-1000], ["cut short", "1000"]),
        (lambda data: data.replace(b"qwen35", b"qwen99", 1), ["architecture", "qwen99"]),
        (lambda data: _typed(data, b"blk.0.ffn_gate.weight", 24), ["blk.0.ffn_gate.weight", "I8"]),
        (lambda data: _typed(data, b"blk.0.ffn_gate.weight", 99), ["blk.0.ffn_gate.weight", "99"]),
        (lambda data: data.replace(b"tokenizer.ggml.model", b"tokenizer.ggml.other"), ["no tokenizer"]),
    ],
    ids=["empty", "text", "short-header", "short-data", "architecture", "type", "unknown-type", "no-tokenizer"],
)
def test_bad_files(
    damage: Callable[[bytes], bytes], words: list[str], data_dir: Path, tmp_path: Path, capsys: CapSys
) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(damage((data_dir / "qwen35-tiny-f32.gguf").read_bytes()))
    assert main([f"--model={path}", "--prompt=x"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    for word in words:
        assert word in one_line(err)


def test_bad_paths(tmp_path: Path, capsys: CapSys) -> None:
    for path, words in ((tmp_path / "absent.gguf", "does not exist"), (tmp_path, "is a folder")):
        assert main([f"--model={path}", "--prompt=x"]) == 1
        assert words in one_line(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["--prompt=a", "--prompt_file=b"], 2, "--prompt and --prompt_file"),
        (["--prompt="], 1, "the prompt is empty"),
        (["--prompt=x", "--ctx_size=9999999"], 1, "at most 4096"),
        (["--prompt_ids=1,2,3", "--ctx_size=2"], 1, "the prompt has 3 tokens"),
        (["--prompt_ids=1,512"], 1, "512"),
        (["--prompt_file=absent.txt"], 1, "cannot read the prompt file 'absent.txt': No such file"),
        (
            ["--prompt=x", "--output_json=absent/x.json"],
            1,
            "--output_json=absent/x.json cannot be written: No such file",
        ),
        (["--prompt=x", "--output_json=."], 1, "--output_json=. cannot be written: Is a directory"),
    ],
)
def test_bad_runs(
    argv: list[str],
    code: int,
    words: str,
    data_dir: Path,
    tmp_path: Path,
    capsys: CapSys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([f"--model={data_dir / 'qwen35-tiny-f32.gguf'}", *argv]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert words in one_line(err)
    assert not list(tmp_path.iterdir())


def test_bad_prompt_files(data_dir: Path, tmp_path: Path, capsys: CapSys, monkeypatch: pytest.MonkeyPatch) -> None:
    model = f"--model={data_dir / 'qwen35-tiny-f32.gguf'}"
    path = tmp_path / "prompt.txt"
    for content, words in ((b"", "the prompt is empty"), (b"\n", "the prompt is empty"), (b"a\xff", "not UTF-8")):
        path.write_bytes(content)
        assert main([model, f"--prompt_file={path}"]) == 1
        assert words in one_line(capsys.readouterr().err)
        for flags in ([], ["--prompt_file=-"]):
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
            assert main([model, *flags]) == 1
            assert words in one_line(capsys.readouterr().err)
    monkeypatch.setattr(sys, "stdin", None)
    assert main([model]) == 2
    assert "no prompt; give --prompt" in one_line(capsys.readouterr().err)


def test_thinking_without_a_switch(data_dir: Path, capsys: CapSys, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused at once, in a conversation too: no message could change it."""
    monkeypatch.setattr(sys, "stdin", None)  # as a terminal on which nothing is typed
    for argv in (["--no_thinking", "--prompt=x"], ["--thinking"]):
        assert main([f"--model={data_dir / 'qwen35-tiny-f32.gguf'}", "--chat", *argv]) == 1
        assert "no switch for thinking" in one_line(capsys.readouterr().err)


def test_chat_without_a_template(data_dir: Path, tmp_path: Path, capsys: CapSys) -> None:
    path = tmp_path / "plain.gguf"
    data = (data_dir / "qwen35-tiny-f32.gguf").read_bytes()
    path.write_bytes(data.replace(b"tokenizer.chat_template", b"tokenizer.chat_tempest_"))
    assert main([f"--model={path}", "--chat", "--prompt=x"]) == 1
    assert "has no chat template; use --raw" in one_line(capsys.readouterr().err)


def test_a_bug_is_one_line_too(data_dir: Path, capsys: CapSys, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*args: Any, **kwargs: Any) -> None:
        raise KeyError("first\nsecond")

    monkeypatch.setattr("sharpi_jax.api.load", load)
    argv = [f"--model={data_dir / 'qwen35-tiny-f32.gguf'}", "--prompt=x"]
    assert main(argv) == 1
    assert "internal error: KeyError" in one_line(capsys.readouterr().err)
    monkeypatch.setenv("SHARPI_DEBUG", "1")
    assert main(argv) == 1
    err = capsys.readouterr().err
    assert err.startswith("Traceback")
    assert "internal error: KeyError" in err.splitlines()[-1]
