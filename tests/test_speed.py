"""Speed: what is counted, what is left out, and what the parts of a step are said to cost, by a clock of our own."""

import types

import gguf
import models
import numpy as np
import pytest

from sharpi_jax.decode.decoder import Decoder
from sharpi_jax.decode.options import DecodeOptions
from sharpi_jax.errors import OptionError
from sharpi_jax.evaluate import bandwidth, speed

NAME = "qwen35-tiny-f32"
PROMPT = [5, 6, 7, 8, 9]
ARGS = {"max_tokens": 8, "depth": 1, "rounds": 1, "threads": 2}


class Clock:
    """Stands for the module `time`: it moves only when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A decoder whose prefill takes 0.5 s, whose steps take 10 ms and K more, and 3 ms for each real draft.

    The first run of each kind takes 100 s more, as a first run may.
    """
    found = Clock()
    monkeypatch.setattr(speed, "time", found)
    monkeypatch.setattr(bandwidth, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(speed.Bandwidth, "measure", lambda self: 20.0)
    prefill, advance, seen = Decoder.prefill, Decoder.advance, set()

    def slow_prefill(self, *args, **kwargs):
        found.now += 0.5
        return prefill(self, *args, **kwargs)

    def slow_advance(self, state, controls, until, drafter=None):
        K, before, idle = state.draft_length, int(state.counters.steps[0]), isinstance(drafter, speed.IdleDrafter)
        after = advance(self, state, controls, until, drafter)
        steps = int(after.counters.steps[0]) - before
        found.now += steps * (10 + K + (0 if idle else 3 * K)) / 1e3
        if (K, idle) not in seen:
            seen.add((K, idle))
            found.now += 100.0
        return after

    monkeypatch.setattr(Decoder, "prefill", slow_prefill)
    monkeypatch.setattr(Decoder, "advance", slow_advance)
    return found


def test_figures_by_the_clock(clock: Clock) -> None:
    model = models.model(NAME)
    rounds: list[tuple[int, int]] = []
    found = model.speed(PROMPT, **ARGS, on_round=lambda done, total: rounds.append((done, total)))
    assert (found.prompt_tokens, found.max_tokens, found.rounds) == (5, 8, 1)
    assert found.costs.verify_ms == pytest.approx((10, 11))
    assert found.costs.draft_ms == pytest.approx((0, 3))
    assert [found.costs.step_ms(K) for K in range(2)] == pytest.approx([10, 14])
    assert found.prefill_tokens_per_s == pytest.approx(10)
    assert found.bandwidth_gb_per_s == 20
    assert rounds == [(0, 2), (1, 2), (2, 2)]
    for K, depth in enumerate(found.depths):
        plain = DecodeOptions(max_tokens=8, spec_type="mtp" if K else "none", spec_draft_n_max=max(K, 1))
        run = model.generate(PROMPT, plain)
        assert (depth.K, depth.stats, depth.same_ids) == (K, run.stats, True)
        assert depth.step_ms == pytest.approx(10 + 4 * K)
        assert depth.tokens_per_s == pytest.approx(8 / (run.stats.steps * depth.step_ms / 1e3))
        assert depth.gb_per_s == pytest.approx(depth.step_bytes / (depth.step_ms / 1e3) / 1e9)
        assert found.bandwidth_share(K) == pytest.approx(depth.gb_per_s / 20)
    assert found.best.tokens_per_s == max(d.tokens_per_s for d in found.depths)
    document = found.as_dict()
    assert document["best_K"] == found.best.K
    assert document["depths"][1]["stats"]["drafted"] == found.depths[1].stats.drafted


@pytest.mark.parametrize("name", [NAME, "qwen35-tiny-q8_0"])
def test_bytes_of_a_step_are_the_files(name: str) -> None:
    found = models.read(name)
    sizes = {t.name: t.n_bytes for t in gguf.GGUFReader(models.fixture(name)).tensors}
    layers = len(found.config.layer_kinds)
    by_block = {n: size for n, size in sizes.items() if n.startswith("blk.")}
    head = sizes.get("output.weight", sizes["token_embd.weight"])
    trunk = head + sum(size for n, size in by_block.items() if int(n.split(".")[1]) < layers)
    mtp = head + sum(size for n, size in by_block.items() if int(n.split(".")[1]) == layers)
    for K in range(4):
        # Less the small vectors of the MTP block; repacked weights may be padded.
        assert speed.step_bytes(found.params, found.config, K) == pytest.approx(trunk + K * mtp, rel=0.05)


def test_experts_count_as_far_as_they_can_be_chosen() -> None:
    found = models.read("qwen35moe-tiny-f32")
    cfg = found.config
    sizes = {t.name: t.n_bytes for t in gguf.GGUFReader(models.fixture("qwen35moe-tiny-f32")).tensors}
    experts = sum(n for name, n in sizes.items() if "_exps" in name and int(name.split(".")[1]) < len(cfg.layer_kinds))
    one = speed.step_bytes(found.params, cfg, 0)
    every = sum(
        n for name, n in sizes.items() if name.startswith("blk.") and int(name.split(".")[1]) < len(cfg.layer_kinds)
    )
    every += sizes.get("output.weight", sizes["token_embd.weight"])
    assert one == pytest.approx(every - experts * (1 - cfg.experts_used / cfg.experts), rel=0.05)


def test_a_pass_reads_the_whole_array_and_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, read = Clock(), []

    def slow_sum(part: np.ndarray) -> int:
        read.append(part.nbytes)
        clock.now += 0.25
        return int(part.sum())

    monkeypatch.setattr(bandwidth, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(bandwidth, "time", clock)
    monkeypatch.setattr(bandwidth, "np", types.SimpleNamespace(**vars(np)))
    monkeypatch.setattr(bandwidth.np, "sum", slow_sum)
    found = bandwidth.Bandwidth(2)
    read.clear()
    assert found.measure() == pytest.approx((1 << 20) / 0.5 / 1e9)
    assert sum(read) == 1 << 20
    assert len(read) == 2


def test_a_model_without_a_head_has_one_depth() -> None:
    found = models.model("qwen35-tiny-nomtp-f16").speed(PROMPT, max_tokens=3, depth=3, rounds=1)
    assert [d.K for d in found.depths] == [0]
    assert len(found.costs.verify_ms) == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1, not 0."),
        ({"rounds": 0}, "rounds must be at least 1, not 0."),
        ({"threads": 0}, "threads must be at least 1, not 0."),
        ({"depth": 17}, "depth must be 0 to 16, not 17."),
        ({"depth": -1}, "depth must be 0 to 16, not -1."),
        ({"ctx_size": 5}, "the prompt fills its context of 5 tokens; shorten it or raise ctx_size."),
        ({"ctx_size": 4}, "the prompt has 5 tokens, but the context holds 4"),
        ({"prompt": []}, "the prompt is empty; give at least one token."),
    ],
)
def test_refusals(changes: dict, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        models.model(NAME).speed(**({"prompt": PROMPT} | ARGS | changes))
