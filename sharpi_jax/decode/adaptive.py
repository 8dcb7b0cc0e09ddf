"""How many drafts the next step shall have: a running estimate of what is accepted, weighed against what steps cost.

Each depth has a rate, estimated from the steps that reached it: a mean that forgets, so that it follows the text. What
was not tried lately forgets too, down to the weight of one observation, so that one probe can turn it. A depth leans on
the one before it, which is all that is known of a depth never reached.

The draft length is the one that promises most tokens per millisecond. If it leaves depths out, the next best length
that reaches deeper is tried now and then: once what it is expected to lose is a small share of the time since it was
last tried. So hopeless probes are rare and near misses frequent, and what all of them cost is bounded.

No step depends on a clock or on chance: the same text and costs give the same lengths. Results are also the same to
the bit in any batch, whichever products and sums the compiler joins, since every product that meets a sum is exact:
its factor is a power of two, or both are multiples of 1 / GRID.

The constants were chosen among a hundred combinations by simulations like those of tests/test_adaptive.py; others near
them lose little more.
"""

import jax
import jax.numpy as jnp
from flax import struct

FORGET = 1 / 32  # of what a depth knows, by each observation
FADE = 1 / 64  # of what it knows, by each step that does not reach it
FIRST_RATE = 0.75  # of depth 1 before anything was seen: hopeful, since a head that is not tried shows nothing
FIRST_WEIGHT = 2.0  # in observations
LEAN = 2.0  # weight of the depth before, in observations
PROBE_EVERY = 96.0  # times what a probe is expected to lose: it may come when so much time has gone by without one
GRID = 4096.0


@struct.dataclass
class Acceptance:
    """What is known of a row's drafts; the loop carries it. Entry j stands for depth j + 1.

    Attributes:
      hits, tries: [B, K] float32, how often a draft was accepted and reached (all before it accepted), with forgetting.
      idle: [B, K] int32, steps since it was last proposed.
    """

    hits: jax.Array
    tries: jax.Array
    idle: jax.Array

    @property
    def rate(self) -> jax.Array:
        """[B, K] float32, a multiple of 1 / GRID: of a draft's acceptance, given that all before it are accepted."""
        rates: list[jax.Array] = []
        for j in range(self.hits.shape[1]):
            hits, tries = self.hits[:, j], self.tries[:, j]
            before = (hits + LEAN * rates[-1]) / (tries + LEAN) if rates else hits / tries
            rates.append(_on_grid(before))
        return jnp.stack(rates, axis=1) if rates else self.hits


def init_acceptance(rows: int, K: int) -> Acceptance:
    """Nothing seen yet."""
    weight = jnp.where(jnp.arange(K) == 0, FIRST_WEIGHT, 0.0).astype(jnp.float32)
    weight = jnp.broadcast_to(weight, (rows, K))
    return Acceptance(weight * FIRST_RATE, weight, jnp.zeros((rows, K), jnp.int32))


def choose_draft_length(acceptance: Acceptance, step_ms: jax.Array, most: jax.Array) -> jax.Array:
    """The drafts that each row's next step shall have, [B] int32 in [0, min(K, most)]; the fewest among equals.

    Args:
      step_ms: [K + 1] float32 > 0, what a step with k drafts takes in all. Each row decides as if it were alone.
      most: [B] int32, what budget and context leave room for; below 0 is 0.
    """
    depths = jnp.arange(acceptance.hits.shape[1] + 1, dtype=jnp.int32)[None, :]
    tokens = _expected_tokens(acceptance)
    allowed = depths <= jnp.maximum(most, 0)[:, None]
    speed = jnp.where(allowed, tokens / step_ms[None, :], -1.0)
    best = jnp.argmax(speed, axis=1).astype(jnp.int32)
    if depths.shape[1] == 1:
        return best

    beyond = jnp.where(depths > best[:, None], speed, -1.0)
    deeper = jnp.argmax(beyond, axis=1).astype(jnp.int32)
    # Where nothing lies beyond, `deeper` is 0, and what is read for it does not count.
    lost_ms = step_ms[deeper] - _entry(tokens, deeper) / _entry(speed, best)
    idle_ms = _entry(acceptance.idle, jnp.maximum(deeper - 1, 0)).astype(jnp.float32) * step_ms[best]
    probe = (_entry(beyond, deeper) > 0) & (idle_ms >= lost_ms * PROBE_EVERY)
    return jnp.where(probe, deeper, best)


def observe(acceptance: Acceptance, proposed: jax.Array, accepted: jax.Array, active: jax.Array) -> Acceptance:
    """What is known after a step.

    Args:
      proposed: [B] int32, drafts asked for. If drafting may stop by itself, still those asked for: a draft that was not
        made is a token not won. accepted: [B] int32, those let through, at most `proposed`. active: [B] bool; other
        rows learn nothing.
    """
    depth = jnp.arange(acceptance.hits.shape[1], dtype=jnp.int32)[None, :]
    asked = depth < proposed[:, None]
    reached = asked & (depth <= accepted[:, None])
    hit = (depth < accepted[:, None]).astype(jnp.float32)
    part = jnp.where(reached, FORGET, jnp.where(acceptance.tries > 1, FADE, 0.0)).astype(jnp.float32)

    def after(old: jax.Array, seen: jax.Array) -> jax.Array:
        return jnp.where(active[:, None], old - old * part + jnp.where(reached, seen, 0.0), old)

    idle = jnp.where(active[:, None], jnp.where(asked, 0, acceptance.idle + 1), acceptance.idle)
    return Acceptance(after(acceptance.hits, hit), after(acceptance.tries, jnp.float32(1)), idle)


def _expected_tokens(acceptance: Acceptance) -> jax.Array:
    """[B, K + 1] float32: the certain token, and each draft by the chance that it and all before it are accepted."""
    rate = acceptance.rate
    chance = jnp.ones(rate.shape[0], jnp.float32)
    tokens = [chance]
    for j in range(rate.shape[1]):
        chance = _on_grid(chance * rate[:, j])
        tokens.append(tokens[-1] + chance)
    return jnp.stack(tokens, axis=1)


def _on_grid(x: jax.Array) -> jax.Array:
    """The next multiple of 1 / GRID below; products of two such numbers up to 1 are exact in float32."""
    return jnp.floor(x * GRID) / GRID


def _entry(x: jax.Array, index: jax.Array) -> jax.Array:
    """[B] of [B, n]: of each row, the entry at its index."""
    return jnp.take_along_axis(x, index[:, None], axis=1)[:, 0]
