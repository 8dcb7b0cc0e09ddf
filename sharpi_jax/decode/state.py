"""What the decode loop carries. Everything is per row.

Invariants, between any two steps:
  - the trunk's caches cover exactly the positions [0, length); `next_token` is the certain token of position
    `length`: not in `tokens`, in no cache, not yet emitted;
  - the MTP cache covers [0, length - behind) from the trunk's hiddens; the entries of the last `behind` positions and
    of `length` are (re)written by the next draft's first pass, from `window_hidden`;
  - an unfinished row can emit: its budget is at least 1, its next token is no stop token, its context has room;
  - a finished row never changes again.
"""

import jax
import jax.numpy as jnp
from flax import struct

from sharpi_jax.decode.adaptive import Acceptance
from sharpi_jax.decode.controls import Controls
from sharpi_jax.decode.logprobs import LogProbs
from sharpi_jax.model.cache import KVCache, TrunkCache

RUNNING, STOP, LENGTH, CONTEXT = range(4)
FINISH_REASONS = ("", "stop", "length", "context")


@struct.dataclass
class Counters:
    """Statistics, [B] or [B, K] int32; decode/stats.py defines each."""

    steps: jax.Array
    accepted_argmax: jax.Array
    drafted_per_position: jax.Array
    accepted_per_position: jax.Array


@struct.dataclass
class LastStep:
    """What the last step did, for the trace.

    Attributes:
      position, token, proposed, passed, accepted: [B]. drafts, probability, is_argmax: [B, K].
      choices: [B, K+1], what the target by itself would emit at each position of the window.
    """

    position: jax.Array
    token: jax.Array
    proposed: jax.Array
    passed: jax.Array
    accepted: jax.Array
    drafts: jax.Array
    probability: jax.Array
    is_argmax: jax.Array
    choices: jax.Array


@struct.dataclass
class DecodeState:
    """The loop's carry. `mtp` is None, and K is 0, when drafting is off.

    Attributes:
      tokens: [B, S] int32, prompt and output up to `length`.
      prompt_length, length, budget: [B] int32; budget is what may still be emitted.
      next_token: [B] int32.
      window_hidden: [B, P, D], the trunk's post-final-norm hiddens at positions length - behind - 1 to length - 1, in
        its first behind + 1 entries. P is K + 1 where every step drafts, else more (`pending_width`).
      behind: [B] int32, emitted positions that the MTP cache has not seen the trunk's hidden of: the drafts that the
        last step accepted, and all that steps without drafts emitted since.
      finish: [B] int32, an index of FINISH_REASONS.
      acceptance: what is known of drafts by depth; None unless draft lengths are adaptive.
      logprobs: None unless they are asked for.
    """

    tokens: jax.Array
    prompt_length: jax.Array
    length: jax.Array
    budget: jax.Array
    next_token: jax.Array
    window_hidden: jax.Array
    behind: jax.Array
    finish: jax.Array
    trunk: TrunkCache
    mtp: KVCache | None
    counters: Counters
    last: LastStep
    acceptance: Acceptance | None
    logprobs: LogProbs | None

    @property
    def slots(self) -> int:
        """S, the context."""
        return int(self.tokens.shape[1])

    @property
    def draft_length(self) -> int:
        """K."""
        return int(self.last.drafts.shape[1])

    @property
    def active(self) -> jax.Array:
        """[B] bool."""
        return self.finish == RUNNING

    @property
    def emitted(self) -> jax.Array:
        """[B] int32, tokens put out so far."""
        return self.length - self.prompt_length


def pending_width(K: int, *, variable: bool) -> int:
    """P, hiddens that wait for the MTP block: a window's, or where steps may do without drafts, two windows'."""
    return 2 * (K + 1) if variable and K > 0 else K + 1


def finish_code(
    next_token: jax.Array, length: jax.Array, budget: jax.Array, slots: int, controls: Controls
) -> jax.Array:
    """[B] index of FINISH_REASONS for a row that stands before its next step; the first that applies wins."""
    is_stop = jnp.any(next_token[:, None] == controls.stop_ids[None, :], axis=-1)
    return jnp.where(
        budget <= 0, LENGTH, jnp.where(is_stop, STOP, jnp.where(length >= slots, CONTEXT, RUNNING))
    ).astype(jnp.int32)


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
        choices=_zeros(rows, K + 1),
    )


def _zeros(*shape: int) -> jax.Array:
    return jnp.zeros(shape, jnp.int32)
