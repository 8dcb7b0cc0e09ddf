"""Unlearns loops: python -m tools.demo_model.refine --folder=FOLDER, after train.py.

A small model's greedy text repeats itself without end, since a repetition is always the likeliest way on. So the model
writes greedily, and what it repeats is made less likely while it goes on learning from the text (sequence-level
unlikelihood training: Welleck et al. 2020, arXiv 1908.04319). Then the trunk stays as it is, and the head alone learns
from what the trunk writes, since that is where it will have to draft (as FastMTP does, arXiv 2509.18362).

Takes best.npz, leaves `refined.npz` and `refine.csv`.
"""

import itertools
import pathlib
from collections.abc import Callable, Iterator

import jax
import numpy as np
import optax
from absl import app, flags

from sharpi_jax.decode.controls import make_controls
from sharpi_jax.decode.decoder import Decoder
from sharpi_jax.model.rope import RopeTable, rope_table
from tools.demo_model.curve import log
from tools.demo_model.data import FOLDER, corpus
from tools.demo_model.loss import losses, unlikelihood
from tools.demo_model.model import CONFIG, init_trainable, to_params
from tools.demo_model.store import restore, save
from tools.demo_model.train import ROWS, SEED, WIDTH, batch, make_check, make_optimizer
from tools.demo_model.vocabulary import token_stream, train_vocabulary

PROMPT, WRITTEN, GRAM, STEPS_A_ROUND = 33, 160, 6, 4

_ROUNDS = flags.DEFINE_integer("rounds", 50, f"Rounds: the model writes, then {STEPS_A_ROUND} steps.", lower_bound=1)
_RATE = flags.DEFINE_float("refine_rate", 1e-3, "The highest learning rate; it warms up, then falls to 0 by cosine.")
_HEAD_ROUNDS = flags.DEFINE_integer("head_rounds", 30, "Rounds of the head alone after those.", lower_bound=1)
_HEAD_RATE = flags.DEFINE_float("head_rate", 2e-3, "As refine_rate, for the head alone.")
_WEIGHT = flags.DEFINE_float("weight", 4.0, "Of the unlikelihood in the loss.")


def write(decoder: Decoder, prompts: np.ndarray, end_id: int) -> np.ndarray:
    """Each prompt [N, PROMPT] with its greedy continuation: [N, PROMPT + WRITTEN]. The end token is not chosen."""
    rows = len(prompts)
    controls = make_controls([1.0] * rows, [end_id], ignore_eos=True)
    budgets = [WRITTEN] * rows
    state = decoder.prefill(prompts.tolist(), budgets, decoder.slots(PROMPT, WRITTEN), controls, K=0)
    return np.asarray(decoder.advance(state, controls, WRITTEN).tokens)[:, : PROMPT + WRITTEN]


def repeats(row: np.ndarray, gram: int = GRAM) -> np.ndarray:
    """Whether each id ends a run of `gram` ids that the row has held before: [T] bool."""
    seen: set[bytes] = set()
    found = np.zeros(len(row), bool)
    for end in range(gram, len(row) + 1):
        key = row[end - gram : end].tobytes()
        found[end - 1] = key in seen
        seen.add(key)
    return found


def unlearning(rope: RopeTable) -> Callable[..., tuple[jax.Array, dict]]:
    """(trainable, None, text, written, unwanted) -> the loss of the first rounds, and its parts."""

    def objective(trainable, _, text, written, unwanted):
        params = to_params(trainable)
        total, parts = losses(params, CONFIG, text, rope)
        unlikely = unlikelihood(params, CONFIG, written, unwanted, rope)
        return total + _WEIGHT.value * unlikely, parts | {"unlikelihood": unlikely}

    return objective


def head_alone(rope: RopeTable) -> Callable[..., tuple[jax.Array, dict]]:
    """(the MTP block, the whole model, text, written, unwanted) -> the loss of the last rounds, and its parts."""

    def objective(mtp, trainable, text, written, unwanted):
        params = to_params(trainable.replace(mtp=mtp))
        of_text, of_written = (losses(params, CONFIG, ids, rope) for ids in (text, written))
        # The trunk's own part of the loss does not depend on the head.
        return of_text[0] + of_written[0], of_written[1]

    return objective


def make_step(objective: Callable, optimizer: optax.GradientTransformation) -> Callable:
    """(what is trained, optimiser state, what is not, a batch's arrays) -> the first two after a step; loss's parts."""

    @jax.jit
    def step(trained, state, fixed, *arrays):
        grads, parts = jax.grad(objective, has_aux=True)(trained, fixed, *arrays)
        updates, state = optimizer.update(grads, state, trained)
        return optax.apply_updates(trained, updates), state, parts

    return step


def batches(decoder: Decoder, train: np.ndarray, end_id: int, seed: int) -> Iterator[tuple[np.ndarray, ...]]:
    """What the decoder writes after the text's own beginnings, rows at a time: text, written, unwanted; without end."""
    rng = np.random.default_rng(SEED + seed)
    for index in itertools.count():
        if index % STEPS_A_ROUND == 0:
            starts = rng.integers(len(train) - PROMPT, size=STEPS_A_ROUND * ROWS)
            written = write(decoder, np.stack([train[s : s + PROMPT] for s in starts]), end_id)
            unwanted = np.stack([repeats(row) for row in written])
            unwanted[:, :PROMPT] = False
        rows = slice(index % STEPS_A_ROUND * ROWS, (index % STEPS_A_ROUND + 1) * ROWS)
        # Past train.py's epochs, so that the windows are cut elsewhere.
        yield batch(train, 10**5 * (1 + seed) + index), written[rows], unwanted[rows, 1:]


def schedule(rounds: int, rate: float) -> optax.Schedule:
    steps = rounds * STEPS_A_ROUND
    return optax.warmup_cosine_decay_schedule(0.0, rate, steps // 10 + 1, steps)


def report(folder: pathlib.Path, index: int, arrays: tuple[np.ndarray, ...], parts: dict) -> None:
    """A row of refine.csv, of the round's last batch: losses on the text, in the head's rounds on what was written."""
    row = {"round": index, "repeated": float(arrays[2][:, PROMPT - 1 :].mean()), "unlikelihood": float("nan")}
    log(folder / "refine.csv", row | {name: float(value) for name, value in parts.items()})


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]}")
    folder = pathlib.Path(FOLDER.value)
    if not (folder / "best.npz").exists():
        raise SystemExit(f"{folder} holds no best.npz; run python -m tools.demo_model.train --folder={folder} first.")
    (folder / "refine.csv").unlink(missing_ok=True)
    text = corpus(folder)
    vocabulary = train_vocabulary(text.train)
    train, validation = (token_stream(vocabulary, part) for part in (text.train, text.validation))
    rope = rope_table(WIDTH, CONFIG.rope_dims, CONFIG.rope_base)
    trainable = restore(folder / "best.npz", init_trainable(CONFIG, jax.random.key(SEED)))
    decoder = Decoder(to_params(trainable), CONFIG)

    optimizer = make_optimizer(schedule(_ROUNDS.value, _RATE.value))
    step, state = make_step(unlearning(rope), optimizer), optimizer.init(trainable)
    source = batches(decoder, train, vocabulary.end_id, 0)
    for index in range(_ROUNDS.value):
        decoder.params = to_params(trainable)
        for arrays in itertools.islice(source, STEPS_A_ROUND):
            trainable, state, parts = step(trainable, state, None, *arrays)
        report(folder, index + 1, arrays, parts)
    save(folder / "unlearned.npz", trainable)

    decoder.params, mtp = to_params(trainable), trainable.mtp
    optimizer = make_optimizer(schedule(_HEAD_ROUNDS.value, _HEAD_RATE.value))
    step, state = make_step(head_alone(rope), optimizer), optimizer.init(mtp)
    source = batches(decoder, train, vocabulary.end_id, 1)
    for index in range(_HEAD_ROUNDS.value):
        for arrays in itertools.islice(source, STEPS_A_ROUND):
            mtp, state, parts = step(mtp, state, trainable, *arrays)
        report(folder, _ROUNDS.value + index + 1, arrays, parts)
    trainable = trainable.replace(mtp=mtp)
    save(folder / "refined.npz", trainable)
    print({f"validation_{n}": round(x, 3) for n, x in make_check(validation, rope)(trainable).items()})


if __name__ == "__main__":
    app.run(main)
