"""What a GPU makes of it, in one run of under 8 minutes: first whether it is right, then how fast.

    python -m bench.gpu --output_json=gpu.json

Parts, in this order: the device and its memory's peak; each format's product against float64; a fixture's tokens,
logits and bits against the CPU's; products by one large matrix, by format, engine and rows; random models of real
shapes (bench/make_model.py): tokens/s by the number of drafts, all of which are accepted, the cost of a window of 1 to
8 positions, and the same by the plain expression of XLA.

A part that fails says so and the rest still runs. Most of the time goes into compiling, so what matters most comes
first, and a part is left out when the budget may not last for it. The JSON is written anew after each part.
--shape=tiny runs all of it on a CPU, in small: that proves the script, not a GPU.
"""

import functools
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from absl import flags

from bench import gpu_models, gpu_products
from bench.make_model import SHAPES

FLAGS = flags.FlagValues()  # its own: the tests import this file beside others with flags of the same names
_SHAPE = flags.DEFINE_list(
    "shape", ["qwen3.5-0.8b", "qwen3.5-4b"], f"whose shapes: {', '.join(SHAPES)}", flag_values=FLAGS
)
_TYPE = flags.DEFINE_list("type", ["q4_k_m", "q8_0"], "types of file, as llama-quantize names them", flag_values=FLAGS)
_FIXTURE = flags.DEFINE_list(
    "fixture", ["qwen35-tiny256-q4_k_m", "qwen35moe-tiny256-q4_k_m"], "models of tests/data", flag_values=FLAGS
)
_BUDGET_S = flags.DEFINE_float(
    "budget_s", 450, "no part begins that may end later than this many seconds from now", flag_values=FLAGS
)
_OUTPUT_JSON = flags.DEFINE_string("output_json", None, "where to write all figures", flag_values=FLAGS)
_ONLY = flags.DEFINE_list("only", [], "parts to run, by the first word of their names; unset: all", flag_values=FLAGS)

Columns = dict[str, str]
MOST_ERROR = 4  # roundings; see gpu_products.checks
_CHECKS = {"format": "", "engine": "", "error": ".2f", "rows_exact": ""}
_PRODUCTS = {"format": "", "engine": "", "rows": "", "mb": ".1f", "ms": ".4f", "gb_per_s": ".1f", "share": ".1%"}
_RUNS = {"part": "", "tokens_per_s": ".1f", "step_ms": ".3f", "tokens_per_step": ".2f", "gb_per_s": ".1f"}
_RUNS |= {"share": ".1%", "compile_s": ".1f"}


class Report:
    """Runs parts one by one and keeps what they say.

    Attributes:
      parts: by name, the seconds that it took and what it found, an error, or why it was skipped.
    """

    def __init__(self, budget_s: float, path: str | None, only: list[str]) -> None:
        self.parts: dict[str, dict[str, Any]] = {}
        self._end, self._path, self._only = time.monotonic() + budget_s, path, only

    def part(self, name: str, needs_s: float, call: Callable[[], Any], columns: Columns | None = None) -> Any:
        """What the call returns, or None where it fails or `needs_s` seconds are no longer there."""
        if self._only and name.split()[0] not in self._only:
            return None
        began, found = time.monotonic(), None
        if began + needs_s > self._end:
            entry: dict[str, Any] = {"skipped": f"{self._end - began:.0f} s left, {needs_s:.0f} wanted"}
        else:
            try:
                found = call()
                entry = {"found": found}
            except Exception as fault:  # whatever it is, the parts after it may still tell something
                entry = {
                    "error": f"{type(fault).__name__}: {fault}"[:2000],
                    "traceback": traceback.format_exc()[-4000:],
                }
        entry["seconds"] = time.monotonic() - began
        self.parts[name] = entry
        self._show(name, entry, columns)
        if self._path:
            Path(self._path).write_text(json.dumps(self.parts, indent=1))
        return found

    def seconds(self, name: str, default: float) -> float:
        """How long a part took, for a guess at what is like it."""
        return float(self.parts.get(name, {}).get("seconds", default))

    def _show(self, name: str, entry: dict[str, Any], columns: Columns | None) -> None:
        problem = entry.get("error") or entry.get("skipped")
        print(f"\n{name} ({entry['seconds']:.1f} s){': ' + problem.splitlines()[0] if problem else ''}", flush=True)
        found = entry.get("found")
        if columns and found is not None:
            show_table(found, columns)
        elif found is not None:
            for key, value in found.items():
                print(f"  {key}: {value:.4g}" if isinstance(value, float) else f"  {key}: {value}")


def show_table(rows: list[dict[str, Any]], columns: Columns) -> None:
    """Prints some fields of each row, in the formats that `columns` gives."""
    table = [[format(row[key], form) for key, form in columns.items()] for row in rows]
    widths = [max(map(len, cells)) for cells in zip(columns, *table, strict=True)]
    for cells in (columns, *table):
        print("  " + "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)))


def check_and_time_products(report: Report, *, small: bool) -> float:
    """The parts without a model; returns the read peak in GB/s."""
    report.part("device", 0, gpu_models.versions)
    peak = report.part("peak", 5, functools.partial(gpu_products.peak, 1 << (24 if small else 32)))
    read = peak["read_gb_per_s"] if peak else float("inf")  # all shares are 0 then
    names = gpu_products.TIMED if small else gpu_products.BLOCKS
    report.part("checks", 30, functools.partial(gpu_products.checks, names), _CHECKS)
    for number, name in enumerate(_FIXTURE.value):
        depths = (0, 1, 2, 3) if number == 0 else (0, 3)
        report.part(f"fixture {name}", 60, functools.partial(gpu_models.against_cpu, name, depths))
    size = (512, 256) if small else (248_320, 1024)
    report.part("products", 30, functools.partial(gpu_products.products, *size, read), _PRODUCTS)
    return read


def time_models(report: Report, shape: str, read: float, folder: Path) -> None:
    """The parts of one shape: what matters most for every type first, then the rest for the first type."""
    loaded: dict[str, gpu_models.Timed] = {}

    def load(file_type: str) -> dict[str, float]:
        model = loaded[f"{shape} {file_type}"] = gpu_models.Timed(shape, file_type, folder)
        return {"file_mb": model.nbytes / 1e6}

    for file_type in _TYPE.value:
        guess = report.seconds(f"load {shape} {_TYPE.value[0]}", 40)
        report.part(f"load {shape} {file_type}", guess, functools.partial(load, file_type))

    def runs(file: str, depths: tuple[int, ...], engine: str = "", *, idle: bool = False) -> None:
        for K in depths:
            name = f"{'window' if idle else 'K'} {K + 1 if idle else K} {file}{' ' + engine if engine else ''}"
            guess = report.seconds(f"K 0 {file}", 60)  # with the compiling of its prefill: rather too much
            call = functools.partial(_run, loaded[file], K, engine, idle, read)
            report.part(name, guess, call)

    for file in loaded:
        runs(file, (0, 3))
    first = next(iter(loaded), None)
    if first is not None:
        runs(first, (7, 3), idle=True)
        runs(first, (0, 3), "xla")
        runs(first, (1, 2, 4))
        runs(first, (1, 2, 4, 5, 6), idle=True)


def _run(model: gpu_models.Timed, K: int, engine: str, idle: bool, read: float) -> dict[str, float]:
    found = model.run(K, engine, idle=idle)
    return found | {"share": found["gb_per_s"] / read}


def _wrong(report: Report) -> list[str]:
    """Parts that failed, and those whose checks did."""
    wrong = [name for name, entry in report.parts.items() if "error" in entry]
    for entry in report.parts.get("checks", {}).get("found", []):
        if not entry["error"] <= MOST_ERROR or entry["rows_exact"] is False:
            wrong.append(f"{entry['format']} by {entry['engine']}")
    for name, entry in report.parts.items():
        if name.startswith("fixture") and "found" in entry:
            depths = {key: value for key, value in entry["found"].items() if key.startswith("K=")}
            wrong += [f"{name} {key}" for key, value in depths.items() if not all(value.values())]
    return wrong


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise SystemExit(f"gpu: unexpected argument {argv[1]}")
    report = Report(_BUDGET_S.value, _OUTPUT_JSON.value, _ONLY.value)
    read = check_and_time_products(report, small=_SHAPE.value == ["tiny"])
    with tempfile.TemporaryDirectory() as folder:
        for shape in _SHAPE.value:
            time_models(report, shape, read, Path(folder))
    found = {name: entry.get("found") or {} for name, entry in report.parts.items()}
    runs = [{"part": name} | entry for name, entry in found.items() if "step_ms" in entry]
    if runs:
        print("\nAll runs of models; share: of the read peak.")
        show_table(runs, _RUNS)
    print("\nNot right:" if (wrong := _wrong(report)) else "\nNothing was found wrong.", ", ".join(wrong))


if __name__ == "__main__":
    try:
        main(FLAGS(sys.argv))
    except flags.Error as error:
        raise SystemExit(f"gpu: {error}") from None
