"""The report's files, without a browser: what is in them, that untrusted text stays text, and that colours differ."""

import base64
import csv
import dataclasses
import hashlib
import io
import json
import sys
import tomllib
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path
from typing import Any

import evaluation_data
import numpy as np
import pytest

from sharpi_jax.cli import trace_colour
from sharpi_jax.cli.trace import trace_line
from sharpi_jax.decode.stats import StepRecord
from sharpi_jax.errors import OptionError
from sharpi_jax.evaluate.report import TEMPLATES, palette, write_report
from sharpi_jax.evaluate.report.palette import ORIGINS
from sharpi_jax.evaluate.report.token_view import token_view
from sharpi_jax.evaluate.report.words import opening
from sharpi_jax.evaluate.results import Evaluation, Setting, Summary

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reports") / "made" / "out"
    assert write_report(path, evaluation_data.evaluation()) == path / "report.html"
    return path


class Page(HTMLParser):
    """Every element and its attributes, the contents of scripts, and all text."""

    def __init__(self, text: str):
        super().__init__()
        self.inside = ""
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.scripts: list[str] = []
        self.text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.inside = tag
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside == "script":
            self.scripts[-1] += data
        else:
            self.text.append(data)


@pytest.fixture(scope="module")
def page(folder: Path) -> Page:
    return Page((folder / "report.html").read_text(encoding="utf-8"))


def test_the_page_fetches_nothing(folder: Path, page: Page) -> None:
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert len(text) < 3_000_000
    assert "@import" not in text
    for tag, attributes in page.elements:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base", "form", "b"), tag
        assert not [name for name in attributes if name.startswith("on") or name == "src"]
        for name in ("href", "xlink:href"):
            assert attributes.get(name, "#").startswith("#")
    assert text.count("url(") == text.count("url(#")
    policy = next(a["content"] for tag, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    digest = base64.b64encode(hashlib.sha256(page.scripts[1].encode()).digest()).decode()
    assert policy.startswith("default-src 'none';")
    assert f"script-src 'sha256-{digest}';" in policy


def test_untrusted_text_stays_text(page: Page) -> None:
    assert len(page.scripts) == 2
    assert json.loads(page.scripts[0]) == token_view(evaluation_data.evaluation()) | {
        "start": json.loads(page.scripts[0])["start"]
    }
    assert "</script>" in json.loads(page.scripts[0])["texts"]
    text = "".join(page.text)
    assert "toy <model> & co" in text
    assert "</script><b>" in text  # the name of a domain, in the table and in a plot
    assert not [c for c in text + page.scripts[0] if c in "\u202e\x1b"]
    ids = [a["id"] for _, a in page.elements if "id" in a]
    assert len(ids) == len(set(ids))


def test_no_placeholder_is_left_in_the_plots(folder: Path) -> None:
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert "#0102" not in text
    assert "#0103" not in text
    assert text.count("<svg") == 5
    assert "NaN" not in text
    assert "nan" not in "".join(text.split("<svg")[1:]).split("</main>")[0].replace("finance", "")


def test_summary_and_csv(folder: Path) -> None:
    evaluation = evaluation_data.evaluation()
    summary = json.loads((folder / "summary.json").read_text())
    assert tuple(Summary.from_dict(s) for s in summary["summaries"]) == evaluation.summaries
    assert (summary["model"], summary["compilations"]) == (evaluation.model, 5)
    with (folder / "results.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(evaluation.results)
    for row, result in zip(rows, evaluation.results, strict=True):
        assert (row["prompt_id"], row["domain"]) == (result.prompt_id, result.domain)
        assert (int(row["K"]), float(row["p_min"])) == (result.setting.K, result.setting.p_min)
        assert int(row["tokens"]) == len(result.output_ids)
        assert float(row["log_likelihood"]) == result.log_likelihood
        assert row["first_divergence"] == ("" if result.first_divergence is None else str(result.first_divergence))


def test_a_report_of_nothing(tmp_path: Path) -> None:
    text = write_report(tmp_path, Evaluation("none", (), ())).read_text(encoding="utf-8")
    assert "No lossless setting with drafts was evaluated." in text


def test_a_report_of_plain_decoding_alone(tmp_path: Path) -> None:
    source = evaluation_data.evaluation()
    plain = tuple(r for r in source.results if r.setting.K == 0)[:1]
    text = write_report(tmp_path, Evaluation("one", plain, source.summaries[:1])).read_text(encoding="utf-8")
    assert "plain decoding" in text


def test_without_matplotlib_one_sentence_and_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(OptionError, match="pip install matplotlib"):
        write_report(tmp_path / "out", evaluation_data.evaluation())
    assert not (tmp_path / "out").exists()


def test_templates_are_in_the_wheel() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["sharpi_jax"]
    shipped = {path for pattern in patterns for path in (ROOT / "sharpi_jax").glob(pattern)}
    templates = set((ROOT / "sharpi_jax" / "evaluate" / "report" / TEMPLATES).iterdir())
    assert len(templates) == 3
    assert templates <= shipped


def test_the_token_view_keeps_to_its_budget() -> None:
    evaluation = evaluation_data.evaluation()
    whole = token_view(evaluation)
    assert [len(p["runs"]) for p in whole["prompts"]] == [21] * 20
    assert [p["domain"] for p in whole["prompts"][:5]] == [
        d.replace("\u202e", "\\u202e") for d in evaluation_data.DOMAINS
    ]
    for budget in (2_000, 60_000, 200_000):
        part = token_view(evaluation, budget)
        size = len(json.dumps(part["prompts"], separators=(",", ":")))
        assert size < budget + 12_000
        assert 0 < len(part["prompts"]) < 20
        assert part["prompts"] == whole["prompts"][: len(part["prompts"])] or len(part["prompts"]) == 1
        assert part["prompts"][0]["runs"]


def test_the_token_view_tells_what_the_runs_hold() -> None:
    evaluation = evaluation_data.evaluation()
    view = token_view(evaluation)
    runs = {(r.prompt_id, str(r.setting)): r for r in evaluation.results}
    kinds = dict.fromkeys("CAPX", 0)
    for prompt in view["prompts"]:
        for key, data in prompt["runs"].items():
            run = runs[prompt["id"], view["settings"][int(key)]]
            produced, corrected = [], False
            for (letters, tokens, probabilities, choices), step in zip(data["steps"], run.steps, strict=True):
                assert letters[0] == ("X" if corrected else "C")
                line = trace_line(step, str)
                corrected = "correction=" in line
                verdicts = {"A": "ACCEPT", "P": "ACCEPT(p_min)", "R": "reject", "S": "stop", "-": "-"}
                told = [part.rsplit(" ", 1)[1] for part in line.split(" | ") if part.startswith("d")]
                assert [verdicts[letter] for letter in letters[1:]] == told
                produced += [token for token, letter in zip(tokens, letters, strict=True) if letter in "CAPX"]
                assert [view["texts"][c] for c in choices] == [_shown(c) for c in step.choices]
                assert probabilities == pytest.approx(step.probabilities, abs=6e-5)
                for letter in letters:
                    kinds[letter] = kinds.get(letter, 0) + 1
            assert [view["texts"][token] for token in produced] == [_shown(token) for token in run.output_ids]
    assert all(kinds[letter] > 100 for letter in "CAPXR")
    assert kinds["S"] > 0


def _shown(token: int) -> str:
    return evaluation_data.WORDS[token].replace("\u202e", "\\u202e").replace("\x1b", "\\x1b")


def _with_ratios(ratios: dict[Setting, float | None]) -> list[Summary]:
    found = []
    for summary in evaluation_data.evaluation().summaries:
        if summary.setting in ratios:
            ratio = ratios[summary.setting]
            timing = summary.timing and dataclasses.replace(
                summary.timing, ratio=ratio, tokens_per_s=100 * (ratio or 0)
            )
            found.append(dataclasses.replace(summary, timing=timing if ratio else None))
    return found


def test_the_opening_says_what_is_best_and_what_it_costs() -> None:
    lossless, other, lossy = Setting(2), Setting(3), Setting(3, 0.1)
    both = " ".join(opening(_with_ratios({Setting(0): 1.0, other: 1.2, lossless: 1.5, lossy: 1.75})))
    assert "Without any loss, K = 2, p_min = 1 is the fastest: 1.50 times the speed" in both
    assert "The fastest of all is K = 3, p_min = 0.1: 1.75 times" in both
    figures = next(s for s in evaluation_data.evaluation().summaries if s.setting == lossy).overall
    assert f"Its price: {figures.off_path.value:.1%}" in both
    assert f"{figures.identical.value:.1%}" in both
    assert f"{figures.bits_lost.value:.3f}" in both
    slow = " ".join(opening(_with_ratios({lossless: 0.9, lossy: 0.8})))
    assert "does not pay" in slow
    assert "No lossy setting is faster: the best, K = 3, p_min = 0.1" in slow
    # A setting that was not timed is not compared with those that were.
    part = " ".join(opening(_with_ratios({lossless: 1.1, lossy: None})))
    assert "No lossy setting was evaluated" in part
    untimed = " ".join(opening(evaluation_data.untimed(evaluation_data.evaluation()).summaries))
    assert untimed.count("tokens per verify pass (speed was not measured)") == 2
    assert "times the speed" not in untimed


def _linear(colour: str) -> np.ndarray:
    c = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def _lab(linear: np.ndarray) -> np.ndarray:
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    x, y, z = np.cbrt(to_xyz @ linear.clip(0, 1) / to_xyz.sum(axis=1))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


# For linear RGB, after G. Machado, M. Oliveira and L. Fernandes, "A physiologically-based model for simulation of color
# vision deficiency", 2009.
BLINDNESS = {
    "none": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("blindness", BLINDNESS)
def test_the_four_colours_stay_apart(theme: str, blindness: str) -> None:
    for a, b in combinations(ORIGINS, 2):
        seen = [_lab(np.array(BLINDNESS[blindness]) @ _linear(getattr(o, theme)[0])) for o in (a, b)]
        assert np.linalg.norm(seen[0] - seen[1]) > 12, (a.key, b.key)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_reads_on_the_four_colours(theme: str) -> None:
    for origin in ORIGINS:
        high, low = sorted((float([0.2126, 0.7152, 0.0722] @ _linear(c)) for c in getattr(origin, theme)), reverse=True)
        assert (high + 0.05) / (low + 0.05) >= 4.5, origin.key


class Terminal(io.StringIO):
    """A standard error that is a terminal."""

    def isatty(self) -> bool:
        return True


STEPS = (
    StepRecord(42, 1, (2, 3), (0.9, 0.1), (True, False), 2, 2, 4, (2, 9, 4)),
    StepRecord(45, 4, (2, 3), (0.9, 0.1), (True, False), 1, 1, 5, (2, 5, 9)),
    StepRecord(47, 5, (2, 3), (0.9, 0.1), (True, False), 0, 1, 2, (2, 9, 9)),
    StepRecord(47, 5, (), (), (), 0, 0, 2, (2,)),
)


def _token(token: int) -> str:
    return f"[bold]:smile: {token} </script>\n" * 20  # long, and markup to rich if it were taken for that


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("few", [False, True])
def test_a_terminal_gets_the_same_line_in_colours(step: StepRecord, few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.text import Text

    monkeypatch.setenv("TERM", "xterm" if few else "xterm-256color")
    monkeypatch.setenv("COLORTERM", "" if few else "truecolor")
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    trace_colour.note_step(step, _token, "p_min")
    assert terminal.getvalue().endswith("\n")
    assert terminal.getvalue().count("\n") == 1
    text = Text.from_ansi(terminal.getvalue().removesuffix("\n"))
    assert text.plain == trace_line(step, _token)
    backgrounds = [span.style.bgcolor.name for span in text.spans if span.style.bgcolor]  # type: ignore[union-attr]
    letters = palette.origins([step])[0].translate({ord(c): None for c in "RS-"})
    after = "X" if "R" in palette.verdicts(step) else "" if "S" in palette.verdicts(step) else "C"
    names = {"white": "color(7)", "cyan": "color(6)", "yellow": "color(3)", "magenta": "color(5)"}
    of = {origin.letter: names[origin.ansi] if few else origin.light[0] for origin in ORIGINS}
    assert backgrounds == [of[letter] for letter in letters + after]


@pytest.mark.parametrize("case", ["no terminal", "forced", "NO_COLOR", "dumb"])
def test_elsewhere_the_line_is_plain(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb" if case == "dumb" else "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    if case == "NO_COLOR":
        monkeypatch.setenv("NO_COLOR", "1")
    if case == "forced":
        monkeypatch.setenv("FORCE_COLOR", "1")
    stream: Any = Terminal() if case in ("NO_COLOR", "dumb") else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    for step in STEPS:
        trace_colour.note_step(step, _token, "p_min")
    assert stream.getvalue() == "".join(trace_line(step, _token) + "\n" for step in STEPS)
