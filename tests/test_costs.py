"""The stored table of what steps cost: when it is measured, what it says, and that no file can harm it."""

import dataclasses
import json
import math
import subprocess
import sys
import types
from pathlib import Path

import jax
import models
import numpy as np
import pytest
from flax import struct

from sharpi_jax import folders
from sharpi_jax.decode.controls import Controls, Method, make_controls
from sharpi_jax.decode.decoder import Decoder
from sharpi_jax.decode.draft import MtpDrafter
from sharpi_jax.decode.options import DecodeOptions
from sharpi_jax.evaluate import costs, speed
from sharpi_jax.evaluate.costs import CostKey, measure_step_ms, model_signature, step_costs, with_step_costs, worthwhile

KEY = CostKey("0123456789abcdef", "cpu", 2, "Method()", 3, 1, 128, 0)
TABLE = (1.0, 1.5, 1.5, 2.25)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return folders.cache_folder()


class Measure:
    """Says TABLE, and how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self) -> tuple[float, ...]:
        self.asked += 1
        return TABLE


def test_measured_once_then_read(cache: Path) -> None:
    measure = Measure()
    assert step_costs(KEY, measure) == TABLE
    assert step_costs(dataclasses.replace(KEY), measure) == TABLE
    assert measure.asked == 1
    (folder,) = cache.iterdir()
    (file,) = folder.iterdir()  # and nothing else is left behind
    file.write_text(file.read_text().replace("2.25", "2.5"))
    assert step_costs(KEY, measure) == (1.0, 1.5, 1.5, 2.5)
    assert measure.asked == 1


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(CostKey)])
def test_another_key_is_another_table(cache: Path, field: str) -> None:
    measure = Measure()
    step_costs(KEY, measure)
    value = getattr(KEY, field)
    other = dataclasses.replace(KEY, **{field: value + 1 if isinstance(value, int) else value + "x"})
    assert other.file != KEY.file
    step_costs(other, measure)
    assert measure.asked == 2


def test_another_version_is_another_table(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {KEY.file}
    monkeypatch.setattr(costs, "__version__", "9.9")
    found.add(KEY.file)
    monkeypatch.setattr(jax, "__version__", "9.9")
    found.add(KEY.file)
    monkeypatch.setattr(folders, "processor_flags", lambda: ("other",))
    assert len(found | {KEY.file}) == 4


def stored(step_ms: object = TABLE, **key: object) -> bytes:
    return json.dumps({"key": dataclasses.asdict(KEY) | key, "step_ms": step_ms}).encode()


BAD = {
    "nothing": b"",
    "no text": b"\xff\xfe\x00",
    "cut short": stored()[:-9],
    "nested too deep": b"[" * 100_000,
    "a list": b"[]",
    "no key": b'{"step_ms": [1.0, 1.5, 1.5, 2.25]}',
    "no times": json.dumps({"key": dataclasses.asdict(KEY)}).encode(),
    "another key": stored(rows=2),
    "too few": stored(TABLE[:3]),
    "too many": stored((*TABLE, 3.0)),
    "text": stored(("1.0", *TABLE[1:])),
    "a truth": stored((True, *TABLE[1:])),
    "null": stored((None, *TABLE[1:])),
    "zero": stored((0.0, *TABLE[1:])),
    "negative": stored((-1.0, *TABLE[1:])),
    "infinite": stored((*TABLE[:3], math.inf)),
    "no number": stored((1.0, math.nan, 1.5, 2.25)),
    "falling": stored((1.0, 1.5, 1.25, 2.25)),
}


@pytest.mark.parametrize("content", BAD.values(), ids=BAD)
def test_a_bad_file_is_measured_anew(cache: Path, content: bytes) -> None:
    file, measure = cache / KEY.file, Measure()
    file.parent.mkdir(parents=True)
    file.write_bytes(stored())
    assert step_costs(KEY, measure) == TABLE
    assert measure.asked == 0
    file.write_bytes(content)
    for _ in range(2):
        assert step_costs(KEY, measure) == TABLE
    assert measure.asked == 1


def test_a_folder_in_the_file_s_place_costs_measuring_only(cache: Path) -> None:
    (cache / KEY.file).mkdir(parents=True)
    assert step_costs(KEY, Measure()) == TABLE


def test_a_cache_that_cannot_be_written_costs_measuring_only(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.write_text("a file, where the folder should be")
    measure = Measure()
    assert [step_costs(KEY, measure) for _ in range(2)] == [TABLE] * 2
    assert measure.asked == 2

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(folders, "cache_folder", no_home)
    assert step_costs(KEY, measure) == TABLE


def test_what_measuring_raises_is_not_stored(cache: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        step_costs(KEY, lambda: (1 / 0,))
    assert not (cache / KEY.file).exists()


def test_two_processes_leave_one_whole_file(cache: Path) -> None:
    program = (
        "import sys; from sharpi_jax import folders\nfor _ in range(100): folders.keep('costs/x', sys.argv[1] * 400000)"
    )
    both = [subprocess.Popen([sys.executable, "-c", program, letter]) for letter in "ab"]
    found = set()
    while any(process.poll() is None for process in both):
        found.add(folders.kept("costs/x"))
    assert [process.returncode for process in both] == [0, 0]
    found.add(folders.kept("costs/x"))
    assert found - {None} <= {"a" * 400_000, "b" * 400_000}
    assert [file.name for file in (cache / "costs").iterdir()] == ["x"]


@struct.dataclass
class FakeState:
    """One row: what the timing reads of a DecodeState."""

    emitted: jax.Array
    steps: jax.Array

    @property
    def counters(self) -> "FakeState":
        return dataclasses.replace(self, steps=self.steps[None])


class FakeDecoder:
    """Emits 1 + k // 2 tokens a step, which takes TAKES[k] ms; its clock is `now`, and it notes what it was asked."""

    TAKES = (10.0, 14.0, 13.0, 20.0)

    def __init__(self) -> None:
        self.cfg = types.SimpleNamespace(vocab_size=5)
        self.programs = types.SimpleNamespace(compile_s=0.0)
        self.now = 0.0
        self.calls: list[tuple[int, int]] = []

    def perf_counter(self) -> float:
        return self.now

    def prefill(self, prompts, budgets, slots, controls, *, K: int) -> FakeState:
        assert all(0 <= i < self.cfg.vocab_size for prompt in prompts for i in prompt)
        self.prefilled = ([len(prompt) for prompt in prompts], budgets, slots, K)
        return FakeState(jax.numpy.zeros(len(prompts), int), jax.numpy.zeros((), int))

    def advance(self, state: FakeState, controls: Controls, until: int, drafter: object) -> FakeState:
        k, steps = int(controls.n_max[0]), 0
        assert controls.method == ADAPTIVE
        assert int(np.argmin(controls.step_ms)) == k
        assert controls.min_tokens.min() == 2**31 - 1
        self.drafter = drafter
        given, state = state, jax.tree.map(jax.numpy.copy, state)
        jax.tree.map(lambda x: x.delete(), given)  # as the loop does
        while int(state.emitted[0]) < until:
            steps += 1
            state = FakeState(state.emitted + 1 + k // 2, state.steps + 1)
        if not self.calls:  # the first run compiles
            self.now += 60
            self.programs.compile_s += 60
        slow = 50 if len(self.calls) % 17 == 0 else 1  # a few timings are far off
        self.calls.append((k, steps))
        self.now += steps * self.TAKES[k] * slow / 1e3
        return state


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDecoder:
    found = FakeDecoder()
    monkeypatch.setattr(speed, "time", found)
    return found


ADAPTIVE = Method(adaptive=True)


def adaptive(rows: int) -> Controls:
    return make_controls([1.0] * rows, [2], step_ms=[0.0] * 4, method=ADAPTIVE)


def test_steps_are_timed_in_turn(fake: FakeDecoder) -> None:
    drafter = object()
    assert measure_step_ms(fake, adaptive(2), K=3, slots=128, drafter=drafter) == pytest.approx((10, 14, 14, 20))
    assert fake.drafter is drafter
    assert fake.prefilled == ([8, 8], [120, 120], 128, 3)
    timings = fake.calls[-5 * 4 :]
    assert timings == [(k, 6) for k in range(4)] * 5
    assert all(steps == 1 or call == (0, 6) for call in fake.calls[: -5 * 4] for _, steps in [call])


def test_a_fast_model_takes_more_steps(fake: FakeDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake, "TAKES", (1.0, 1.4, 1.3, 2.0))
    assert measure_step_ms(fake, adaptive(1), K=3, slots=128) == pytest.approx((1.0, 1.4, 1.4, 2.0))
    assert fake.calls[-4:] == [(0, 20), (1, 20), (2, 20), (3, 20)]
    monkeypatch.setattr(fake, "TAKES", (0.01, 0.014, 0.013, 0.02))
    measure_step_ms(fake, adaptive(1), K=3, slots=1024)
    assert fake.calls[-4:] == [(0, 64), (1, 64), (2, 64), (3, 64)]


@pytest.mark.parametrize(
    ("step_ms", "reach"),
    [
        ((1.0, 1.45, 1.6, 1.75, 1.9, 2.05, 2.2, 2.29), 7),  # 7 / 2.2 is 91% of 8 / 2.29
        ((0.42, 0.52, 0.75, 0.81, 1.38, 1.49, 1.62, 1.66), 3),  # 4 / 0.81 is more than 8 / 1.66
        ((1.0, 9.0, 90.0), 1),  # nothing pays: the least there is
        ((1.0, 1.0), 1),
    ],
)
def test_depths_that_never_pay_are_left_out(step_ms: tuple[float, ...], reach: int) -> None:
    assert worthwhile(step_ms) == reach


def test_a_plan_is_given_its_costs(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured at the most drafts, then at as many as can pay; the second time neither."""
    tables = {7: (0.42, 0.52, 0.75, 0.81, 1.38, 1.49, 1.62, 1.66), 3: (0.4, 0.5, 0.7, 0.8)}
    asked = []

    def measured(decoder, controls, *, K, slots, drafter):
        asked.append((K, slots, controls.method.adaptive))
        return tables[K]

    monkeypatch.setattr(costs, "measure_step_ms", measured)
    decoder = models.decoder("qwen35-tiny-f32")
    plan = decoder.plan([1, 2, 3], DecodeOptions(spec_draft_n_max="auto", max_tokens=60))
    assert plan.K == 7
    for _ in range(2):
        found = with_step_costs(decoder, plan, 2)
        assert (found.K, found.step_ms) == (3, tables[3])
    assert asked == [(7, 128, True), (3, 128, True)]
    fixed = decoder.plan([1, 2, 3], DecodeOptions())
    assert with_step_costs(decoder, fixed, 2) is fixed


def test_a_small_context_takes_fewer_steps(fake: FakeDecoder) -> None:
    assert measure_step_ms(fake, adaptive(1), K=3, slots=16) == pytest.approx((10, 14, 14, 20))
    assert fake.prefilled == ([8], [8], 16, 3)
    assert fake.calls[-4:] == [(0, 6), (1, 4), (2, 2), (3, 2)]


def test_the_real_loop_is_timed_by_one_program_with_its_drafts_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = Decoder(models.read("qwen35-tiny-f32").params, models.read("qwen35-tiny-f32").config)
    drafted: set[tuple[int, int]] = set()
    advance = Decoder.advance

    def seen(self, state, controls, until, drafter=None):
        state = advance(self, state, controls, until, drafter)
        drafted.add((int(controls.n_max[0]), int(state.last.proposed[0])))
        return state

    monkeypatch.setattr(Decoder, "advance", seen)
    before = 0
    controls = make_controls([1.0], [0], step_ms=[0.0] * 3, method=ADAPTIVE)
    found = measure_step_ms(decoder, controls, K=2, slots=128, drafter=MtpDrafter())
    assert drafted == {(0, 0), (1, 1), (2, 2)}
    assert len(found) == 3
    assert 0 < found[0] <= found[1] <= found[2] < 1000
    assert [name for name, _ in decoder.programs.items()].count("decode_loop") <= before + 1


def test_a_model_is_known_by_its_shapes() -> None:
    names = ("qwen35-tiny-f32", "qwen35-tiny-bf16")
    found = [models.decoder(name) for name in names]
    signatures = {model_signature(d.params, d.cfg) for d in found}
    assert len(signatures) == 2
    other = jax.tree.map(lambda x: x + x, found[0].params)
    assert model_signature(other, found[0].cfg) in signatures
    assert model_signature(found[0].params, dataclasses.replace(found[0].cfg, context_length=77)) not in signatures
