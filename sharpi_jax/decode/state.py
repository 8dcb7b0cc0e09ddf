"""What the decode loop carries. Everything is per row.

Invariants, between any two steps:
  - the trunk's caches cover exactly the positions [0, length); `next_token` is the certain token of position
    `length`: not in `tokens`, in no cache, not yet emitted;
  - the MTP cache covers [0, length - accepted) from the trunk's hiddens; the entries of the last `accepted` positions
    and of `length` are (re)written by the next draft's first pass, from `window_hidden`;
  - an unfinished row can emit: its budget is at least 1, its next token is no stop token, its context has room;
  - a finished row never changes again.
"""

import jax
import jax.numpy as jnp
from flax import struct

from sharpi_jax.model.cache import KVCache, TrunkCache

RUNNING, STOP, LENGTH, CONTEXT = range(4)
FINISH_REASONS = ("", "stop", "length", "context")


@struct.dataclass
class Controls:
    """What steers a run without recompiling it.

    Attributes:
      p_min: [B] float32, acceptance threshold on the target's probability; values <= 0 mean 1.
      stop_ids: [M] int32, tokens that end a row. suppress_ids: [M] int32, tokens whose logits are masked to -inf.
        Unused places of both hold NO_TOKEN.
      traced: bool scalar, whether probabilities of drafts are asked for where no p_min needs them.
    """

    p_min: jax.Array
    stop_ids: jax.Array
    suppress_ids: jax.Array
    traced: jax.Array

    @property
    def wants_probabilities(self) -> jax.Array:
        """Bool scalar: without them a step saves a pass of exp over its logits, and LastStep has NaN."""
        return self.traced | jnp.any((self.p_min > 0) & (self.p_min < 1))


NO_TOKEN = 2**31 - 1


@struct.dataclass
class Counters:
    """Statistics, [B] or [B, K] int32; decode/stats.py defines each."""

    steps: jax.Array
    accepted_argmax: jax.Array
    drafted_per_position: jax.Array
    accepted_per_position: jax.Array


@struct.dataclass
class LastStep:
    """What the last step did, for the trace: position, token, proposed, passed, accepted [B]; the others [B, K]."""

    position: jax.Array
    token: jax.Array
    proposed: jax.Array
    passed: jax.Array
    accepted: jax.Array
    drafts: jax.Array
    probability: jax.Array
    is_argmax: jax.Array


@struct.dataclass
class DecodeState:
    """The loop's carry. `mtp` is None, and K is 0, when drafting is off.

    Attributes:
      tokens: [B, S] int32, prompt and output up to `length`.
      prompt_length, length, budget: [B] int32; budget is what may still be emitted.
      next_token: [B] int32.
      window_hidden: [B, K+1, D], the trunk's post-final-norm hiddens at positions length - accepted - 1 to length - 1,
        in its first accepted + 1 entries.
      accepted: [B] int32, drafts that the last step emitted.
      finish: [B] int32, an index of FINISH_REASONS.
    """

    tokens: jax.Array
    prompt_length: jax.Array
    length: jax.Array
    budget: jax.Array
    next_token: jax.Array
    window_hidden: jax.Array
    accepted: jax.Array
    finish: jax.Array
    trunk: TrunkCache
    mtp: KVCache | None
    counters: Counters
    last: LastStep

    @property
    def slots(self) -> int:
        """S, the context."""
        return int(self.tokens.shape[1])

    @property
    def draft_length(self) -> int:
        """K."""
        return int(self.window_hidden.shape[1]) - 1

    @property
    def active(self) -> jax.Array:
        """[B] bool."""
        return self.finish == RUNNING

    @property
    def emitted(self) -> jax.Array:
        """[B] int32, tokens put out so far."""
        return self.length - self.prompt_length


def finish_code(
    next_token: jax.Array, length: jax.Array, budget: jax.Array, slots: int, controls: Controls
) -> jax.Array:
    """[B] index of FINISH_REASONS for a row that stands before its next step; the first that applies wins."""
    is_stop = jnp.any(next_token[:, None] == controls.stop_ids[None, :], axis=-1)
    return jnp.where(
        budget <= 0, LENGTH, jnp.where(is_stop, STOP, jnp.where(length >= slots, CONTEXT, RUNNING))
    ).astype(jnp.int32)


def suppress(logits: jax.Array, controls: Controls) -> jax.Array:
    """Logits [..., V] with the suppressed ids at -inf; NO_TOKEN lies outside the vocabulary and is dropped."""
    return logits.at[..., controls.suppress_ids].set(-jnp.inf, mode="drop")


def init_counters(rows: int, K: int) -> Counters:
    """All zero."""
    return Counters(_zeros(rows), _zeros(rows), _zeros(rows, K), _zeros(rows, K))


def init_last_step(rows: int, K: int) -> LastStep:
    """Nothing done yet."""
    return LastStep(
        position=_zeros(rows),
        token=_zeros(rows),
        proposed=_zeros(rows),
        passed=_zeros(rows),
        accepted=_zeros(rows),
        drafts=_zeros(rows, K),
        probability=jnp.zeros((rows, K), jnp.float32),
        is_argmax=jnp.zeros((rows, K), bool),
    )


def _zeros(*shape: int) -> jax.Array:
    return jnp.zeros(shape, jnp.int32)
