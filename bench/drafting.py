"""What drafting gains over plain decoding, on one file and prompt: sides alternated in one process, medians, ratios.

    python bench/drafting.py [--model=FILE.gguf] [--prompt=TEXT] [--max_tokens=64] [--rounds=5] [--p_min=1] \
        [--draft_vocab=auto]

Without a model it takes the demo model that ships with the package: small, but with a trained head.
"""

import statistics

from absl import app, flags

import sharpi_jax
from sharpi_jax.assets import DEMO_MODEL, DEMO_PROMPT

_MODEL = flags.DEFINE_string("model", str(DEMO_MODEL), "GGUF file")
_PROMPT = flags.DEFINE_string("prompt", DEMO_PROMPT, "text to continue")
_MAX_TOKENS = flags.DEFINE_integer("max_tokens", 64, "tokens per run")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "runs per side, after one to compile")
_P_MIN = flags.DEFINE_float("p_min", 1.0, "acceptance threshold on the target's probability")
_DRAFT_VOCAB = flags.DEFINE_string("draft_vocab", "auto", "tokens among which drafts are chosen: N, auto or full")
DEPTHS = (0, 1, 2, 3, 5)


def main(argv: list[str]) -> None:
    del argv
    model = sharpi_jax.load(_MODEL.value)
    among = _DRAFT_VOCAB.value
    sides = {
        depth: sharpi_jax.DecodeOptions(
            max_tokens=_MAX_TOKENS.value,
            spec_type="none" if depth == 0 else "mtp",
            spec_draft_n_max=max(depth, 1),
            spec_draft_p_min=_P_MIN.value,
            spec_draft_vocab=int(among) if among.isdigit() else among,
            ignore_eos=True,
        )
        for depth in DEPTHS
    }
    speeds: dict[int, list[float]] = {depth: [] for depth in sides}
    for _ in range(1 + _ROUNDS.value):
        last = {depth: model.generate(_PROMPT.value, options) for depth, options in sides.items()}
        for depth, run in last.items():
            speeds[depth].append(run.timing.decode_tokens_per_s)
    plain = statistics.median(speeds[0][1:])
    print(f"drafts among {last[1].draft_vocab} of {model.config.vocab_size} tokens")
    print(f"{'K':>2} {'tokens/s':>9} {'ratio':>6} {'accepted':>9} {'tokens/step':>11}  ids of K = 0")
    for depth, run in last.items():
        speed = statistics.median(speeds[depth][1:])
        stats = run.stats
        same = "yes" if run.output_ids == last[0].output_ids else "no"
        accepted = f"{stats.accepted}/{stats.drafted}"
        print(
            f"{depth:>2} {speed:>9.1f} {speed / plain:>6.2f} {accepted:>9} {stats.mean_accepted_length:>11.2f}  {same}"
        )


if __name__ == "__main__":
    app.run(main)
