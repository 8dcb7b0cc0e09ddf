"""The report of an evaluation: one page that needs nothing else, and its figures as JSON and CSV.

Everything that comes from a model or a file of prompts is untrusted text here: the template escapes it, the page's
script only ever makes text nodes of it, and the page's own policy lets no other script run and nothing be fetched.
"""

import base64
import csv
import hashlib
import json
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from sharpi_jax.evaluate.report.palette import ORIGINS
from sharpi_jax.evaluate.report.plots import plots, strictest
from sharpi_jax.evaluate.report.token_view import setting_index, token_view, visible
from sharpi_jax.evaluate.report.words import COLUMNS, NOTHING, Cell, cells, opening
from sharpi_jax.evaluate.results import Evaluation
from sharpi_jax.evaluate.summary import best_lossless, best_lossy

TEMPLATES = "templates"


def write_report(folder: Path | str, evaluation: Evaluation) -> Path:
    """Writes report.html, summary.json and results.csv into `folder`, made if need be. Returns the page's path.

    Raises:
      OptionError: matplotlib is not installed.
      OSError: a file cannot be written.
    """
    page = report_page(evaluation)  # first: where it cannot be made, nothing is written
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    summary = json.dumps(evaluation.as_dict(), allow_nan=False, indent=1)
    (folder / "summary.json").write_text(summary + "\n", encoding="utf-8")
    rows = evaluation.rows()
    with (folder / "results.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else [])
        writer.writeheader()
        writer.writerows(rows)
    path = folder / "report.html"
    path.write_text(page, encoding="utf-8", errors="replace")
    return path


def report_page(evaluation: Evaluation) -> str:
    """The page."""
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_template), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["visible"] = visible
    script = _template("report.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.get_template("report.html.j2").render(
        evaluation=evaluation,
        opening=opening(evaluation.summaries),
        origins=ORIGINS,
        style=Markup(_template("report.css")),
        script=Markup(script),
        script_digest=digest,
        plots={name: Markup(svg) for name, svg in plots(evaluation).items()},
        strictest=strictest(evaluation.summaries),
        **_rows(evaluation),
        **_view(evaluation),
    )


def _rows(evaluation: Evaluation) -> dict[str, Any]:
    """The two tables: settings, and the best ones by domain. Columns in which there is nothing are left out."""
    best = {"lossless": best_lossless(evaluation.summaries), "lossy": best_lossy(evaluation.summaries)}
    marks = {found.setting: f"fastest {name}" for name, found in best.items() if found}
    overall = [cells(s, s.overall) for s in evaluation.summaries]
    domains = [(s, [(f, cells(s, f)) for f in s.domains]) for s in best.values() if s]
    shown = _columns(overall)
    domain_shown = _columns([values for _, by_domain in domains for _, values in by_domain])
    return {
        "columns": [COLUMNS[i] for i in shown],
        "rows": [
            (s.setting, marks.get(s.setting, ""), [values[i] for i in shown])
            for s, values in zip(evaluation.summaries, overall, strict=True)
        ],
        "domain_columns": [COLUMNS[i] for i in domain_shown],
        "domain_rows": [(s, [(f, [v[i] for i in domain_shown]) for f, v in by_domain]) for s, by_domain in domains],
    }


def _columns(rows: list[list[Cell]]) -> list[int]:
    """Those that hold something."""
    return [i for i in range(len(COLUMNS)) if any(row[i].value != NOTHING for row in rows)]


def _view(evaluation: Evaluation) -> dict[str, Any]:
    """The token view: what is shown, what is not, and with what it begins."""
    view = token_view(evaluation)
    lossy = best_lossy(evaluation.summaries) or best_lossless(evaluation.summaries)
    view["start"] = setting_index(evaluation, lossy.setting if lossy else None)
    prompts = len({run.prompt_id for run in evaluation.results})
    left_out = len(evaluation.results) - sum(len(prompt["runs"]) for prompt in view["prompts"])
    return {"view": view, "prompt_count": prompts, "left_out": left_out}


def _template(name: str) -> str:
    return (resources.files(__name__) / TEMPLATES / name).read_text(encoding="utf-8")
