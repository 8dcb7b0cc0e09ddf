"""Held-out figures of an exported model: python -m tools.demo_model.evaluate --folder=FOLDER --model=FILE.gguf.

Prints the tables that README.md holds, in Markdown. The text is the test chapters, which neither training nor the
choice of a checkpoint has seen.
"""

import json
import pathlib
from collections.abc import Iterator

import numpy as np
from absl import app, flags

import sharpi_jax
from sharpi_jax import Generation, Model
from sharpi_jax.evaluate import Agreement
from tools.demo_model import measures
from tools.demo_model.data import FOLDER, corpus
from tools.demo_model.prompts import held_out_prompts
from tools.demo_model.vocabulary import token_stream, train_vocabulary

_MODEL = flags.DEFINE_string("model", None, "The GGUF; the model that ships with the package if not given.")
_PROMPTS = flags.DEFINE_integer("prompts", 50, "Held-out prompts to decode.", lower_bound=1)
_TOKENS = flags.DEFINE_integer("max_tokens", 96, "Tokens to decode for each.", lower_bound=16)
_SAVE = flags.DEFINE_string("save_text", None, "Also write the prompts and the test text's windows to this JSON file.")
SAMPLES = 10
P_MINS = (1.0, 0.5, 0.3, 0.1, 0.03)


def text_tables(model: Model, stream: np.ndarray) -> Iterator[str]:
    """Bits per byte, and the head's agreement by depth."""
    pieces = measures.windows(stream)
    bits, size = np.sum([measures.bits_per_byte(model, piece.tolist()) for piece in pieces], axis=0)
    yield f"Bits per byte of the trunk: {bits / size:.3f} ({size:.0f} bytes, windows of {measures.WINDOW} tokens)"
    decoder = model.decoder
    wrong = {
        "its input's halves swapped": measures.swapped_halves(decoder.params),
        "pre-norm hidden": measures.without_final_norm(decoder.params),
    }
    sides = {"the head": measures.depth_hits(decoder, pieces)}
    sides |= {n: measures.depth_hits(decoder, pieces, measures.with_params(decoder, p)) for n, p in wrong.items()}
    yield f"\n| agreement with the trunk's argmax, {sides['the head'].shape[1]} positions | depth 1 | 2 | 3 |"
    yield "|---|---|---|---|"
    for name, hits in sides.items():
        side = Agreement.of(hits)
        cells = " | ".join(f"{side.rate(d):.1%} ± {side.standard_error(d):.1%}" for d in (1, 2, 3))
        yield f"| {name} | {cells} |"
    gain = sides["the head"][0].astype(float) - sides["pre-norm hidden"][0]
    yield f"\nPost-norm less pre-norm at depth 1: {gain.mean():.3%}, standard error {gain.std() / len(gain) ** 0.5:.3%}"


def acceptance_table(runs: dict[int, list[Generation]]) -> Iterator[str]:
    """One row per K, counted up to each output's first repeated 12-gram."""
    yield "\n| K | drafted | accepted | acceptance | mean accepted length | outputs that loop |"
    yield "|---|---|---|---|---|---|"
    for K, generations in runs.items():
        counts = measures.counts_before_loops(generations)
        yield (
            f"| {K} | {counts.drafted} | {counts.accepted} | {counts.acceptance_rate:.1%} "
            f"| {counts.mean_accepted_length:.2f} | {counts.loops} of {len(generations)} |"
        )


def p_min_table(model: Model, runs: dict[float, list[Generation]]) -> Iterator[str]:
    """One row per p_min at one K: what the lossy rule gains, and what it costs."""
    plain = runs[1.0]
    yield (
        "\n| p_min | acceptance | accepted by p_min | tokens per step | identical to greedy | median first divergence "
        "| bits per byte of the text |"
    )
    yield "|---|---|---|---|---|---|---|"
    for p_min, generations in runs.items():
        counts = measures.counts_before_loops(generations)
        by_p_min = (counts.accepted - counts.by_argmax) / counts.accepted
        parted = [
            next(i for i, (a, b) in enumerate(zip(g.output_ids, p.output_ids, strict=True), 1) if a != b)
            for g, p in zip(generations, plain, strict=True)
            if g.output_ids != p.output_ids
        ]
        bits, size = np.sum(
            [
                measures.bits_per_byte(model, [*g.prompt_ids, *g.output_ids], start=len(g.prompt_ids))
                for g in generations
            ],
            axis=0,
        )
        yield (
            f"| {p_min:g} | {counts.acceptance_rate:.1%} | {by_p_min:.1%} "
            f"| {counts.mean_accepted_length:.2f} | {len(generations) - len(parted)} of {len(generations)} "
            f"| {f'token {np.median(parted):.0f}' if parted else 'none'} | {bits / size:.3f} |"
        )


def samples(model: Model, runs: list[Generation]) -> Iterator[str]:
    """The first outputs, unedited: the prompt in bold."""
    for run in runs[:SAMPLES]:
        prompt, text = (" / ".join(part.split("\n")) for part in (model.tokenizer.decode(run.prompt_ids), run.text))
        yield f"\n> **{prompt.strip()}**{text}"


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]}")
    text = corpus(pathlib.Path(FOLDER.value))
    model = sharpi_jax.load(_MODEL.value) if _MODEL.value else sharpi_jax.load()
    prompts = held_out_prompts(model, text.test, _PROMPTS.value)
    stream = token_stream(train_vocabulary(text.train), text.test)
    if _SAVE.value:
        held_out = {"prompts": prompts, "windows": measures.windows(stream).tolist()}
        pathlib.Path(_SAVE.value).write_text(json.dumps(held_out, separators=(",", ":")) + "\n")
    for line in text_tables(model, stream):
        print(line, flush=True)
    by_K = {K: measures.decode(model, prompts, K, 1.0, _TOKENS.value) for K in (1, 2, 3, 4)}
    for line in acceptance_table(by_K):
        print(line, flush=True)
    by_p_min = {p: by_K[3] if p == 1 else measures.decode(model, prompts, 3, p, _TOKENS.value) for p in P_MINS}
    for line in p_min_table(model, by_p_min):
        print(line, flush=True)
    for line in samples(model, by_K[1]):
        print(line)


if __name__ == "__main__":
    app.run(main)
