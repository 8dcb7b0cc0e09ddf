"""Log-probabilities of emitted tokens, from the verify pass that chose them: the model's own, before any shaping."""

import jax
import jax.numpy as jnp
from flax import struct

from sharpi_jax.decode.target import Target, top_k


@struct.dataclass
class LogProbs:
    """By position of the sequence; those of the prompt hold nothing.

    Attributes:
      chosen: [B, S] float32, of the token there. top_ids, top: [B, S, N], the N likeliest and theirs, descending.
    """

    chosen: jax.Array
    top_ids: jax.Array
    top: jax.Array


def init_logprobs(rows: int, slots: int, N: int) -> LogProbs:
    """None yet."""
    return LogProbs(
        jnp.zeros((rows, slots)), jnp.zeros((rows, slots, N), jnp.int32), jnp.zeros((rows, slots, N), jnp.float32)
    )


def write_logprobs(into: LogProbs, raw: Target, tokens: jax.Array, positions: jax.Array) -> LogProbs:
    """Keeps what `raw` says of tokens [B, W] for positions [B, W]; those outside of the sequence are dropped."""
    B, W = tokens.shape
    N = into.top.shape[2]
    norm = raw.peak + raw.log_sum
    rows, columns = jnp.arange(B)[:, None], jnp.arange(W)[None, :]
    chosen = raw.logits[rows, columns, tokens] - norm
    into = into.replace(chosen=into.chosen.at[rows, positions].set(chosen, mode="drop"))  # type: ignore[attr-defined]
    if N == 0:
        return into
    values, ids = top_k(raw.logits, N)
    return into.replace(  # type: ignore[attr-defined, no-any-return]
        top_ids=into.top_ids.at[rows, positions].set(ids, mode="drop"),
        top=into.top.at[rows, positions].set(values - norm[..., None], mode="drop"),
    )
