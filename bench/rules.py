"""What each acceptance rule gains and loses: python -m bench.rules [--model=FILE.gguf] [--temperature=0.8].

On the built-in prompts of the demo model's domain, unless a file of prompts is given: drafts accepted, tokens per
verify pass, speed against decoding without drafts (all sides in turn, round after round; medians), and bits per token
that the text loses under the trunk itself, against the text without drafts. At a temperature that last figure has the
noise of other draws in it, given as one standard error.
"""

import math
import statistics
import sys

import numpy as np
from absl import app, flags

import sharpi_jax
from sharpi_jax import evaluation_files
from sharpi_jax.api import Generation
from sharpi_jax.assets import DEMO_MODEL

GREEDY: dict[str, dict[str, object]] = {
    "greedy_p_min, 1 (exact)": {},
    "greedy_p_min, 0.3": {"spec_draft_p_min": 0.3},
    "greedy_p_min, 0.1": {"spec_draft_p_min": 0.1},
    "greedy_p_min, 0.03": {"spec_draft_p_min": 0.03},
    "typical, 0.09 and 0.3": {"accept_rule": "typical"},
    "typical, 0.3 and 0.6": {"accept_rule": "typical", "typical_epsilon": 0.3, "typical_alpha": 0.6},
    "relaxed, 10 and 0.6": {"accept_rule": "relaxed"},
    "relaxed, 3 and 0.3": {"accept_rule": "relaxed", "relaxed_top_k": 3, "relaxed_delta": 0.3},
    "threshold, single 0.1": {"accept_rule": "threshold", "threshold_single": 0.1},
}
SAMPLED: dict[str, dict[str, object]] = {
    "sample_match (exact)": {},
    "rejection": {"accept_rule": "rejection"},
    "block": {"accept_rule": "block"},
    "threshold, 1 and 1": {"accept_rule": "threshold"},
    "threshold, acc 0.5": {"accept_rule": "threshold", "threshold_acc": 0.5},
    "threshold, single 0.1": {"accept_rule": "threshold", "threshold_single": 0.1},
    "typical, 0.09 and 0.3": {"accept_rule": "typical"},
}


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]}")
    model = sharpi_jax.load(_MODEL.value or DEMO_MODEL, cache_dtype="float16")
    prompts = [p.text for p in evaluation_files.builtin_prompts() if p.domain == "demo" and p.text]
    shared = {"max_tokens": _MAX_TOKENS.value, "temperature": _TEMPERATURE.value, "logprobs": 0}
    rules = SAMPLED if _TEMPERATURE.value > 0 else GREEDY
    sides = {"without drafts": {"spec_type": "none"}} | {
        name: {"spec_draft_n_max": _DRAFTS.value, **options} for name, options in rules.items()
    }
    runs: dict[str, list[list[Generation]]] = {name: [] for name in sides}
    for done in range(_ROUNDS.value + 1):  # the first compiles
        for name, options in sides.items():
            chosen = [sharpi_jax.DecodeOptions(**shared, **options, seed=i) for i in range(len(prompts))]  # type: ignore[arg-type]
            runs[name].append([model.generate(p, o) for p, o in zip(prompts, chosen, strict=True)])
        print(f"round {done} of {_ROUNDS.value}", file=sys.stderr)
    plain = runs["without drafts"]
    print(f"| rule | accepted | tokens a pass | speed | same text | bits a token lost |\n|{'---|' * 6}")
    for name, rounds in runs.items():
        print(_row(name, rounds[1:], plain[1:]))


def _row(name: str, rounds: list[list[Generation]], plain: list[list[Generation]]) -> str:
    first, stats = rounds[0], [run.stats for run in rounds[0]]
    drafted, accepted, steps = (sum(getattr(s, field) for s in stats) for field in ("drafted", "accepted", "steps"))
    speed = statistics.median(_speed(own) / _speed(other) for own, other in zip(rounds, plain, strict=True))
    same = sum(a.output_ids == b.output_ids for a, b in zip(first, plain[0], strict=True))
    lost = np.array([_bits(a) - _bits(b) for a, b in zip(first, plain[0], strict=True)])
    error = lost.std(ddof=1) / math.sqrt(len(lost))
    rate = f"{accepted / drafted:.1%}" if drafted else ""
    return (
        f"| {name} | {rate} | {1 + accepted / steps:.2f} | {speed:.2f} | {same} of {len(first)} "
        f"| {lost.mean():.3f} ± {error:.3f} |"
    )


def _speed(runs: list[Generation]) -> float:
    return sum(run.timing.decode_tokens for run in runs) / sum(run.timing.decode_s for run in runs)


def _bits(run: Generation) -> float:
    """That a token of the text takes under the trunk."""
    return -sum(token.logprob for token in run.logprobs) / max(len(run.logprobs), 1) / math.log(2)


if __name__ == "__main__":
    _MODEL = flags.DEFINE_string("model", None, "A GGUF file; unset: the demo model.")
    _TEMPERATURE = flags.DEFINE_float(
        "temperature", 0.0, "0 for greedy rules, above for those that draw.", lower_bound=0
    )
    _DRAFTS = flags.DEFINE_integer("draft_length", 3, "K.", lower_bound=1)
    _MAX_TOKENS = flags.DEFINE_integer("max_tokens", 64, "Tokens of each run.", lower_bound=2)
    _ROUNDS = flags.DEFINE_integer("rounds", 3, "Rounds that count.", lower_bound=1)
    app.run(main)
