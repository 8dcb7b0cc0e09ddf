"""bench/gpu.py on a CPU, where a few of its parts take seconds: what it computes, and that a failure stops nothing."""

import json

import numpy as np
import pytest

from bench import gpu, gpu_products


@pytest.fixture
def options(tmp_path):
    path = tmp_path / "gpu.json"
    gpu.FLAGS(["gpu", "--shape=tiny", "--only=device,peak,checks,products", f"--output_json={path}"])
    yield path
    gpu.FLAGS.unparse_flags()


def test_parts_without_a_model_run_and_are_written(options, monkeypatch, capsys):
    monkeypatch.setattr(gpu_products, "TIMED", ("Q8_0",))
    monkeypatch.setattr(gpu_products, "ROWS", (1, 4))
    monkeypatch.setattr(gpu_products, "engines", lambda: ("xla",))
    gpu.main(["gpu"])
    parts = json.loads(options.read_text())
    assert list(parts) == ["device", "peak", "checks", "products"]
    assert all("found" in entry for entry in parts.values())
    assert parts["checks"]["found"][0]["rows_exact"]
    for entry in parts["products"]["found"]:
        nbytes = 512 * 256 // 32 * 34
        assert entry["mb"] == nbytes / 1e6
        assert np.isclose(entry["gb_per_s"], nbytes / entry["ms"] / 1e6)
        assert np.isclose(entry["share"], entry["gb_per_s"] / parts["peak"]["found"]["read_gb_per_s"])
    assert "Nothing was found wrong." in capsys.readouterr().out


def test_a_part_that_fails_or_does_not_fit_is_said_and_the_next_one_runs(tmp_path, capsys):
    report = gpu.Report(100, str(tmp_path / "r.json"), [])
    assert report.part("first", 0, lambda: 1 // 0) is None
    assert report.part("second", 1000, lambda: {"a": 1}) is None
    assert report.part("third", 0, lambda: {"a": 1}) == {"a": 1}
    written = json.loads((tmp_path / "r.json").read_text())
    assert written["first"]["error"].startswith("ZeroDivisionError")
    assert "1000 wanted" in written["second"]["skipped"]
    assert written["third"]["found"] == {"a": 1}
    assert "first (0.0 s): ZeroDivisionError" in capsys.readouterr().out
    assert gpu._wrong(report) == ["first"]


def test_what_is_wrong_is_named():
    report = gpu.Report(100, None, [])
    report.parts["checks"] = {
        "found": [{"format": "Q4_K", "engine": "triton", "error": float("nan"), "rows_exact": None}]
    }
    bad = {"ids_are_the_cpus": True, "bits_are_those_of_K=0": False}
    report.parts["fixture f"] = {"found": {"file": "f", "K=0": {"ids_are_the_cpus": True}, "K=1": bad}}
    assert gpu._wrong(report) == ["Q4_K by triton", "fixture f K=1"]
