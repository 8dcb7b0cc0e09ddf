"""The data of the token view: which runs are shown, and what the page needs to know of them."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from sharpi_jax.evaluate.report.palette import origins
from sharpi_jax.evaluate.results import Evaluation, RunResult, Setting

BUDGET = 1_800_000  # bytes of data: with plots and table the file stays below 3 MB
MAX_PROMPTS = 24  # a list that is still quick to choose from
PROMPT_TOKENS = 200  # the end of the prompt that is shown


def visible(text: str) -> str:
    """`text` with its line breaks and tabs; what else a page would act on or hide (direction, escapes) is escaped."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape", "replace").decode() for c in text
    )


def token_view(evaluation: Evaluation, budget: int = BUDGET) -> dict[str, Any]:
    """What the page's script draws from, ready for JSON.

    Tokens are indices into `texts`. A step is [letters, tokens, probabilities, choices]: the letters of `origins`, the
    certain token and the drafts, the drafts' probabilities, and the trunk's own choices.

    Args:
      budget: bytes of JSON. Prompts are taken from the domains in turn, each with all its settings, while they fit; of
        the first as many settings as fit.
    """
    texts = _Texts(evaluation.token_texts)
    settings = sorted({run.setting for run in evaluation.results}, key=lambda s: (s.K, -s.p_min))
    prompts: list[dict[str, Any]] = []
    used = 0
    for runs in _in_turn(evaluation.results):
        shown: dict[str, Any] = {}
        size = 0
        for run in sorted(runs, key=lambda r: settings.index(r.setting)):
            data = _run(run, texts)
            size += len(json.dumps(data, separators=(",", ":")))
            if used + size > budget and (prompts or shown):
                break
            shown[str(settings.index(run.setting))] = data
        if prompts and (len(shown) < len(runs) or len(prompts) == MAX_PROMPTS):
            break
        used += size
        before = runs[0].prompt_ids
        prompts.append(
            {
                "id": visible(runs[0].prompt_id),
                "domain": visible(runs[0].domain),
                "start": len(before),
                "prompt": [texts.index(token) for token in before[-PROMPT_TOKENS:]],
                "runs": shown,
            }
        )
    return {"texts": texts.all, "settings": [str(s) for s in settings], "prompts": prompts}


def setting_index(evaluation: Evaluation, setting: Setting | None) -> int:
    """Where `setting` stands in the view's list; 0 if it is None."""
    settings = sorted({run.setting for run in evaluation.results}, key=lambda s: (s.K, -s.p_min))
    return settings.index(setting) if setting in settings else 0


class _Texts:
    """Texts in the order of their first use."""

    def __init__(self, source: Mapping[int, str]):
        self._source = source
        self._indices: dict[int, int] = {}
        self.all: list[str] = []

    def index(self, token: int) -> int:
        if token not in self._indices:
            self._indices[token] = len(self.all)
            self.all.append(visible(self._source.get(token, f"[id {token}]")))
        return self._indices[token]


def _in_turn(results: Iterable[RunResult]) -> list[list[RunResult]]:
    """The runs by prompt; prompts of the domains in turn, in the order in which they came."""
    by_prompt: dict[str, list[RunResult]] = {}
    for result in results:
        by_prompt.setdefault(result.prompt_id, []).append(result)
    order, seen = [], dict[str, int]()
    for runs in by_prompt.values():
        domain = runs[0].domain
        order.append((seen.get(domain, 0), runs))
        seen[domain] = seen.get(domain, 0) + 1
    return [runs for _, runs in sorted(order, key=lambda entry: entry[0])]


def _run(run: RunResult, texts: _Texts) -> dict[str, Any]:
    return {
        "diverges": run.first_divergence,
        "finish": visible(run.finish_reason),
        "steps": [
            [
                letters,
                [texts.index(token) for token in (step.token, *step.drafts)],
                [round(p, 4) for p in step.probabilities],
                [texts.index(token) for token in step.choices],
            ]
            for letters, step in zip(origins(run.steps), run.steps, strict=True)
        ],
    }
