"""What is done to the target's logits before it is asked for its choice: bias, stop tokens, penalties, thinking.

Each position of a window is shaped as if the window's tokens before it had been emitted. The order is llama.cpp's:
biases and masks first, then penalties; temperature and filters are in sampling.py.
"""

import jax
import jax.numpy as jnp
from flax import struct

from sharpi_jax.decode.controls import NO_TOKEN, Controls, Thinking
from sharpi_jax.decode.sampling import penalise


@struct.dataclass
class Context:
    """What stands before each of W positions at which a token is chosen.

    Attributes:
      tokens: [B, S] int32, valid below `length` [B]. prompt_length: [B].
      window: [B, W], tokens that follow them; the j-th choice comes after the j-th of them. After none (`first`) there
        is one choice, which `window` gives no token for, so that its column is not looked at.
    """

    tokens: jax.Array
    prompt_length: jax.Array
    length: jax.Array
    window: jax.Array
    first: bool = struct.field(pytree_node=False, default=False)

    @property
    def last(self) -> jax.Array:
        """[B, W], the position of the token before each choice."""
        offsets = jnp.arange(self.window.shape[1], dtype=jnp.int32)[None, :]
        return self.length[:, None] + offsets - (1 if self.first else 0)

    def at(self, positions: jax.Array) -> jax.Array:
        """The tokens at positions [B, ...], NO_TOKEN before the first and past the window's end."""
        S, W = self.tokens.shape[1], self.window.shape[1]
        flat = positions.reshape(positions.shape[0], -1)
        old = jnp.take_along_axis(self.tokens, jnp.clip(flat, 0, S - 1), axis=1)
        offset = flat - self.length[:, None]
        new = jnp.take_along_axis(self.window, jnp.clip(offset, 0, W - 1), axis=1)
        found = jnp.where(offset < 0, old, new)
        outside = (flat < 0) | (offset >= (0 if self.first else W))
        return jnp.where(outside, NO_TOKEN, found).reshape(positions.shape)


def shape_logits(logits: jax.Array, context: Context, controls: Controls) -> jax.Array:
    """Logits [B, W, V] as the target is asked for them."""
    logits = logits.at[..., controls.bias_ids].add(controls.bias[None, None, :], mode="drop")
    logits = _hold_back_stops(logits, context, controls)
    n = controls.method.penalty_window
    if n:
        recent = context.last[..., None] - jnp.arange(n, dtype=jnp.int32)[None, None, :]
        logits = penalise(logits, context.at(recent), controls.penalty)
    if controls.thinking is not None:
        logits = _end_thinking(logits, context, controls.thinking)
    return logits


def _hold_back_stops(logits: jax.Array, context: Context, controls: Controls) -> jax.Array:
    """Stop tokens at -inf where fewer than min_tokens would be out before them."""
    B, W, _ = logits.shape
    out = context.last + 1 - context.prompt_length[:, None]
    early = out < controls.min_tokens[:, None]
    ids = jnp.where(early[..., None], controls.stop_ids[None, None, :], NO_TOKEN)
    rows, columns = jnp.arange(B)[:, None, None], jnp.arange(W)[None, :, None]
    return logits.at[rows, columns, ids].set(-jnp.inf, mode="drop")


def _end_thinking(logits: jax.Array, context: Context, thinking: Thinking) -> jax.Array:
    """All but the closing token at -inf where the budget is used up.

    Thinking begins with the first opening token after the last closing one; what the prompt holds of it is free.
    """
    B, S = context.tokens.shape
    slots = jnp.arange(S, dtype=jnp.int32)[None, :]
    held = context.at(jnp.broadcast_to(slots, (B, S)))[:, None, :]
    slots, last = slots[:, None, :], context.last[..., None]
    closed = jnp.max(jnp.where((held == thinking.close_id) & (slots <= last), slots, -1), axis=-1)
    begins = (held == thinking.open_id) & (slots <= last) & (slots > closed[..., None])
    opened = jnp.min(jnp.where(begins, slots, S), axis=-1)
    spent = context.last - jnp.maximum(opened, context.prompt_length[:, None] - 1)
    over = (opened < S) & (spent >= thinking.most[:, None])
    only = jnp.arange(logits.shape[-1], dtype=jnp.int32)[None, None, :] == thinking.close_id
    return jnp.where(over[..., None], jnp.where(only, 0.0, -jnp.inf), logits)
