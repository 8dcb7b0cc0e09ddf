"""Training curves: a CSV that grows with the run, and train.py's picture."""

import csv
import pathlib
from collections.abc import Iterator


def log(path: pathlib.Path, row: dict[str, float]) -> None:
    """Adds a row to a CSV file, whose header the first row gives, and prints it."""
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(row))
        if is_new:
            writer.writeheader()
        writer.writerow({name: round(value, 5) for name, value in row.items()})
    print({name: round(value, 3) for name, value in row.items() if "train_" not in name}, flush=True)


def read_curve(folder: pathlib.Path) -> dict[str, list[float]]:
    """The columns of curve.csv."""
    with (folder / "curve.csv").open(newline="") as file:
        rows: Iterator[dict[str, str]] = csv.DictReader(file)
        columns: dict[str, list[float]] = {}
        for row in rows:
            for name, value in row.items():
                columns.setdefault(name, []).append(float(value))
    return columns


def plot(folder: pathlib.Path) -> None:
    """curve.png: the losses, and the head's agreement with the trunk."""
    from matplotlib.figure import Figure

    columns = read_curve(folder)
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    loss, agreement = figure.subplots(1, 2)
    for name, label in (("trunk", "trunk"), ("mtp_1", "MTP, depth 1"), ("mtp_2", "depth 2"), ("mtp_3", "depth 3")):
        line = loss.plot(columns["step"], columns[f"validation_{name}"], label=label)[0]
        loss.plot(columns["step"], columns[f"train_{name}"], color=line.get_color(), alpha=0.35)
    for depth in (1, 2, 3):
        agreement.plot(columns["step"], columns[f"validation_agree_{depth}"], label=f"depth {depth}", color=f"C{depth}")
    loss.set(xlabel="step", ylabel="nats per token (pale: training)", ylim=(2, 7))
    agreement.set(xlabel="step", ylabel="share equal to the trunk's argmax", ylim=(0, 1))
    for axes in (loss, agreement):
        axes.legend()
        axes.grid(alpha=0.3)
    figure.savefig(folder / "curve.png", dpi=110)
