"""The report's table of settings as plain text, for a terminal."""

from sharpi_jax.evaluate.report.words import COLUMNS, NOTHING, cells
from sharpi_jax.evaluate.results import Evaluation

_PLAIN = str.maketrans({"\N{NON-BREAKING HYPHEN}": "-", NOTHING: "-", "\N{MINUS SIGN}": "-"})


def table(evaluation: Evaluation) -> tuple[list[str], list[list[str]]]:
    """Headings, and a row for each setting; columns in which there is nothing are left out."""
    found = [[cell.value for cell in cells(summary, summary.overall)] for summary in evaluation.summaries]
    shown = [i for i in range(len(COLUMNS)) if any(row[i] != NOTHING for row in found)]
    headings = ["K", "p_min", *(COLUMNS[i][0].translate(_PLAIN) for i in shown)]
    rows = []
    for summary, row in zip(evaluation.summaries, found, strict=True):
        setting = summary.setting
        p_min = f"{setting.p_min:g}" if setting.K else "-"
        rows.append([str(setting.K), p_min, *(row[i].translate(_PLAIN) for i in shown)])
    return headings, rows
