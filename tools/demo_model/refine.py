"""Unlearns loops: python -m tools.demo_model.refine --folder=FOLDER, after train.py.

A small model's greedy text repeats itself without end, since a repetition is always the likeliest way on. So the model
writes greedily, and what it repeats is made less likely while it goes on learning from the text (sequence-level
unlikelihood training: Welleck et al. 2020, arXiv 1908.04319). Takes best.npz, leaves `refined.npz` and `refine.csv`.
"""

import pathlib
from collections.abc import Callable

import jax
import numpy as np
import optax
from absl import app, flags

from sharpi_jax.decode.decoder import Decoder, make_controls
from sharpi_jax.model.rope import RopeTable, rope_table
from tools.demo_model.curve import log
from tools.demo_model.data import FOLDER, corpus
from tools.demo_model.loss import losses, unlikelihood
from tools.demo_model.model import CONFIG, init_trainable, to_params
from tools.demo_model.store import restore, save
from tools.demo_model.train import ROWS, SEED, WIDTH, batch, make_check, make_optimizer
from tools.demo_model.vocabulary import token_stream, train_vocabulary

PROMPT, WRITTEN, GRAM, STEPS_A_ROUND = 33, 160, 6, 4

_ROUNDS = flags.DEFINE_integer("rounds", 40, f"Rounds: the model writes, then {STEPS_A_ROUND} steps.", lower_bound=1)
_RATE = flags.DEFINE_float("refine_rate", 1e-3, "The highest learning rate; it warms up, then falls to 0 by cosine.")
_WEIGHT = flags.DEFINE_float("weight", 1.0, "Of the unlikelihood in the loss.")


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


def make_step(optimizer: optax.GradientTransformation, rope: RopeTable) -> Callable[..., tuple[object, object, dict]]:
    """(trainable, optimiser state, text, written, unwanted) -> the two after one step, and the loss's parts."""

    def objective(tree, text, written, unwanted):
        params = to_params(tree)
        total, parts = losses(params, CONFIG, text, rope)
        unlikely = unlikelihood(params, CONFIG, written, unwanted, rope)
        return total + _WEIGHT.value * unlikely, parts | {"unlikelihood": unlikely}

    @jax.jit
    def step(trainable, state, text, written, unwanted):
        grads, parts = jax.grad(objective, has_aux=True)(trainable, text, written, unwanted)
        updates, state = optimizer.update(grads, state, trainable)
        return optax.apply_updates(trainable, updates), state, parts

    return step


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
    steps = _ROUNDS.value * STEPS_A_ROUND
    optimizer = make_optimizer(optax.warmup_cosine_decay_schedule(0.0, _RATE.value, steps // 10 + 1, steps))
    trainable = restore(folder / "best.npz", init_trainable(CONFIG, jax.random.key(SEED)))
    state = optimizer.init(trainable)
    step, check = make_step(optimizer, rope), make_check(validation, rope)
    rng, decoder = np.random.default_rng(SEED), Decoder(to_params(trainable), CONFIG)
    for index in range(_ROUNDS.value):
        starts = rng.integers(len(train) - PROMPT, size=STEPS_A_ROUND * ROWS)
        decoder.params = to_params(trainable)
        written = write(decoder, np.stack([train[s : s + PROMPT] for s in starts]), vocabulary.end_id)
        unwanted = np.stack([repeats(row) for row in written])
        unwanted[:, :PROMPT] = False
        for i in range(STEPS_A_ROUND):
            rows = slice(i * ROWS, (i + 1) * ROWS)
            # Past train.py's epochs, so that the windows are cut elsewhere.
            real = batch(train, 10**5 + index * STEPS_A_ROUND + i)
            trainable, state, parts = step(trainable, state, real, written[rows], unwanted[rows, 1:])
        row = {"round": index + 1, "repeated": float(unwanted[:, PROMPT:].mean())}
        log(folder / "refine.csv", row | {name: float(value) for name, value in parts.items()})
    save(folder / "refined.npz", trainable)
    print({f"validation_{name}": round(value, 3) for name, value in check(trainable).items()})


if __name__ == "__main__":
    app.run(main)
