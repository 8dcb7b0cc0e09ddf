"""The command line's flags: every spelling, every refusal and its exit status. Nothing here starts JAX."""

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sharpi_jax.cli import inspect_file, run_flags
from sharpi_jax.cli.main import main
from sharpi_jax.cli.run_flags import RunFlags
from sharpi_jax.cli.usage import UsageError
from sharpi_jax.decode.options import DecodeOptions

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.cfg"))


def flags(*argv: str, **environ: str) -> RunFlags:
    """The flags of `run`, with a model and a prompt where none is given."""
    parsed = run_flags.parse_run(["--model=m.gguf", *argv])
    return run_flags.check_run(parsed, environ)


def refusal(*argv: str, **environ: str) -> str:
    with pytest.raises(UsageError) as caught:
        flags(*argv, **environ)
    return str(caught.value)


def test_defaults() -> None:
    chosen = flags("--prompt=x")
    options = chosen.options
    assert (options.max_tokens, options.ctx_size, options.ignore_eos) == (256, None, False)
    assert (options.spec_type, options.spec_draft_n_max, options.spec_draft_p_min) == ("auto", 3, 1.0)
    assert chosen.load == {"dtype": "float32", "cache_dtype": "float16", "act_quant": "none", "engine": "auto"}
    assert (chosen.platform, chosen.threads, chosen.output_json) == (None, None, None)
    assert (chosen.chat, chosen.trace, chosen.p_min_unset, chosen.stop) == (False, False, False, ())


@pytest.mark.parametrize(
    ("argv", "expected"),
    [([], None), (["--thinking"], True), (["--no-thinking"], False), (["--no_thinking"], False)],
)
def test_thinking_is_chosen_or_left_to_the_template(argv: list[str], expected: bool | None) -> None:
    assert flags("--chat", *argv).thinking is expected


@pytest.mark.parametrize(
    "argv",
    [
        ["--spec_draft_p_min=0.1"],
        ["--spec_draft_p_min", "0.1"],
        ["--spec-draft-p-min=0.1"],
        ["--spec-draft-p-min", "0.1"],
        ["--spec-draft_p-min", "0.1"],
        ["-spec_draft_p_min=0.1"],
    ],
)
def test_dashes_are_underscores(argv: list[str]) -> None:
    assert flags(*argv).options.spec_draft_p_min == 0.1


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--ignore_eos"], True),
        (["--ignore-eos"], True),
        (["--ignore-eos=true"], True),
        (["--ignore_eos=false"], False),
        (["--noignore_eos"], False),
        (["--no_ignore_eos"], False),
        (["--no-ignore_eos"], False),
        (["--no-ignore-eos"], False),
        (["--ignore_eos", "--no-ignore-eos"], False),
        (["--no-ignore-eos", "--ignore-eos"], True),
    ],
)
def test_booleans(argv: list[str], expected: bool) -> None:
    assert flags("--ignore_eos", *argv).options.ignore_eos is expected


def test_names_from_llama_cpp() -> None:
    chosen = flags("-m", "other.gguf", "-p", "hello", "-n", "5", "-c", "99", "--draft-max", "7")
    assert (chosen.model, chosen.prompt) == ("other.gguf", "hello")
    assert (chosen.options.max_tokens, chosen.options.ctx_size, chosen.options.spec_draft_n_max) == (5, 99, 7)
    assert flags("--n-predict=6").options.max_tokens == 6
    assert flags("--n_predict", "6").options.max_tokens == 6
    assert flags("-n=6").options.max_tokens == 6
    assert flags("--spec-draft-n-max", "4").options.spec_draft_n_max == 4


@pytest.mark.parametrize(
    "text",
    ["--x-y", "--dashes-in-text", "-p", "--", "--flagfile=nothing", "--no-ignore-eos", "a-b=c-d", "-", "--prompt-file"],
)
def test_a_value_is_never_touched(text: str) -> None:
    assert flags("--prompt", text).prompt == text
    assert flags("-p", text).prompt == text
    assert flags(f"--prompt={text}").prompt == text
    assert not flags("--prompt", text).options.ignore_eos


def test_after_a_bare_double_dash_nothing_is_a_flag() -> None:
    parsed = run_flags.parse_run(["--model=m", "--", "--spec-type", "--prompt=x", "--flagfile=nothing"])
    assert parsed.positional == ("--spec-type", "--prompt=x", "--flagfile=nothing")
    assert parsed.values["prompt"] is None


def test_the_last_of_two_values_counts_and_stops_add_up() -> None:
    chosen = flags("--max_tokens=1", "-n", "2", "--stop", r"a\n", r"--stop=\t\\n\q")
    assert chosen.options.max_tokens == 2
    assert chosen.stop == ("a\n", "\t\\n\\q")


def test_a_parse_leaves_nothing_behind() -> None:
    flags("--stop=a", "--ignore_eos", "--prompt=x")
    assert flags().stop == ()
    assert flags().prompt is None


@pytest.mark.parametrize(("text", "value"), [("1", 1.0), ("0.5", 0.5), ("0.501", 0.501), ("1e-3", 0.001), (" 1 ", 1.0)])
def test_p_min_within_its_range(text: str, value: float) -> None:
    chosen = flags(f"--spec_draft_p_min={text}")
    assert chosen.options.spec_draft_p_min == value
    assert not chosen.p_min_unset


@pytest.mark.parametrize("text", ["0", "0.0", "-0.0"])
def test_p_min_zero_means_not_set(text: str) -> None:
    chosen = flags(f"--spec_draft_p_min={text}")
    assert chosen.options.spec_draft_p_min == 1
    assert chosen.p_min_unset


@pytest.mark.parametrize("text", ["nan", "NaN", "-nan", "-0.1", "1.5", "1.0000001", "inf", "-inf", "half", ""])
def test_p_min_refused(text: str) -> None:
    assert "must be a number from 0 to 1" in refusal(f"--spec_draft_p_min={text}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0", "use --spec_type=none"),
        ("17", "1 to 16, or auto"),
        ("-1", "1 to 16, or auto"),
        ("2.5", "1 to 16, or auto"),
        ("three", "1 to 16, or auto"),
    ],
)
def test_draft_length_refused(text: str, message: str) -> None:
    assert message in refusal(f"--spec_draft_n_max={text}")


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "most", "", "AUTO"])
def test_draft_vocabulary_refused(text: str) -> None:
    assert "must be an integer of at least 1, auto or full" in refusal(f"--spec_draft_vocab={text}")


@pytest.mark.parametrize(("text", "value"), [("auto", "auto"), ("full", "full"), ("1", 1), ("99999999", 99999999)])
def test_draft_vocabulary(text: str, value: int | str) -> None:
    assert flags(f"--spec_draft_vocab={text}").options.spec_draft_vocab == value
    assert flags().options.spec_draft_vocab == "auto"


def test_draft_length_bounds() -> None:
    assert [flags(f"--spec_draft_n_max={n}").options.spec_draft_n_max for n in (1, 16, "auto")] == [1, 16, "auto"]


SAMPLED = {
    "temperature": 0.7,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.05,
    "seed": 4294967295,
    "repeat_penalty": 1.1,
    "repeat_last_n": -1,
    "min_tokens": 4,
    "max_thinking_tokens": 0,
    "logprobs": 5,
    "accept_rule": "typical",
    "typical_epsilon": 0.2,
    "typical_alpha": 0.5,
    "threshold_single": 0.9,
    "threshold_acc": 0.8,
    "spec_draft_stop_p": 0.4,
    "spec_draft_stop_top_k": 10,
    "spec_draft_n_min": 2,
}


def test_sampling_flags_reach_the_options() -> None:
    found = flags(*(f"--{name}={value}" for name, value in SAMPLED.items())).options
    assert {name: getattr(found, name) for name in SAMPLED} == SAMPLED
    biases = flags("--logit_bias=15043+1.5", "--logit-bias", "7-inf", "--logit_bias=3-.5").options.logit_bias
    assert biases == ((15043, 1.5), (7, -math.inf), (3, -0.5))
    assert flags("--temp", "0.5", "-s", "9").options == DecodeOptions(temperature=0.5, seed=9)
    assert flags("--draft-min=1").options.spec_draft_n_min == 1
    assert flags().options == DecodeOptions()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--temperature=hot"], "must be a number of at least 0"),
        (["--temperature=-0.1"], "must be a number of at least 0"),
        (["--temperature=nan"], "must be a number of at least 0"),
        (["--temperature=inf"], "must be a number of at least 0"),
        (["--top_p=1.1"], "must be a number from 0 to 1"),
        (["--top_k=-1"], "must be 0 to"),
        (["--repeat_penalty=0"], "must be a number above 0"),
        (["--threshold_acc=0"], "must be a number above 0, at most 1"),
        (["--logit_bias=15043"], "must be a token id and a signed number"),
        (["--logit_bias=15043+inf"], "must be a token id and a signed number"),
        (["--logit_bias=a+1"], "must be a token id and a signed number"),
        (["--accept_rule=medusa"], "must be one of auto, greedy_p_min"),
        (["--temperature=1", "--spec_draft_p_min=0.2"], "spec_draft_p_min below 1 is a rule for greedy decoding"),
        (["--temperature=1", "--accept_rule=relaxed"], "relaxed is defined for greedy decoding alone"),
        (["--accept_rule=block"], "block draws tokens, which takes a temperature above 0"),
        (["--spec_draft_n_max=2", "--spec_draft_n_min=3"], "more than the 2 drafts"),
    ],
)
def test_sampling_flags_refused(argv: list[str], message: str) -> None:
    assert message in refusal(*argv)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--max_tokens=-1"], "must be 0 to 2147483647"),
        (["--max_tokens=9999999999"], "must be 0 to 2147483647"),
        (["--max_tokens=many"], "must be 0 to 2147483647"),
        (["--ctx_size=0"], "an integer of at least 1"),
        (["--threads=0"], "must be 1 to 1024"),
        (["--dtype=int8"], "one of float32, bfloat16"),
        (["--cache_dtype=q8_0"], "one of float32, float16, bfloat16"),
        (["--platform=rocm"], "one of cpu, gpu, tpu"),
        (["--spec_type=draft"], "one of auto, none, mtp"),
        (["--ignore_eos=perhaps"], "true or false"),
        (["--noignore_eos=true"], "does not take an argument"),
        (["--stop="], "must not be empty"),
        (["--output_json="], "needs a path"),
        (["--prompt_ids=1,x"], "'x' is none"),
        (["--prompt_ids="], "'' is none"),
        (["--prompt_ids=1,-3"], "-3 is no token id"),
        (["--prompt_ids=99999999999999999999"], "is too large"),
        (["--prompt=a", "--prompt_file=b"], "--prompt and --prompt_file were both given"),
        (["--prompt=", "--prompt_ids=1"], "--prompt and --prompt_ids were both given"),
        (["--chat", "--raw"], "--chat and --raw were both given"),
        (["--system_prompt=x"], "--system_prompt needs --chat"),
        (["--thinking"], "--thinking needs --chat"),
        (["--no_thinking"], "--no_thinking needs --chat"),
        (["--chat", "--prompt_ids=1"], "--prompt_ids needs --raw"),
        (["--prompt=\udcff"], "--prompt is not valid UTF-8"),
        (["--prompt"], "flag --prompt needs a value"),
        (["-n"], "flag -n needs a value"),
        (["--flagfile"], "flag --flagfile needs a value"),
        (["--flagfile=/nonexistent/x.cfg"], "cannot read the flagfile '/nonexistent/x.cfg': No such file"),
        (["words"], "unexpected argument 'words'"),
        (["inspect"], "must come first"),
    ],
)
def test_refusals(argv: list[str], message: str) -> None:
    text = refusal(*argv)
    assert message in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--mirostat=2"], "unknown flag --mirostat"),
        (["--mirostat", "2"], "unknown flag --mirostat"),
        (["--spec-draft-pmin=1"], "did you mean --spec_draft_p_min?"),
        (["--promt=x"], "did you mean --prompt?"),
        (["--max=4"], "did you mean --max_tokens?"),
        (["--n-predic=4"], "did you mean --n_predict?"),
        (["--no-such-flag"], "unknown flag --no-such-flag"),
        (["-t", "4"], "unknown flag -t; see --help"),
    ],
)
def test_unknown_flags(argv: list[str], message: str) -> None:
    assert message in refusal(*argv)


def test_the_environment() -> None:
    assert flags(SHARPI_TRACE_MTP="1").trace
    assert not flags(SHARPI_TRACE_MTP="0").trace
    assert flags(SHARPI_DISABLE_MTP="1").options.spec_type == "none"
    assert flags("--spec_type=auto", SHARPI_DISABLE_MTP="1").options.spec_type == "none"
    assert flags("--spec_type=mtp", SHARPI_DISABLE_MTP="0").options.spec_type == "mtp"
    assert "contradicts SHARPI_DISABLE_MTP=1" in refusal("--spec_type=mtp", SHARPI_DISABLE_MTP="1")


@pytest.fixture
def flagfile(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        path = tmp_path / "x.cfg"
        path.write_text(text)
        return str(path)

    return write


def test_flagfiles_take_the_same_spellings(flagfile: Callable[[str], str]) -> None:
    path = flagfile("# comment\n// comment\n\n--spec-draft-p-min=0.1\n--no-ignore-eos\n-n=7\n--prompt=--a-b c\n")
    for argv in (["--flagfile", path], [f"--flagfile={path}"]):
        chosen = flags("--ignore_eos", *argv)
        assert (chosen.options.spec_draft_p_min, chosen.options.max_tokens) == (0.1, 7)
        assert not chosen.options.ignore_eos
        assert chosen.prompt == "--a-b c"
    assert flags(f"--flagfile={path}", "--max_tokens=9").options.max_tokens == 9
    assert flags("--max_tokens=9", f"--flagfile={path}").options.max_tokens == 7


def test_flagfiles_nest(flagfile: Callable[[str], str], tmp_path: Path) -> None:
    inner = tmp_path / "inner.cfg"
    inner.write_text("--max-tokens=3\n")
    assert flags(f"--flagfile={flagfile(f'--flagfile={inner}')}").options.max_tokens == 3


def test_flagfiles_with_faults(flagfile: Callable[[str], str], tmp_path: Path) -> None:
    assert "unknown flag --mirostat" in refusal(f"--flagfile={flagfile('--mirostat=1')}")
    assert "--name=value" in refusal(f"--flagfile={flagfile('--prompt two words')}")
    assert "Is a directory" in refusal(f"--flagfile={tmp_path}")
    binary = tmp_path / "binary.cfg"
    binary.write_bytes(b"\xff\xfe")
    assert "not UTF-8" in refusal(f"--flagfile={binary}")


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_each_config_parses_and_says_how_to_run_it(config: Path, tmp_path: Path) -> None:
    flags(f"--flagfile={config}")
    header = [line for line in config.read_text().splitlines() if line.startswith("#")]
    assert any(line.startswith("#   sharpi-jax --flagfile=") and config.name in line for line in header) or (
        config.stem == "fixture"
    )
    broken = tmp_path / config.name
    broken.write_text(config.read_text() + "--no-such-key=1\n")
    assert "unknown flag --no-such-key" in refusal(f"--flagfile={broken}")


def test_there_are_configs() -> None:
    assert {path.stem for path in CONFIGS} >= {"greedy", "baseline", "lossy", "f16_cache", "chat"}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--model=", "--prompt=x"], "flag --model needs a path; without the flag the embedded demo model runs."),
        (["--spec_draft_p_min=nan", "--model=x"], "flag --spec_draft_p_min=nan: must be a number from 0 to 1."),
        (["decode"], "unknown subcommand 'decode'; the subcommands are run, inspect, perplexity, bench, eval."),
        (["x.gguf"], "did you mean --model=x.gguf?"),
        (["run", "x.gguf"], "unexpected argument 'x.gguf'; did you mean --model=x.gguf?"),
        (["inspect"], "inspect takes one file, not 0"),
        (["inspect", "a", "--model=b"], "inspect takes one file, not 2"),
        (["inspect", "a", "--prompt=b"], "unknown flag --prompt"),
        (["--model=a\nb", "--max_tokens=1\n2"], r"flag --max_tokens=1\n2: must be"),
    ],
)
def test_usage_errors_are_one_line_and_exit_2(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("sharpi-jax: error: ")
    assert err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["run", "--help"], ["inspect", "--help"]])
def test_help_shows_each_flag_and_default(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    out, err = capsys.readouterr()
    sections = inspect_file.SECTIONS if argv[0] == "inspect" else run_flags.SECTIONS
    for flag in (flag for section in sections for flag in section.flags):
        assert f"  --{flag.name}" in out
        assert flag.default is None or f"(default: {flag.default})" in " ".join(out.split())
    assert "logtostderr" not in out
    assert max(map(len, out.splitlines())) <= 100
    assert err == ""


@pytest.mark.parametrize("argv", [["--version"], ["run", "--version"], ["inspect", "--version"]])
def test_version(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    assert capsys.readouterr().out.startswith("sharpi-jax 0.")


def test_help_says_what_p_min_is(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    for words in ("the TARGET's probability", "1 is exact", "(0.5, 1]", "(0, 0.5]", "lossy", "llama.cpp"):
        assert words in text


def test_what_is_quick_does_not_import_jax_or_define_global_flags() -> None:
    script = (
        "import sys; from absl import flags; before = set(flags.FLAGS); from sharpi_jax.cli.main import main;"
        "codes = [main(['--help']), main(['--version']), main(['--model=']), main(['--model=x', '--bad'])];"
        "assert codes == [0, 0, 2, 2], codes; assert 'jax' not in sys.modules; assert set(flags.FLAGS) == before"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
