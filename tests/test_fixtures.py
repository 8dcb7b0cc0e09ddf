"""Every packed fixture is the original file, and its reference arrays belong to it."""

import hashlib
import multiprocessing

import fixtures
import numpy as np
import pytest


@pytest.mark.parametrize("name", fixtures.BASE)
def test_models_are_the_originals(name):
    raw = fixtures.fixture(name).read_bytes()
    listed = fixtures.FIXTURES[fixtures.BASE[name]][name]
    assert {"size": len(raw), "sha256": hashlib.sha256(raw).hexdigest()} == listed


def test_a_model_that_is_not_the_original_is_refused(monkeypatch, tmp_path):
    """Where a quantiser rounds otherwise, or a byte of tests/data is damaged."""
    monkeypatch.setattr(fixtures, "_cache_folder", lambda: tmp_path)
    made = fixtures.made

    def one_bit_off(base, name, kind):
        return made(base, name, kind) ^ np.uint8(1) if name == "blk.0.ffn_up.weight" else made(base, name, kind)

    monkeypatch.setattr(fixtures, "made", one_bit_off)
    with pytest.raises(ValueError, match="q4_1 is not the original"):
        fixtures.fixture.__wrapped__("qwen35-tiny-q4_1")
    assert not (tmp_path / "qwen35-tiny-q4_1.gguf").exists()


def read_at_once(name, folder, start, results):
    fixtures._cache_folder = lambda: folder
    start.wait()
    raw = fixtures.fixture.__wrapped__(name).read_bytes()
    results.put(hashlib.sha256(raw).hexdigest())


def test_workers_may_unpack_the_same_model_at_once(tmp_path):
    name, fork = "qwen35-tiny-q5_0", multiprocessing.get_context("spawn")
    start, results = fork.Barrier(3), fork.Queue()
    workers = [fork.Process(target=read_at_once, args=(name, tmp_path, start, results)) for _ in range(3)]
    for worker in workers:
        worker.start()
    found = {results.get(timeout=60) for _ in workers}
    for worker in workers:
        worker.join()
    assert found == {fixtures.FIXTURES["qwen35-tiny"][name]["sha256"]}
    assert [path.name for path in tmp_path.iterdir()] == [f"{name}.gguf"]


@pytest.mark.parametrize("name", fixtures.quantised(*fixtures.FIXTURES))
def test_reference_arrays_agree_with_each_other(name):
    """What was computed when packing (choices and gaps of the whole rows) with what came with the fixture."""
    arrays = fixtures.reference(name)
    tokens, P = arrays["dequant_tokens"], len(arrays["prompt"])
    answered = slice(P - 1, -1)
    assert (arrays["dequant_logits_argmax"][answered] == tokens[P:]).all()
    assert (arrays["dequant_mtp_logits_argmax"] == arrays["dequant_draft_ids"][:, 0]).all()
    assert arrays["dequant_logits_gap"][answered].min() == pytest.approx(arrays["dequant_greedy_min_margin"], abs=1e-5)
    for kind in ("dequant_logits", "dequant_mtp_logits"):
        even, choice = arrays[f"{kind}_even"], arrays[f"{kind}_argmax"]
        rows = np.flatnonzero(choice % 2 == 0)
        assert (even[rows].argmax(-1) == choice[rows] // 2).all()
        lead = np.sort(even[rows], axis=-1)
        assert (arrays[f"{kind}_gap"][rows] <= lead[:, -1] - lead[:, -2]).all()
