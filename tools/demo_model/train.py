"""Trains the demo model: python -m tools.demo_model.train --folder=FOLDER. Interrupted, the same command goes on.

What it leaves in FOLDER: `best.npz` (the weights of least validation loss), `state.npz` (to go on from), `curve.csv`
and `curve.png`. `refine.py` goes on from best.npz.
"""

import dataclasses
import pathlib
import time
from collections.abc import Callable

import jax
import numpy as np
import optax
from absl import app, flags

from sharpi_jax.model.rope import RopeTable, rope_table
from tools.demo_model.curve import log, plot
from tools.demo_model.data import FOLDER, Corpus, corpus
from tools.demo_model.loss import losses
from tools.demo_model.model import CONFIG, init_trainable, to_params
from tools.demo_model.store import restore, save
from tools.demo_model.vocabulary import token_stream, train_vocabulary

ROWS, WIDTH, CHECK_EVERY, SEED = 8, 256, 50, 0
HORIZON, COOLDOWN, WARMUP = 1400, 200, 60

_STEPS = flags.DEFINE_integer("steps", 1000, f"Optimiser steps of {ROWS} x {WIDTH} tokens.", lower_bound=2)
_RATE = flags.DEFINE_float("learning_rate", 4e-3, "The highest learning rate.")
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Operands of the matrix products.")


def batch(stream: np.ndarray, step: int) -> np.ndarray:
    """Step's windows [ROWS, WIDTH + 1]: each epoch cuts the stream at another offset and shuffles the pieces."""
    per_epoch = (len(stream) - WIDTH - 1) // WIDTH // ROWS
    epoch, index = divmod(step, per_epoch)
    rng = np.random.default_rng((SEED, epoch))
    offset = int(rng.integers(WIDTH))
    starts = offset + WIDTH * rng.permutation(per_epoch * ROWS)[index * ROWS : (index + 1) * ROWS]
    return np.stack([stream[start : start + WIDTH + 1] for start in np.minimum(starts, len(stream) - WIDTH - 1)])


def make_schedule(steps: int, rate: float) -> optax.Schedule:
    """Warm-up, a cosine towards 0 at HORIZON, and over the last COOLDOWN steps a straight line to 0.

    So a run may be ended earlier than HORIZON, or later, at the price of the last COOLDOWN steps alone.
    """
    warmup, cooldown = min(WARMUP, steps // 10 + 1), min(COOLDOWN, steps // 2)
    cosine = optax.warmup_cosine_decay_schedule(0.0, rate, warmup, max(HORIZON, steps))
    turn = steps - cooldown
    return optax.join_schedules([cosine, optax.linear_schedule(cosine(turn), 0.0, cooldown)], [turn])


def make_optimizer(schedule: optax.Schedule) -> optax.GradientTransformation:
    """Muon for the matrices; Adam for the embedding table, which is no map between features, and for vectors."""

    def by_muon(trainable: object) -> object:
        def choose(path: tuple[object, ...], leaf: jax.Array) -> optax.contrib.MuonDimensionNumbers | None:
            is_matrix = leaf.ndim == 2 and min(leaf.shape) >= 16 and ".embed" not in jax.tree_util.keystr(path)
            return optax.contrib.MuonDimensionNumbers(1, 0) if is_matrix else None

        return jax.tree_util.tree_map_with_path(choose, trainable)

    muon = optax.contrib.muon(
        schedule,
        adam_b2=0.95,
        weight_decay=0.1,
        weight_decay_mask=lambda tree: jax.tree.map(lambda leaf: leaf.ndim == 2, tree),
        muon_weight_dimension_numbers=by_muon,
        consistent_rms=0.2,
    )
    return optax.chain(optax.clip_by_global_norm(1.0), muon)


def make_step(optimizer: optax.GradientTransformation, rope: RopeTable) -> Callable[..., tuple[object, object, dict]]:
    """(trainable, optimiser state, text) -> the two after one step, and the loss's parts."""
    cfg = dataclasses.replace(CONFIG, dtype=_DTYPE.value)

    @jax.jit
    def step(trainable, state, text):
        grads, parts = jax.grad(lambda tree: losses(to_params(tree), cfg, text, rope), has_aux=True)(trainable)
        updates, state = optimizer.update(grads, state, trainable)
        return optax.apply_updates(trainable, updates), state, parts

    return step


def make_check(stream: np.ndarray, rope: RopeTable) -> Callable[[object], dict[str, float]]:
    """The loss's parts over the validation stream's first windows, in float32."""
    windows = min(6, (len(stream) - 1) // (ROWS * WIDTH))
    texts = [
        np.stack([stream[s : s + WIDTH + 1] for s in range(i * ROWS * WIDTH, (i + 1) * ROWS * WIDTH, WIDTH)])
        for i in range(windows)
    ]
    run = jax.jit(lambda tree, text: losses(to_params(tree), CONFIG, text, rope)[1])

    def check(trainable: object) -> dict[str, float]:
        parts = [run(trainable, text) for text in texts]
        return {name: float(np.mean([part[name] for part in parts])) for name in parts[0]}

    return check


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]}")
    folder = pathlib.Path(FOLDER.value)
    folder.mkdir(parents=True, exist_ok=True)
    text: Corpus = corpus(folder)
    vocabulary = train_vocabulary(text.train)
    train, validation = (token_stream(vocabulary, part) for part in (text.train, text.validation))
    bytes_per_token = sum(len(part.encode()) for part in text.validation) / len(validation)
    print(f"{len(train)} training tokens, {bytes_per_token:.3f} bytes per token", flush=True)

    rope = rope_table(WIDTH, CONFIG.rope_dims, CONFIG.rope_base)
    optimizer = make_optimizer(make_schedule(_STEPS.value, _RATE.value))
    trainable = init_trainable(CONFIG, jax.random.key(SEED))
    carried = (trainable, optimizer.init(trainable), np.int32(0), np.float32(np.inf))
    carried = restore(folder / "state.npz", carried)
    step, check = make_step(optimizer, rope), make_check(validation, rope)
    for start in range(int(carried[2]), _STEPS.value, CHECK_EVERY):
        trainable, state, _, best = carried
        began, seen = time.perf_counter(), []
        for index in range(start, min(start + CHECK_EVERY, _STEPS.value)):
            trainable, state, parts = step(trainable, state, batch(train, index))
            seen.append(parts)
        averages = {f"train_{name}": float(np.mean([part[name] for part in seen])) for name in seen[0]}
        row = {"step": index + 1, "seconds": time.perf_counter() - began} | averages
        row |= {f"validation_{name}": value for name, value in check(trainable).items()}
        row["bits_per_byte"] = row["validation_trunk"] / np.log(2) / bytes_per_token
        log(folder / "curve.csv", row)
        total = row["validation_trunk"] + 0.3 * row["validation_mtp_1"]
        if total < best:
            save(folder / "best.npz", trainable)
        carried = (trainable, state, np.int32(index + 1), np.float32(min(best, total)))
        save(folder / "state.npz", carried)
    plot(folder)


if __name__ == "__main__":
    app.run(main)
