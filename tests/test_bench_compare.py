"""bench/compare.py: what it makes of the runs of both sides, without a server."""

import gguf
import models
import pytest

from bench.compare import OURS, THEIRS, report, step_and_draft_bytes, summary


def run(speed: float, steps: int, drafted: int, accepted: int, ids: tuple[int, ...] = (1, 2, 3, 4)) -> dict:
    return {"speed": speed, "steps": steps, "drafted": drafted, "accepted": accepted, "ids": list(ids)}


def test_medians_and_ratios() -> None:
    runs = {
        (OURS, 0): [run(s, 4, 0, 0) for s in (30.0, 10.0, 20.0)],
        (THEIRS, 0): [run(s, 4, 0, 0) for s in (8.0, 10.0, 9.0)],
        (OURS, 3): [run(s, 1, 3, 3) for s in (50.0, 50.0, 80.0)],
        (THEIRS, 3): [run(s, 2, 4, 2, (1, 2, 3, 5)) for s in (18.0, 20.0, 16.0)],
    }
    prefill = {OURS: [300.0, 200.0, 100.0], THEIRS: [100.0, 160.0, 150.0]}
    found = summary(runs, prefill, 25.0, (500_000_000, 200_000_000))
    assert found["ours_to_theirs"] == {0: pytest.approx(20 / 9), 3: pytest.approx(50 / 18)}
    assert found["gain"] == {OURS: {3: 2.5}, THEIRS: {3: 2.0}}
    assert found["prefill_tokens_per_s"] == {OURS: 200, THEIRS: 150}
    assert found["prefill_ours_to_theirs"] == pytest.approx(4 / 3)
    sides = {(s["side"], s["K"]): s for s in found["sides"]}
    assert sides[OURS, 0]["gb_per_s"] == pytest.approx(20 * 0.5)  # a step a token
    assert sides[OURS, 3]["gb_per_s"] == pytest.approx(50 / 4 * (0.5 + 3 * 0.2))
    assert sides[THEIRS, 3]["gb_per_s"] == pytest.approx(18 / 4 * (2 * 0.5 + 4 * 0.2))
    assert sides[OURS, 0]["bandwidth_share"] == pytest.approx(10 / 25)
    assert [s["same_ids"] for s in found["sides"]] == [True, True, True, False]
    text = "\n".join(report(found))
    assert "K = 3: 2.78 times llama-server" in text
    assert "sharpi-jax: K = 3 is 2.50 times K = 0" in text
    assert "prefill of 512: 200.0 and 150.0 tokens/s, 1.33 times llama-server" in text


def test_bytes_are_the_files() -> None:
    path = models.fixture("qwen35-tiny-f32")
    sizes = {t.name: t.n_bytes for t in gguf.GGUFReader(path).tensors}
    layers = len(models.read("qwen35-tiny-f32").config.layer_kinds)
    step, draft = step_and_draft_bytes(path, layers)
    outside = sum(n for name, n in sizes.items() if not name.startswith("blk."))
    head = sizes.get("output.weight", sizes["token_embd.weight"])
    assert step + draft == sum(sizes.values()) - outside + 2 * head
    assert draft - head == sum(n for name, n in sizes.items() if name.startswith(f"blk.{layers}."))
