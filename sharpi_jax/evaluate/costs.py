"""What a step costs by its draft length, for choosing that length: measured once, then read from the cache folder.

With a stored table a command decides alike whenever it is run, as nothing depends on live timings.
"""

import dataclasses
import hashlib
import itertools
import json
import math
import statistics
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from sharpi_jax import folders
from sharpi_jax.decode.controls import Controls
from sharpi_jax.decode.decoder import Decoder, Plan
from sharpi_jax.decode.state import DecodeState
from sharpi_jax.decode.step import Drafter
from sharpi_jax.evaluate.speed import copied, timed
from sharpi_jax.model.config import ModelConfig
from sharpi_jax.model.params import ModelParams
from sharpi_jax.version import __version__

STEPS = (6, 64)  # of a timing, at least and at most
TIMING_MS = 20.0  # that a timing shall take: a small model's few steps would drown in the machine's noise
ROUNDS = 5
PROMPT_TOKENS = 8
CLOSE = 0.97  # as good as the best speed: a smaller K is worth more than the rest


@dataclasses.dataclass(frozen=True)
class CostKey:
    """What a step's cost depends on, beside the processor and the versions of JAX and of this package.

    Attributes:
      model: `model_signature`, which knows of types and of what multiplies. device: its kind, as JAX names it.
      threads: that compute. method: how drafts are made and judged. K: the most drafts of a step. rows: of the batch.
      slots: of the context. shortlist: tokens that are drafted among; 0 for all.
    """

    model: str
    device: str
    threads: int
    method: str
    K: int
    rows: int
    slots: int
    shortlist: int

    @property
    def file(self) -> str:
        """Where its table is kept, in the cache folder."""
        parts = (f"{name}={value}" for name, value in dataclasses.asdict(self).items())
        return f"costs/{folders.key(*parts, jax.__version__, __version__)}.json"


def model_signature(params: ModelParams, cfg: ModelConfig) -> str:
    """Of a model's shapes, formats and configuration: equal for copies and other names of a file, and for other weights
    in the same shapes, which cost the same."""
    leaves, tree = jax.tree.flatten(params)
    whole = "\n".join((repr(cfg), str(tree), *(f"{x.dtype}{x.shape}" for x in leaves)))
    return hashlib.sha256(whole.encode()).hexdigest()[:16]


def with_step_costs(decoder: Decoder, plan: Plan, threads: int) -> Plan:
    """The plan with what its steps cost, where its draft lengths are chosen by that.

    Where deep drafts would hardly pay even if all were accepted, its K is lowered: a program for a smaller one has less
    to do in every step.

    Args:
      threads: that compute.
    """
    if plan.K == 0 or plan.options.spec_draft_n_max != "auto":
        return plan
    plan = _measured(decoder, plan, threads)
    reach = worthwhile(plan.step_ms)
    return plan if reach == plan.K else _measured(decoder, dataclasses.replace(plan, K=reach), threads)


def worthwhile(step_ms: Sequence[float]) -> int:
    """The fewest drafts of a step, 1 or more, that come close to the most tokens a second if all are accepted."""
    speeds = [(1 + k) / ms for k, ms in enumerate(step_ms)]
    return next(k for k in range(1, len(speeds)) if speeds[k] >= CLOSE * max(speeds[1:]))


def _measured(decoder: Decoder, plan: Plan, threads: int) -> Plan:
    """The plan with its cost table."""
    controls = plan.controls((), traced=False)
    key = CostKey(
        model=model_signature(decoder.params, decoder.cfg),
        device=jax.devices()[0].device_kind,
        threads=threads,
        method=repr(controls.method),
        K=plan.K,
        rows=1,
        slots=plan.slots,
        shortlist=0 if plan.shortlist is None else len(plan.shortlist),
    )

    def measure() -> tuple[float, ...]:
        return measure_step_ms(decoder, controls, K=plan.K, slots=plan.slots, drafter=decoder.drafter(plan.shortlist))

    return dataclasses.replace(plan, step_ms=step_costs(key, measure))


def step_costs(key: CostKey, measure: Callable[[], tuple[float, ...]]) -> tuple[float, ...]:
    """Milliseconds of a step with 0 to K drafts: as stored, else measured, and then stored where that is possible.

    What is stored and does not fit (damaged, of another key, no times) is measured anew.
    """
    fields = dataclasses.asdict(key)
    found = _table(folders.kept(key.file), fields)
    if found is None:
        found = tuple(map(float, measure()))
        folders.keep(key.file, json.dumps({"key": fields, "step_ms": found}, indent=1) + "\n")
    return found


def measure_step_ms(
    decoder: Decoder, controls: Controls, *, K: int, slots: int, drafter: Drafter | None = None
) -> tuple[float, ...]:
    """Times the loop with 0 to K drafts a step in turn, round after round; medians, in milliseconds.

    It is one program, and the one of the run that the controls are for. Noise must not make a deeper step look cheaper,
    so no entry is below the one before it.
    """
    rows = int(controls.p_min.shape[0])
    prompt = [1 + i % (decoder.cfg.vocab_size - 1) for i in range(max(1, min(PROMPT_TOKENS, slots - (K + 1))))]
    room = slots - len(prompt)
    forced = [_forced(controls, k, K) for k in range(K + 1)]
    begin = decoder.prefill([prompt] * rows, [room] * rows, slots, forced[K], K=K)

    def run(k: int, until: int) -> tuple[float, DecodeState]:
        state = copied(begin)
        return timed(decoder, lambda: decoder.advance(state, forced[k], until, drafter))

    # How many tokens a number of steps emits is found step by step; then one call makes as many, with no other time.
    def tokens(k: int, steps: int) -> int:
        return _emitted(decoder, copied(begin), forced[k], drafter, max(1, min(steps, room // (k + 1))))

    few = tokens(0, STEPS[0])
    run(0, few)
    step_ms = 1e3 * run(0, few)[0] / few  # a plain step emits one token
    steps = min(max(STEPS[0], math.ceil(TIMING_MS / max(step_ms, 1e-3))), STEPS[1])
    until = [tokens(k, steps) for k in range(K + 1)]
    times: list[list[float]] = [[] for _ in forced]
    for _ in range(ROUNDS):
        for k, found in enumerate(times):
            seconds, state = run(k, until[k])
            found.append(1e3 * seconds / max(int(state.counters.steps[0]), 1))
    return tuple(itertools.accumulate(map(statistics.median, times), max))


def _forced(controls: Controls, k: int, K: int) -> Controls:
    """k drafts at every step, and no end but that of the budget."""
    depths = jnp.arange(K + 1)
    return controls.replace(  # type: ignore[attr-defined, no-any-return]
        n_max=jnp.full_like(controls.n_max, k),
        step_ms=jnp.where(depths == k, 1.0, 1e9).astype(jnp.float32),  # so that none but k can be worth it
        min_tokens=jnp.full_like(controls.min_tokens, 2**31 - 1),
        stop_p=jnp.zeros_like(controls.stop_p),
        n_min=jnp.zeros_like(controls.n_min),
    )


def _emitted(decoder: Decoder, state: DecodeState, controls: Controls, drafter: Drafter | None, steps: int) -> int:
    """Tokens of a row after so many steps, all rows being alike."""
    for _ in range(steps):
        state = decoder.advance(state, controls, int(state.emitted[0]) + 1, drafter)
    return int(state.emitted[0])


def _table(text: str | None, fields: dict[str, object]) -> tuple[float, ...] | None:
    """A stored file's times, if it is whole and of this key."""
    try:
        whole = json.loads(text or "")
    except (ValueError, RecursionError):
        return None
    if not isinstance(whole, dict) or whole.get("key") != fields:
        return None
    times = whole.get("step_ms")
    if not isinstance(times, list) or len(times) != int(str(fields["K"])) + 1:
        return None
    fit = all(isinstance(ms, float) and 0 < ms < math.inf for ms in times)
    return tuple(times) if fit and times == sorted(times) else None
