"""What drafting gains over plain decoding, on one file and prompt: sides alternated in one process, medians, ratios.

    python -m bench.drafting [--model=FILE.gguf] [--prompt=TEXT] [--max_tokens=64] [--rounds=5] [--p_min=1] \
        [--draft_vocab=auto] [--depths=0,1,2,3,5]

Without a model it takes the demo model that ships with the package: small, but with a trained head. The last side is
--spec_draft_n_max=auto; it is compared with the best of the others, by the clock, and by the stored costs of its own
program (a fixed K as if run by that program).
"""

import os
import statistics

from absl import app, flags

import sharpi_jax
from sharpi_jax.api import Generation
from sharpi_jax.assets import DEMO_MODEL, DEMO_PROMPT
from sharpi_jax.evaluate.costs import with_step_costs

AUTO = "auto"


def options_of(depth: int | str) -> sharpi_jax.DecodeOptions:
    among = _DRAFT_VOCAB.value
    return sharpi_jax.DecodeOptions(
        max_tokens=_MAX_TOKENS.value,
        spec_type="none" if depth == 0 else "mtp",
        spec_draft_n_max=depth or 1,
        spec_draft_p_min=_P_MIN.value,
        spec_draft_vocab=int(among) if among.isdigit() else among,
        ignore_eos=True,
    )


def main(argv: list[str]) -> None:
    del argv
    model = sharpi_jax.load(_MODEL.value, act_quant=_ACT_QUANT.value)
    sides = {depth: options_of(depth) for depth in (*map(int, _DEPTHS.value), AUTO)}
    speeds: dict[int | str, list[float]] = {depth: [] for depth in sides}
    for _ in range(1 + _ROUNDS.value):
        last = {depth: model.generate(_PROMPT.value, options) for depth, options in sides.items()}
        for depth, run in last.items():
            speeds[depth].append(run.timing.decode_tokens_per_s)
    median = {depth: statistics.median(found[1:]) for depth, found in speeds.items()}
    print(f"drafts among {last[AUTO].draft_vocab} of {model.config.vocab_size} tokens")
    print(f"{'K':>4} {'tokens/s':>9} {'ratio':>6} {'accepted':>9} {'tokens/step':>11}  ids of K = 0")
    for depth, run in last.items():
        stats = run.stats
        same = "yes" if run.output_ids == last[0].output_ids else "no"
        print(
            f"{depth:>4} {median[depth]:>9.1f} {median[depth] / median[0]:>6.2f} "
            f"{f'{stats.accepted}/{stats.drafted}':>9} {stats.mean_accepted_length:>11.2f}  {same}"
        )
    best = max((depth for depth in sides if depth != AUTO), key=lambda depth: median[depth])
    print(f"auto: {median[AUTO] / median[best]:.3f} of the best fixed K, {best}")
    _by_costs(model, last)


def _by_costs(model: sharpi_jax.Model, runs: dict[int | str, Generation]) -> None:
    """Auto against the best fixed K by the cost table, which no live timing is in."""
    prompt = model.tokenizer.encode_prompt(_PROMPT.value)
    options = options_of(AUTO)
    common = options.draft_vocab(model.config.vocab_size)
    plan = model.decoder.plan(prompt, options, None if common is None else model.tokenizer.draft_ids(common))
    costs = with_step_costs(model.decoder, plan, int(os.environ.get("NPROC") or os.cpu_count() or 1)).step_ms

    def total(run: Generation) -> float:
        """Milliseconds: each step by the number of its drafts."""
        by_depth = [run.stats.steps, *run.stats.drafted_per_position, 0]
        return sum(ms * (by_depth[k] - by_depth[k + 1]) for k, ms in enumerate(costs[: len(by_depth) - 1]))

    fixed = {depth: total(run) for depth, run in runs.items() if depth != AUTO and int(depth) < len(costs)}
    best = min(fixed, key=lambda depth: fixed[depth])
    print(f"      {fixed[best] / total(runs[AUTO]):.3f} of the best by its costs, {best}")
    print(f"      ms of a step by its drafts: {', '.join(f'{ms:.3g}' for ms in costs)}")


if __name__ == "__main__":
    _MODEL = flags.DEFINE_string("model", str(DEMO_MODEL), "GGUF file")
    _PROMPT = flags.DEFINE_string("prompt", DEMO_PROMPT, "text to continue")
    _MAX_TOKENS = flags.DEFINE_integer("max_tokens", 64, "tokens per run")
    _ROUNDS = flags.DEFINE_integer("rounds", 5, "runs per side, after one to compile")
    _P_MIN = flags.DEFINE_float("p_min", 1.0, "acceptance threshold on the target's probability")
    _DRAFT_VOCAB = flags.DEFINE_string("draft_vocab", "auto", "tokens among which drafts are chosen: N, auto or full")
    _DEPTHS = flags.DEFINE_list("depths", ["0", "1", "2", "3", "5"], "values of K, 0 among them")
    _ACT_QUANT = flags.DEFINE_enum("act_quant", "none", ["none", "q8"], "as in sharpi-jax")
    app.run(main)
