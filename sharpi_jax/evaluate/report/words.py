"""The report in words and table cells."""

import dataclasses
from collections.abc import Sequence

from sharpi_jax.evaluate.bootstrap import Interval
from sharpi_jax.evaluate.results import Figures, Summary
from sharpi_jax.evaluate.summary import best_lossless, best_lossy, comparable, gain


@dataclasses.dataclass(frozen=True)
class Cell:
    """A figure and, below it, its interval."""

    value: str
    interval: str = ""


NOTHING = "–"
COLUMNS = (  # heading, explanation
    ("speed‑up", "measured, against plain decoding"),
    ("tokens/s", "all rows of the batch together"),
    ("accepted", "drafts emitted, of those drafted"),
    ("by p_min", "drafts emitted that are not the argmax, of those drafted"),
    ("tokens per pass", "mean accepted length: 1 + accepted / verify passes"),
    ("identical", "runs whose text is greedy's"),
    ("off path", "tokens from the first one on that is not greedy's"),
    ("leaves at", "index of the first token that is not greedy's, over the runs that have one"),
    ("edits per token", "edit distance to greedy's text, by tokens produced"),
    ("bits lost", "per token: how much less likely the trunk finds the text than greedy's"),
    ("reference", "runs whose text is the reference, of those that have one"),
    ("predicted", "speed-up on the other hardware"),
)


def share(interval: Interval | None) -> Cell:
    """A share in percent."""
    if interval is None:
        return Cell(NOTHING)
    if interval.low is None or interval.high is None or interval.low == interval.high:
        return Cell(f"{interval.value:.1%}")
    return Cell(f"{interval.value:.1%}", f"{100 * interval.low:.1f} to {100 * interval.high:.1f}")


def number(interval: Interval | None, digits: int = 2) -> Cell:
    """A number."""
    if interval is None:
        return Cell(NOTHING)
    if interval.low is None or interval.high is None or interval.low == interval.high:
        return Cell(_plain(interval.value, digits))
    return Cell(_plain(interval.value, digits), f"{_plain(interval.low, digits)} to {_plain(interval.high, digits)}")


def cells(summary: Summary, figures: Figures) -> list[Cell]:
    """The columns of one row. Speed is a whole setting's: a domain has none."""
    timing = summary.timing if figures.domain is None else None
    return [
        Cell(f"{timing.ratio:.2f}") if timing else Cell(NOTHING),
        Cell(f"{timing.tokens_per_s:.1f}") if timing else Cell(NOTHING),
        share(figures.acceptance_rate) if summary.setting.K else Cell(NOTHING),
        share(figures.by_p_min) if summary.setting.K else Cell(NOTHING),
        number(figures.mean_accepted_length),
        share(figures.identical),
        share(figures.off_path),
        number(figures.first_divergence, 1),
        number(figures.edits_per_token, 3),
        number(figures.bits_lost, 3),
        share(figures.reference_match),
        number(figures.predicted_speedup),
    ]


def opening(summaries: Sequence[Summary]) -> list[str]:
    """What the evaluation found, in plain words: lossless first, then lossy and its price."""
    lossless, lossy = best_lossless(summaries), best_lossy(summaries)
    sentences = []
    if lossless is None:
        sentences.append("No lossless setting with drafts was evaluated.")
    else:
        sentences.append(
            f"Without any loss, {lossless.setting} is the fastest: {_speed(lossless, summaries)}, with exactly the text"
            " of plain greedy decoding."
        )
        if lossless.timing and lossless.timing.ratio <= 1:
            sentences.append("Lossless drafting does not pay on this machine.")
    if lossy is None:
        sentences.append("No lossy setting was evaluated.")
    elif lossless and gain(lossy, summaries) <= gain(lossless, summaries):
        sentences.append(f"No lossy setting is faster: the best, {lossy.setting}, reaches {_speed(lossy, summaries)}.")
    else:
        sentences.append(f"The fastest of all is {lossy.setting}: {_speed(lossy, summaries)}. {_price(lossy)}")
    return sentences


def _price(summary: Summary) -> str:
    figures = summary.overall
    price = (
        f"Its price: {_inline(share(figures.off_path))} of the tokens lie past the point where their text leaves"
        f" greedy's path, {_inline(share(figures.identical))} of the runs are still greedy's word for word"
    )
    if figures.bits_lost is not None:
        lost, worse = figures.bits_lost, "less"
        if lost.value < 0:
            lost, worse = _negated(lost), "more"
        price += f", and the model itself finds the texts {_inline(number(lost, 3))} bits per token {worse} likely"
    return price + "."


def _negated(interval: Interval) -> Interval:
    low, high = interval.low, interval.high
    return Interval(-interval.value, None if high is None else -high, None if low is None else -low)


def _inline(cell: Cell) -> str:
    return f"{cell.value} ({cell.interval})" if cell.interval else cell.value


def _speed(summary: Summary, summaries: Sequence[Summary]) -> str:
    """What a setting gains, in the kind of figure by which all are compared."""
    timing = summary.timing
    if timing is None or summary not in comparable(summaries) or gain(summary, summaries) != timing.ratio:
        return f"{gain(summary, summaries):.2f} tokens per verify pass (speed was not measured)"
    rows = "1 row" if timing.batch_size == 1 else f"{timing.batch_size} rows"
    return f"{timing.ratio:.2f} times the speed of plain decoding ({timing.tokens_per_s:.1f} tokens/s, {rows} at once)"


def _plain(value: float, digits: int) -> str:
    text = f"{value:.{digits}f}"
    return text.replace("-", "−") if float(text) else f"{0:.{digits}f}"
