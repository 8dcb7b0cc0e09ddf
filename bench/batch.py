"""What decoding many prompts at once gains: tokens/s of a batch against one row at a time, on the same prompts.

    python -m bench.batch [--model=FILE.gguf] [--batch_size=16] [--depths=0,3] [--max_tokens=64] [--prompts=32] \
        [--rounds=5] [--act_quant=q8]

Sides are alternated in one process, medians are shown, and the time is the loop's own: without prefill and compilation.
Rows are replaced as they finish, so the last few rows of a run are not a full batch. Without a model it takes the demo
model, on prompts of its own domain; other models get the built-in prompts of nine kinds of work.
"""

import statistics
import time
from collections import defaultdict

import numpy as np
from absl import app, flags

import sharpi_jax
from sharpi_jax.assets import DEMO_MODEL
from sharpi_jax.evaluate.batch import BatchOptions, Job, run_jobs
from sharpi_jax.evaluation_files import default_prompts

_MODEL = flags.DEFINE_string("model", str(DEMO_MODEL), "GGUF file")
_BATCH = flags.DEFINE_integer("batch_size", 16, "rows at once")
_DEPTHS = flags.DEFINE_list("depths", ["0", "3"], "drafts per step")
_MAX_TOKENS = flags.DEFINE_integer("max_tokens", 64, "tokens of each prompt")
_PROMPTS = flags.DEFINE_integer("prompts", 32, "prompts; the built-in ones are repeated")
_ACT_QUANT = flags.DEFINE_enum("act_quant", "none", ["none", "q8"], "whether activations are rounded to int8")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "runs per side, after one to compile")


def main(argv: list[str]) -> None:
    del argv
    model = sharpi_jax.load(_MODEL.value, act_quant=_ACT_QUANT.value)
    texts = [prompt.text or "" for prompt in default_prompts(model.path)]
    prompts = [tuple(model.tokenizer.encode_prompt(texts[i % len(texts)])) for i in range(_PROMPTS.value)]
    jobs = [Job(prompt, _MAX_TOKENS.value) for prompt in prompts]
    slots = model.decoder.slots(max(map(len, prompts)), _MAX_TOKENS.value)
    sides = [(int(K), rows) for K in _DEPTHS.value for rows in (1, _BATCH.value)]
    speeds: dict[tuple[int, int], list[float]] = defaultdict(list)
    whole: dict[tuple[int, int], list[float]] = defaultdict(list)
    texts_of: dict[tuple[int, int], list[tuple[int, ...]]] = {}
    for _ in range(1 + _ROUNDS.value):
        for K, rows in sides:
            slices: list[tuple[int, float]] = []
            options = BatchOptions(K, rows, slots, tuple(model.tokenizer.stop_ids), recorded=False)
            began, compiled = time.perf_counter(), model.decoder.programs.compile_s
            done = sorted(
                run_jobs(model.decoder, jobs, options, lambda *x, s=slices: s.append(x)), key=lambda f: f.index
            )
            spent = time.perf_counter() - began - (model.decoder.programs.compile_s - compiled)
            tokens, seconds = np.sum(slices, axis=0)
            speeds[K, rows].append(tokens / seconds)
            whole[K, rows].append(tokens / spent)
            texts_of[K, rows] = [f.output_ids for f in done]
    print(
        f"{len(jobs)} prompts, {_MAX_TOKENS.value} tokens each at most, contexts of {slots}; medians of {_ROUNDS.value}"
    )
    print(f"{'K':>2} {'rows':>4} {'tokens/s':>9} {'ratio':>6} {'with prefill':>12} {'ratio':>6}  ids of one row")
    for K, rows in sides:
        loop, all_ = (statistics.median(kept[K, rows][1:]) for kept in (speeds, whole))
        one, one_all = (statistics.median(kept[K, 1][1:]) for kept in (speeds, whole))
        same = "yes" if texts_of[K, rows] == texts_of[K, 1] else "no"
        print(f"{K:>2} {rows:>4} {loop:>9.1f} {loop / one:>6.2f} {all_:>12.1f} {all_ / one_all:>6.2f}  {same}")


if __name__ == "__main__":
    app.run(main)
