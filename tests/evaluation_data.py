"""A made-up evaluation that is consistent: a toy language model decoded by a plain Python loop with the p_min rule."""

import dataclasses
import functools

import numpy as np

from sharpi_jax.decode.stats import Statistics, StepRecord
from sharpi_jax.evaluate.results import CostModel, Evaluation, RunResult, Setting, SettingTiming
from sharpi_jax.evaluate.summary import summarise

# The first is the end of the text. Some mean something to HTML, to matplotlib or to a terminal.
WORDS = (
    *(
        "<eos>",
        " the",
        " of",
        " and",
        "\n",
        " a",
        " in",
        "</script>",
        " to",
        "<b>",
        " is",
        " $x_1$",
        " é",
        "日本",
        "\\",
    ),
    *(" & ", '"', " mirror", " whale", "\t", "\u202e", "\x1b[31m", " sea", ".", ",", " ship", "\n\n", " old", " man"),
    *(" it", " was", " said", " with", "{{ 7 * 7 }}", "<!--", " for", " on", " his", "🙂", "ing"),
)
DOMAINS = ("python", "translation", "</script><b>", "story", "arithmetic with $steps$")
EOS, TOKENS = 0, 48
_RNG = np.random.default_rng(7)
_V = len(WORDS)
_TARGET = _RNG.normal(size=(_V, _V, _V)) * 2.2
_TARGET[:, :, EOS] -= 2
_DRAFTER = _TARGET + _RNG.normal(size=_TARGET.shape) * 1.2


@functools.cache
def _log_p(a: int, b: int) -> np.ndarray:
    logits = _TARGET[a, b]
    return logits - np.log(np.exp(logits).sum())


def decode(prompt: tuple[int, ...], setting: Setting) -> tuple[tuple[int, ...], str, tuple[StepRecord, ...]]:
    """Output ids, finish reason and steps of speculative decoding, stop token and budget included."""
    out: list[int] = []
    steps: list[StepRecord] = []
    token = int(_log_p(*prompt[-2:]).argmax())
    while len(out) < TOKENS and token != EOS:
        window = [*prompt, *out, token]
        k = min(setting.K, TOKENS - len(out) - 1)
        for _ in range(k):
            window.append(int(_DRAFTER[window[-2], window[-1]].argmax()))
        drafts = window[len(window) - k :]
        end = len(window) - k
        rows = [_log_p(window[end + j - 2], window[end + j - 1]) for j in range(k + 1)]
        choices = [int(row.argmax()) for row in rows]
        p = [float(np.exp(row[draft])) for row, draft in zip(rows, drafts, strict=False)]
        hits = [choice == draft for choice, draft in zip(choices, drafts, strict=False)]
        passed = next((j for j in range(k) if not (hits[j] or p[j] >= setting.p_min)), k)
        accepted = next((j for j in range(passed) if drafts[j] == EOS), passed)
        after = EOS if accepted < passed else choices[passed]
        at = len(prompt) + len(out)
        steps.append(
            StepRecord(at, token, tuple(drafts), tuple(p), tuple(hits), accepted, passed, after, tuple(choices))
        )
        out += [token, *drafts[:accepted]]
        token = after
    return tuple(out), "stop" if token == EOS else "length", tuple(steps)


def _edit_distance(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        left, diagonal = i, row[0]
        row[0] = i
        for j, y in enumerate(b, 1):
            left = min(left + 1, row[j] + 1, diagonal + (x != y))
            diagonal, row[j] = row[j], left
    return row[-1]


def _log_likelihood(prompt: tuple[int, ...], output: tuple[int, ...]) -> float:
    ids = [*prompt, *output]
    return sum(float(_log_p(ids[i - 2], ids[i - 1])[ids[i]]) for i in range(len(prompt), len(ids)))


def run(prompt: int, setting: Setting) -> RunResult:
    """One prompt with one setting."""
    rng = np.random.default_rng(prompt)
    ids = tuple(map(int, rng.integers(1, _V, size=6)))
    output, finish, steps = decode(ids, setting)
    greedy, _, _ = decode(ids, Setting(0))
    drafted = tuple(sum(j < len(s.drafts) for s in steps) for j in range(setting.K))
    accepted = tuple(sum(j < s.accepted for s in steps) for j in range(setting.K))
    by_argmax = sum(sum(s.argmax[: s.accepted]) for s in steps)
    where = (i for i in range(max(len(output), len(greedy))) if output[i : i + 1] != greedy[i : i + 1])
    return RunResult(
        prompt_id=f"prompt-{prompt:02d}" + ("</script>" if prompt == 1 else ""),
        domain=DOMAINS[prompt % len(DOMAINS)],
        setting=setting,
        prompt_ids=ids,
        output_ids=output,
        text="".join(WORDS[i] for i in output),
        finish_reason=finish,
        stats=Statistics(
            len(steps), sum(drafted), sum(accepted), by_argmax, sum(accepted) - by_argmax, drafted, accepted
        ),
        steps=steps,
        log_likelihood=_log_likelihood(ids, output),
        greedy_log_likelihood=_log_likelihood(ids, greedy),
        greedy_tokens=len(greedy),
        first_divergence=next(where, None),
        edit_distance=_edit_distance(output, greedy),
        identical=output == greedy,
        reference_match=None if prompt % 2 else prompt % 4 == 0,
    )


@functools.cache
def evaluation(prompts: int = 20, resamples: int = 200) -> Evaluation:
    """A sweep over K and p_min."""
    settings = [Setting(0), *(Setting(K, p) for K in (1, 2, 3, 4) for p in (1.0, 0.5, 0.3, 0.1, 0.03))]
    results = tuple(run(prompt, setting) for prompt in range(prompts) for setting in settings)
    timings = []
    for setting in settings:
        runs = [r for r in results if r.setting == setting]
        length = sum(len(r.output_ids) for r in runs) / sum(r.stats.steps for r in runs)
        ratio = length / (1 + 0.13 * setting.K)
        timings.append(SettingTiming(setting, 147.3 * ratio, ratio, rounds=5, batch_size=16))
    cost = CostModel(draft=0.06, verify=0.01)
    return Evaluation(
        model="toy <model> & co",
        results=results,
        summaries=summarise(results, timings, cost=cost, resamples=resamples),
        cost=cost,
        token_texts=dict(enumerate(WORDS)),
        compilations=5,
        details=(("command", "sharpi-jax eval --model=toy.gguf --report_dir=out/"), ("max tokens", str(TOKENS))),
    )


def untimed(source: Evaluation) -> Evaluation:
    """The same without timings."""
    return dataclasses.replace(source, summaries=tuple(dataclasses.replace(s, timing=None) for s in source.summaries))
