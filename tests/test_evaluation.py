"""The evaluation of a model: every figure against an independent count, against one prompt alone, or by hand."""

import collections
import dataclasses
import itertools
import json
import math
from pathlib import Path

import models
import numpy as np
import pytest

import sharpi_jax
from sharpi_jax import CostModel, DecodeOptions, OptionError, Prompt, Sweep
from sharpi_jax.evaluate import evaluation as engine
from sharpi_jax.evaluate.evaluation import Bench, time_settings
from sharpi_jax.evaluate.results import Setting
from sharpi_jax.evaluate.sweep import Progress, Task, timed_tasks
from sharpi_jax.evaluation_files import RESULTS, builtin_prompts, default_prompts

SWEEP = Sweep(p_min=(0.1, 1.0), n_max=(3, 1), max_tokens=12, batch_size=4, rounds=1)
PROMPTS = [
    Prompt("a", domain="old", text="The king said to his servants,"),
    Prompt("b", domain="old", text="In those days", max_tokens=20, reference="not this"),
    Prompt("c", domain="new", text="He went up to"),
    Prompt("d", prompt_ids=(5,)),
    Prompt("e", domain="new", text="Now it happened that when the people heard these words, they", max_tokens=1),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory):
    """An evaluation of the demo model, its folder, and what it told on its way."""
    folder = tmp_path_factory.mktemp("report")
    told: list[Progress] = []
    whole = sharpi_jax.evaluate(
        models.demo(), PROMPTS, SWEEP, report_dir=folder, cost=CostModel(0.1, 0.1), on_progress=told.append
    )
    return whole, folder, told


def test_settings_are_greedy_and_all_pairs() -> None:
    assert SWEEP.settings == (Setting(0), Setting(1, 1.0), Setting(1, 0.1), Setting(3, 1.0), Setting(3, 0.1))
    assert Sweep(n_max=(0,)).settings == (Setting(0),)
    assert Sweep(n_max=(2, 2), p_min=(0.5, 0.5)).settings == (Setting(0), Setting(2, 0.5))


def test_runs_come_in_the_order_of_the_sweep(found) -> None:
    keys = [(r.setting.K, r.prompt_id, r.setting.p_min) for r in found[0].results]
    assert keys == [(0, p.id, 1.0) for p in PROMPTS] + [
        (K, p.id, p_min) for K in (1, 3) for p in PROMPTS for p_min in (1.0, 0.1)
    ]
    assert [r.domain for r in found[0].results[:5]] == ["old", "old", "new", "other", "new"]


def test_each_run_is_that_prompt_alone(found) -> None:
    model = models.demo()
    for result in found[0].results:
        if result.setting.K == 1:  # for fewer programs
            continue
        K, p_min = result.setting.K, result.setting.p_min
        prompt = next(p for p in PROMPTS if p.id == result.prompt_id)
        options = DecodeOptions(
            prompt.max_tokens or 12,
            spec_type="mtp" if K else "none",
            spec_draft_n_max=max(K, 1),
            spec_draft_p_min=p_min,
            logprobs=0,
        )
        alone = model.generate(prompt.text or prompt.prompt_ids, options, trace=True)
        assert (result.prompt_ids, result.output_ids, result.text) == (alone.prompt_ids, alone.output_ids, alone.text)
        assert (result.finish_reason, result.stats, result.steps) == (alone.finish_reason, alone.stats, alone.steps)
        assert result.log_likelihood == math.fsum(entry.logprob for entry in alone.logprobs)


def test_the_likelihood_is_that_of_a_pass_over_the_text(found) -> None:
    for result in found[0].results[:2] + found[0].results[-4:]:
        ids, start = [*result.prompt_ids, *result.output_ids], len(result.prompt_ids)
        logits = models.demo().score(ids).logits.astype(np.float64)
        logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        expected = sum(logs[i - 1, ids[i]] for i in range(start, len(ids)))
        assert result.log_likelihood == pytest.approx(expected, abs=2e-4)


def test_runs_are_compared_with_greedys(found) -> None:
    greedy = {r.prompt_id: r for r in found[0].results if r.setting.K == 0}
    left = 0
    for result in found[0].results:
        a, b = result.output_ids, greedy[result.prompt_id].output_ids
        padded = [(a[i : i + 1], b[i : i + 1]) for i in range(max(len(a), len(b)))]
        differing = [i for i, (x, y) in enumerate(padded) if x != y]
        assert result.first_divergence == (differing[0] if differing else None)
        assert result.identical == (a == b)
        assert (result.edit_distance == 0) == (a == b)
        assert result.greedy_log_likelihood == greedy[result.prompt_id].log_likelihood
        assert result.greedy_tokens == len(b)
        assert result.reference_match == (False if result.prompt_id == "b" else None)
        assert result.identical or not result.setting.lossless
        left += not result.identical
    assert left > 1


def test_statistics_are_those_of_the_records(found) -> None:
    """Field case 4, and the figures of every setting, counted anew from the steps of its runs."""
    for summary in found[0].summaries:
        runs = [r for r in found[0].results if r.setting == summary.setting]
        steps = [s for r in runs for s in r.steps]
        for r in runs:
            assert [t for s in r.steps for t in (s.token, *s.drafts[: s.accepted])] == list(r.output_ids)
            assert all(0 <= s.accepted <= s.passed <= len(s.drafts) for s in r.steps)
            assert all(p.argmax[j] or p.probabilities[j] >= r.setting.p_min for p in r.steps for j in range(p.accepted))
        drafted = sum(len(s.drafts) for s in steps)
        accepted = sum(s.accepted for s in steps)
        by_argmax = sum(sum(s.argmax[: s.accepted]) for s in steps)
        figures = summary.overall
        assert (figures.steps, figures.drafted, figures.tokens) == (len(steps), drafted, len(steps) + accepted)
        assert figures.acceptance_rate.value == pytest.approx(accepted / drafted if drafted else 0)
        assert figures.by_argmax.value == pytest.approx(by_argmax / drafted if drafted else 0)
        assert figures.by_p_min.value == pytest.approx((accepted - by_argmax) / drafted if drafted else 0)
        assert figures.mean_accepted_length.value == pytest.approx(1 + accepted / len(steps))
        assert figures.predicted_speedup.value == pytest.approx(
            (1 + accepted / len(steps)) / (1 + 0.2 * summary.setting.K)
        )
        for j, position in enumerate(figures.by_position):
            there = [s for s in steps if len(s.drafts) > j]
            assert position.drafted == len(there)
            assert position.rate.value == pytest.approx(sum(s.accepted > j for s in there) / len(there))


def test_the_evaluation_says_how_it_was_made(found) -> None:
    whole, _, _ = found
    details = dict(whole.details)
    assert (details["batch size"], details["max tokens"]) == ("4", "12")
    assert details["decode loops among the programs"] == "3"  # one per K
    loops = [name for name, _ in models.demo().decoder.programs.items() if name == "decode_loop"]
    assert whole.compilations is not None
    assert 3 <= len(loops) < whole.compilations
    assert whole.model == "demo-q8_0.gguf"
    assert whole.token_texts[whole.results[0].output_ids[0]] == models.demo().tokenizer.decode(
        whole.results[0].output_ids[:1]
    )


def test_progress_counts_runs_and_tokens(found) -> None:
    whole, _, told = found
    decoding = [p for p in told if p.stage == "decoding"]
    assert [told[0].done, decoding[-1].done, told[-1].done] == [0, 25, 5]
    assert {p.total for p in decoding} == {25}
    assert {p.total for p in told if p.stage == "timing"} == {5}
    assert decoding[-1].tokens == sum(len(r.output_ids) for r in whole.results)
    assert decoding[-1].accepted == sum(r.stats.accepted for r in whole.results)
    assert decoding[-1].drafted == sum(r.stats.drafted for r in whole.results)
    assert all(a.done <= b.done for a, b in itertools.pairwise(decoding))


def test_the_folder_holds_the_runs_and_the_report(found) -> None:
    whole, folder, _ = found
    lines = (folder / RESULTS).read_bytes().splitlines()
    assert [json.loads(line) for line in lines[1:]] == [json.loads(json.dumps(r.as_dict())) for r in whole.results]
    assert json.loads((folder / "summary.json").read_text())["compilations"] == whole.compilations
    assert "<svg" in (folder / "report.html").read_text()


def test_what_is_there_is_not_decoded_again(found, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the lines are taken away and the rest put out of order, as a killed run leaves them."""
    whole, folder, _ = found
    before = (folder / RESULTS).read_bytes()
    head, *lines = before.splitlines(keepends=True)
    (folder / RESULTS).write_bytes(head + b"".join([*lines[8:12], *lines[:8], lines[20]]) + lines[13][:99])
    jobs: list[int] = []
    original = engine.run_jobs

    def counting(decoder, todo, *rest):
        jobs.append(len(todo))
        return original(decoder, todo, *rest)

    monkeypatch.setattr(engine, "run_jobs", counting)
    sweep = dataclasses.replace(SWEEP, rounds=0)
    again = sharpi_jax.evaluate(models.demo(), PROMPTS, sweep, report_dir=folder)
    assert sum(jobs) == 25 - 13
    assert again.results == whole.results
    assert (folder / RESULTS).read_bytes() == before
    assert all(s.timing is None for s in again.summaries)
    with pytest.raises(OptionError, match=r"results with other options \(max_tokens was 12 and is 13\)"):
        sharpi_jax.evaluate(models.demo(), PROMPTS, dataclasses.replace(sweep, max_tokens=13), report_dir=folder)
    other = [*PROMPTS[:-1], dataclasses.replace(PROMPTS[-1], text="Now")]
    with pytest.raises(OptionError, match="prompts was"):
        sharpi_jax.evaluate(models.demo(), other, sweep, report_dir=folder)
    assert (folder / RESULTS).read_bytes() == before


def test_speeds_are_of_one_setting_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock of our own: K = 2 takes 3 s for the tokens that K = 0 takes 6 s for; rounds differ, medians count."""
    calls: list[tuple[int, set[float], int]] = []
    rounds = collections.Counter()

    def scripted(decoder, jobs, options, on_slice):
        thresholds = {job.p_min for job in jobs}
        calls.append((options.K, thresholds, options.rows))
        assert not options.recorded
        seconds = {(0, 1.0): 6.0, (2, 1.0): 4.0, (2, 0.5): 3.0}[options.K, min(thresholds)]
        rounds[options.K, min(thresholds)] += 1
        factor = (1, 1, 50)[rounds[options.K, min(thresholds)] - 1]  # an outlier in the last round
        for _ in range(2):
            on_slice(60, factor * seconds / 2)
        return iter(())

    monkeypatch.setattr(engine, "run_jobs", scripted)
    tasks = [Task(str(i), "", (1,), 8) for i in range(100)]
    sweep = Sweep(p_min=(1.0, 0.5), n_max=(2,), batch_size=4, rounds=3)
    bench = Bench(models.decoder("qwen35-tiny-f32"), (), str, None, 128)
    timings = time_settings(bench, tasks, sweep)
    assert [(t.setting, t.tokens_per_s, t.ratio, t.rounds, t.batch_size) for t in timings] == [
        (Setting(0), 20.0, 1.0, 3, 4),
        (Setting(2, 1.0), 30.0, 1.5, 3, 4),
        (Setting(2, 0.5), 40.0, 2.0, 3, 4),
    ]
    assert calls == [(0, {1.0}, 4), (2, {1.0}, 4), (2, {0.5}, 4)] * 3
    assert [t.id for t in timed_tasks(tasks, sweep)] == ["0", "12", "25", "37", "50", "62", "75", "87"]
    assert timed_tasks(tasks[:3], sweep) == tasks[:3]


def test_real_timings_are_there_for_every_setting(found) -> None:
    for summary in found[0].summaries:
        assert summary.timing is not None
        assert summary.timing.tokens_per_s > 1
    plain = found[0].summaries[0].timing
    assert plain.ratio == 1
    for summary in found[0].summaries:
        assert summary.timing.ratio == pytest.approx(summary.timing.tokens_per_s / plain.tokens_per_s)


def test_a_prompt_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Field case 22: refused by its name, or left out with a note while all others finish."""
    model = models.model("qwen35-tiny-f32")
    bad = [
        (Prompt("long", prompt_ids=(1,) * 5000), "the prompt has 5000 tokens"),
        (Prompt("outside", prompt_ids=(9999,)), "token id 9999 is outside"),
        (Prompt("empty", text=""), "the prompt is empty"),
        (Prompt("good", prompt_ids=(3,)), "another has this id"),
    ]
    sweep = Sweep(n_max=(0,), max_tokens=2, batch_size=1, rounds=0)
    good = Prompt("good", prompt_ids=(1, 2))
    for prompt, words in bad:
        with pytest.raises(OptionError, match=rf"^prompt '{prompt.id}': .*{words}"):
            model.evaluate([good, prompt], sweep)
    faults: list[str] = []
    whole = model.evaluate([bad[0][0], good, *(p for p, _ in bad)], sweep, on_fault=faults.append)
    assert {r.prompt_id for r in whole.results} == {"good"}
    assert len(faults) == 5
    with pytest.raises(OptionError, match="no prompt is left"):
        model.evaluate([bad[0][0]], sweep, on_fault=faults.append)
    with pytest.raises(OptionError, match="no chat template"):
        models.demo().evaluate([Prompt("chat", messages=({"role": "user", "content": "Hi"},))], sweep)


def test_messages_go_through_the_chat_template(monkeypatch: pytest.MonkeyPatch) -> None:
    class Template:
        def render(self, messages):
            return "<" + messages[0]["content"] + ">"

    model = models.model("qwen35-tiny-f32")
    monkeypatch.setattr(model, "chat_template", Template())
    sweep = Sweep(n_max=(0,), max_tokens=2, batch_size=1, rounds=0)
    whole = model.evaluate([Prompt("chat", messages=({"role": "user", "content": "Hi"},)), "text"], sweep)
    ids = [r.prompt_ids for r in whole.results]
    assert ids == [tuple(model.tokenizer.encode_prompt(text)) for text in ("<Hi>", "text")]
    assert [r.prompt_id for r in whole.results] == ["chat", "2"]


def test_a_model_without_a_head_has_no_sweep() -> None:
    model = models.model("qwen35-tiny-nomtp-f16")
    with pytest.raises(OptionError, match="no MTP head"):
        model.evaluate(["x"], Sweep(max_tokens=2, rounds=0))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"p_min": (1.0, 0.0)}, "sweep_p_min must be numbers above 0 and at most 1, not 0.0"),
        ({"p_min": (float("nan"),)}, "sweep_p_min"),
        ({"n_max": (17,)}, "sweep_n_max must be numbers from 0 to 16, not 17"),
        ({"n_max": ()}, "at least one value each"),
        ({"max_tokens": 0}, "max_tokens must be 1 to"),
        ({"batch_size": 0}, "batch_size must be 1 to"),
        ({"rounds": -1}, "rounds must be 0 to"),
    ],
)
def test_a_sweep_that_cannot_be(values, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        Sweep(**values)


def test_default_prompts_suit_the_model() -> None:
    demo = default_prompts(sharpi_jax.load().path)
    assert {p.domain for p in demo} == {"demo"}
    others = default_prompts(Path("other.gguf"))
    assert len({p.domain for p in others}) == 9
    assert len(demo) + len(others) == len(builtin_prompts())


def test_a_shortlist_only_where_nothing_is_lossy() -> None:
    decoder = models.decoder("qwen35-tiny-f32")
    bench = Bench(decoder, (), str, np.arange(100, dtype=np.int32), 128)
    tasks = [Task("a", "", (400, 401), 4)]
    exact = bench.options(2, Sweep(p_min=(1.0,), n_max=(2,)), tasks, recorded=True).drafter
    assert set(np.asarray(exact.shortlist.ids).tolist()) == {*range(100), 400, 401}
    assert bench.options(2, Sweep(p_min=(1.0, 0.5), n_max=(2,)), tasks, recorded=True).drafter is None
    assert bench.options(0, Sweep(p_min=(1.0,), n_max=(2,)), tasks, recorded=True).drafter is None
