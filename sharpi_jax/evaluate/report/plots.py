"""The report's pictures: SVG that takes its colours and its fonts from the page, so that it fits both themes."""

import io
import re
import warnings
from collections.abc import Sequence
from typing import Any

from sharpi_jax.errors import OptionError
from sharpi_jax.evaluate.results import Evaluation, Figures, Setting, Summary
from sharpi_jax.evaluate.summary import best_lossless, best_lossy, comparable, gain, ruled_on

SIZE = (4.5, 3.3)  # inches: at this size text is still read on a screen of 400 pixels
BINS = 20
_MARKERS = "osD^vPXd"
# Colours that occur nowhere else, each replaced by a variable of the page's style sheet.
_INK, _GRID, _ARGMAX, _P_MIN = "#010203", "#010204", "#010206", "#010207"
_CURVES = tuple(f"#01030{i}" for i in range(8))
_VARIABLES = {_INK: "ink", _GRID: "grid", _ARGMAX: "bar-argmax", _P_MIN: "bar-p-min"}
_VARIABLES |= {colour: f"curve-{i}" for i, colour in enumerate(_CURVES)}
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # names of domains are text, whatever they hold
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), _INK),
}


def plots(evaluation: Evaluation) -> dict[str, str]:
    """The pictures by name, as SVG elements.

    Raises:
      OptionError: matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise OptionError("The report's plots need matplotlib: pip install matplotlib.") from error
    found = {}
    for name, draw in _PLOTS.items():
        with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing from")  # the browser has its own fonts
            figure = Figure(SIZE, layout="constrained")
            draw(figure.subplots(), evaluation)
            found[name] = _svg(figure, name)
    return found


def _svg(figure: Any, name: str) -> str:
    """The figure as an element of a page that holds others too: no head, ids of its own, the page's colours."""
    out = io.StringIO()
    figure.savefig(out, format="svg", transparent=True, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<(metadata|style)\b.*?</\1>", "", text, flags=re.DOTALL)
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", text)
    text = re.sub(r'(<svg\b[^>]*?) width="[^"]*"', r"\1", text)
    text = re.sub(r'(<svg\b[^>]*?) height="[^"]*"', r"\1", text)
    text = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", text)
    text = text.replace("<svg", f'<svg role="img" aria-labelledby="caption-{name}"', 1)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, f"var(--{variable})")
    return text


def _whiskers(axes: Any, figure: Any, at: float, *, horizontal: bool) -> None:
    """The interval of an estimate over its bar."""
    if figure.low is None:
        return
    ends, across = (figure.low, figure.high), (at, at)
    axes.plot(*((ends, across) if horizontal else (across, ends)), color=_INK, linewidth=1)


def _pareto(axes: Any, evaluation: Evaluation) -> None:
    """Speed against the share of text off the greedy path."""
    summaries = comparable(evaluation.summaries)
    timed = any(s.timing and s.setting.K for s in summaries)
    points: list[tuple[float, float, float]] = []
    for index, K in enumerate(sorted({s.setting.K for s in summaries if s.setting.K})):
        curve = [s for s in summaries if s.setting.K == K]
        xs, ys = [s.overall.off_path.value for s in curve], [gain(s, summaries) for s in curve]
        colour = _CURVES[index % len(_CURVES)]
        axes.plot(xs, ys, color=colour, marker=_MARKERS[index % len(_MARKERS)], label=f"K = {K}", markersize=5)
        for x, y, found in zip(xs, ys, curve, strict=True):
            off = found.overall.off_path
            if off.low is not None:
                axes.plot((off.low, off.high), (y, y), color=colour, linewidth=3, alpha=0.25, solid_capstyle="butt")
            points.append((x, y, found.setting.p_min))
    for x, y, label in _labels(points):
        axes.annotate(label, (x, y), xytext=(3, 4), textcoords="offset points", fontsize=7.5)
    axes.axhline(1, color=_INK, linewidth=0.8, linestyle=(0, (4, 3)))
    axes.annotate("plain decoding", (1, 1), xycoords=("axes fraction", "data"), xytext=(0, 3), ha="right",
                  textcoords="offset points", fontsize=7.5)  # fmt: skip
    axes.set_xlabel("tokens off the greedy path")
    axes.set_ylabel("speed-up" if timed else "tokens per verify pass")
    axes.xaxis.set_major_formatter(_percent)
    axes.set_xlim(left=-0.02)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncol=4, fontsize=8)  # above, off the lines


def _labels(points: Sequence[tuple[float, float, float]]) -> list[tuple[float, float, str]]:
    """Where to write which p_min; points that lie so close that their labels would cover each other share one."""
    height = max((y for _, y, _ in points), default=0) - min((y for _, y, _ in points), default=0) or 1
    width = max((x for x, _, _ in points), default=0) or 1
    groups: list[tuple[float, float, set[float]]] = []
    for x, y, p_min in sorted(points, key=lambda point: -point[1]):
        near = (g for g in groups if abs(g[0] - x) < 0.06 * width and abs(g[1] - y) < 0.06 * height)
        group = next(near, None)
        if group is None:
            groups.append((x, y, {p_min}))
        else:
            group[2].add(p_min)
    return [(x, y, ", ".join(f"{p:g}" for p in sorted(p_mins, reverse=True))) for x, y, p_mins in groups]


def _by_position(axes: Any, evaluation: Evaluation) -> None:
    """Acceptance by draft position at the largest K, a bar per p_min."""
    K = max((s.setting.K for s in evaluation.summaries), default=0)
    group = [s for s in evaluation.summaries if s.setting.K == K] if K else []
    width = 0.84 / max(len(group), 1)
    ticks: list[tuple[float, str]] = []
    for index, found in enumerate(group):
        for position in found.overall.by_position:
            x = position.position + (index - (len(group) - 1) / 2) * width
            _stack(axes, x, position, width * 0.86, first=not ticks, horizontal=False)
            ticks.append((x, f"{found.setting.p_min:g}"))
    axes.set_xticks([x for x, _ in ticks], [label for _, label in ticks], rotation=90, fontsize=7)
    for number in range(1, K + 1):
        axes.annotate(f"draft {number}", (number, 1.02), xycoords=("data", "axes fraction"), ha="center")
    axes.set_xlabel("p_min")
    axes.set_ylabel(f"accepted of those drafted, K = {K}")
    axes.yaxis.set_major_formatter(_percent)
    axes.set_ylim(0, 1)
    axes.grid(visible=False, axis="x")


def _by_domain(axes: Any, evaluation: Evaluation) -> None:
    """Acceptance by domain: a bar for the best lossless setting, below it one for the best lossy one."""
    best = [s for s in (best_lossless(evaluation.summaries), best_lossy(evaluation.summaries)) if s]
    names = [f.domain or "" for f in best[0].domains] if best else []
    height = 0.8 / max(len(best), 1)
    for index, found in enumerate(best):
        for row, figures in enumerate(found.domains):
            y = -row - (index - (len(best) - 1) / 2) * height
            _stack(axes, y, figures, height * 0.86, first=index == row == 0, horizontal=True)
    axes.set_yticks([-row for row in range(len(names))], [_short(name) for name in names])
    axes.set_xlabel("accepted of those drafted")
    axes.xaxis.set_major_formatter(_percent)
    axes.set_xlim(0, 1)
    axes.grid(visible=False, axis="y")


def _stack(axes: Any, at: float, figures: Any, thickness: float, *, first: bool, horizontal: bool) -> None:
    """What was accepted by argmax, on it what was by p_min, and the interval of both together."""
    bar, size, start = (axes.barh, "height", "left") if horizontal else (axes.bar, "width", "bottom")
    argmax, p_min = figures.by_argmax.value, figures.by_p_min.value
    bar(at, argmax, color=_ARGMAX, **{size: thickness})
    bar(at, p_min, color=_P_MIN, **{size: thickness, start: argmax})
    _whiskers(
        axes, figures.acceptance_rate if isinstance(figures, Figures) else figures.rate, at, horizontal=horizontal
    )


def strictest(summaries: Sequence[Summary]) -> Setting | None:
    """The setting whose drafts the probabilities are shown of: the largest K, and of its p_min the highest."""
    return max((s.setting for s in summaries if s.setting.K), key=lambda s: (s.K, s.p_min), default=None)


def _probabilities(axes: Any, evaluation: Evaluation) -> None:
    """How the target-side probabilities of drafts are distributed, with the thresholds of the sweep."""
    setting = strictest(evaluation.summaries)
    counts = ([0] * BINS, [0] * BINS)
    for run in evaluation.results:
        for step in run.steps if run.setting == setting else ():
            for index in range(ruled_on(step)):
                counts[not step.argmax[index]][min(int(step.probabilities[index] * BINS), BINS - 1)] += 1
    total = max(sum(map(sum, counts)), 1)
    lefts = [i / BINS for i in range(BINS)]
    hits, misses = ([n / total for n in side] for side in counts)
    axes.bar(lefts, hits, 0.9 / BINS, align="edge", color=_ARGMAX)
    axes.bar(lefts, misses, 0.9 / BINS, bottom=hits, align="edge", color=_P_MIN)
    for p_min in sorted({s.setting.p_min for s in evaluation.summaries if s.setting.K}):
        axes.axvline(p_min, color=_INK, linewidth=1, linestyle=(0, (4, 2)))
        axes.annotate(
            f"{p_min:g}", (p_min, 1), xycoords=("data", "axes fraction"), ha="center", va="bottom", fontsize=7.5
        )
    axes.set_xlabel("the trunk's probability of the draft")
    axes.set_ylabel("share of drafts")
    axes.yaxis.set_major_formatter(_percent)
    axes.set_xlim(0, 1.005)
    axes.grid(visible=False, axis="x")


def _calibration(axes: Any, evaluation: Evaluation) -> None:
    """Of the drafts in each decile of probability, how many were the argmax."""
    setting = strictest(evaluation.summaries)
    deciles = next((s.overall.calibration for s in evaluation.summaries if s.setting == setting), ())
    for decile in deciles:
        if decile.drafts:
            middle, rate = (decile.low + decile.high) / 2, decile.argmax / decile.drafts
            axes.bar(middle, rate, 0.09, color=_ARGMAX)
            axes.bar(middle, 1 - rate, 0.09, bottom=rate, color=_P_MIN, alpha=0.35)
            axes.annotate(
                f"{decile.drafts}", (middle, 1), xytext=(0, 2), textcoords="offset points", ha="center", fontsize=7
            )
    axes.set_xlabel("the trunk's probability of the draft")
    axes.set_ylabel("drafts that are the argmax")
    axes.yaxis.set_major_formatter(_percent)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1.06)
    axes.grid(visible=False, axis="x")


def _percent(value: float, _: int) -> str:
    return f"{round(100 * value, 2):g}%"


def _short(name: str) -> str:
    shown = "".join(c if c.isprintable() else "·" for c in name)
    return shown if len(shown) <= 18 else shown[:17] + "…"


_PLOTS = {
    "pareto": _pareto,
    "positions": _by_position,
    "domains": _by_domain,
    "probabilities": _probabilities,
    "calibration": _calibration,
}
