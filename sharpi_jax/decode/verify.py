"""Verification: one trunk pass over the certain token and its drafts."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from sharpi_jax.decode.choices import Choices, choices_of
from sharpi_jax.decode.controls import Controls
from sharpi_jax.decode.run_if import run_if
from sharpi_jax.decode.shaping import Context
from sharpi_jax.decode.state import DecodeState
from sharpi_jax.model.cache import DeltaWindow, KVCache, LayerState, TrunkCache
from sharpi_jax.model.config import ModelConfig
from sharpi_jax.model.params import ModelParams
from sharpi_jax.model.trunk import head, trunk
from sharpi_jax.model.window import window_at

# A window of one position is padded with one that is not valid: at T = 1 XLA drops the time axis and fuses otherwise,
# and then plain decoding would not have the bits of a verify window (see quant/matmul.py and model/attention.py).
MIN_WINDOW = 2
_NARROW = (1, 2, 4)  # each is a trunk to compile


@struct.dataclass
class Verified:
    """What the window gave: for commit to choose from.

    Attributes:
      choices: at its K+1 positions. hidden: [B, K+1, D]. trunk: the states along it.
    """

    choices: Choices
    hidden: jax.Array
    trunk: TrunkCache


def verify_step(
    params: ModelParams,
    cfg: ModelConfig,
    state: DecodeState,
    drafts: jax.Array,
    proposed: jax.Array,
    controls: Controls,
) -> Verified:
    """Runs the trunk over [next_token, drafts], of which the first 1 + `proposed` [B] are valid; drafts: [B, K].

    Nothing is written for a finished row, nor past a row's last valid position. Where rows may propose few drafts, the
    narrowest of a few widths is run that holds the longest of them; a row's bits do not depend on it.
    """
    K = drafts.shape[1]
    tokens = jnp.concatenate([state.next_token[:, None], drafts], axis=1)
    count = jnp.where(state.active, proposed + 1, 0)
    window_pass = functools.partial(_window_pass, params, cfg, tokens, state.length, count, state.trunk)
    widths = verify_widths(K, variable=controls.method.variable)
    if len(widths) == 1:
        hidden, cache = window_pass(state.trunk, used=K + 1)
        logits = head(params.head, cfg, hidden)
    else:
        narrowest = jnp.searchsorted(jnp.asarray(widths), jnp.max(count))
        hidden, cache = _one_of(widths, narrowest, window_pass, cfg, state, K + 1)
        heads = [functools.partial(_head, params, cfg, used=w) for w in widths]
        logits = lax.switch(narrowest, heads, hidden)
    choices = choices_of(logits, Context(state.tokens, state.prompt_length, state.length, tokens), controls)
    return Verified(choices, hidden, cache)


def verify_widths(K: int, *, variable: bool) -> tuple[int, ...]:
    """Of the windows that are compiled: K + 1, and where a step may have fewer drafts, narrower ones."""
    return (*(w for w in _NARROW if variable and w <= K), K + 1)


def _window_pass(
    params: ModelParams,
    cfg: ModelConfig,
    tokens: jax.Array,
    start: jax.Array,
    count: jax.Array,
    before: TrunkCache,
    caches: TrunkCache,
    *,
    used: int,
) -> tuple[jax.Array, TrunkCache]:
    """Hiddens of a window's first `used` positions, and the states along it.

    Args:
      before: recurrent states. caches: those of attention; its other layers are not looked at.
    """
    width = max(used, MIN_WINDOW)
    tokens = jnp.pad(tokens[:, :used], ((0, 0), (0, width - used)))
    window = window_at(start, count, width, row_exact=True, used=used)
    hidden, after = trunk(params, cfg, tokens, _with_caches(before, caches), window)
    return hidden[:, :used], after


def _head(params: ModelParams, cfg: ModelConfig, hidden: jax.Array, *, used: int) -> jax.Array:
    return _fill(head(params.head, cfg, hidden[:, :used]), hidden.shape[1])


def _one_of(
    widths: tuple[int, ...],
    chosen: jax.Array,
    window_pass: Callable[..., tuple[jax.Array, TrunkCache]],
    cfg: ModelConfig,
    state: DecodeState,
    full: int,
) -> tuple[jax.Array, TrunkCache]:
    """The pass of the chosen one of the widths, with hiddens and windows filled up with zeros to `full` positions."""

    def run(carry: tuple[jax.Array, TrunkCache], used: int) -> tuple[jax.Array, TrunkCache]:
        hidden, after = window_pass(carry[1], used=used)
        layers = tuple(_fill_layer(layer, cfg, full) for layer in after.layers)
        return _fill(hidden, full), TrunkCache(layers, after.rope)

    shapes = jax.eval_shape(functools.partial(run, used=full), (state.window_hidden, state.trunk))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    carry = (zeros[0], _with_caches(zeros[1], state.trunk))
    for index, width in enumerate(widths):
        carry = run_if(chosen == index, functools.partial(run, used=width), carry)
    return carry


def _with_caches(states: TrunkCache, caches: TrunkCache) -> TrunkCache:
    """`states`, with the layers of attention from `caches`."""
    pairs = zip(states.layers, caches.layers, strict=True)
    return TrunkCache(tuple(c if isinstance(c, KVCache) else s for s, c in pairs), caches.rope)


def _fill_layer(layer: LayerState, cfg: ModelConfig, positions: int) -> LayerState:
    if not isinstance(layer, DeltaWindow):
        return layer
    inputs = cfg.conv_taps - 1 + max(positions, MIN_WINDOW)
    return DeltaWindow(_fill(layer.conv, inputs), *(_fill(x, positions) for x in (layer.k, layer.written, layer.decay)))


def _fill(x: jax.Array, length: int) -> jax.Array:
    """[B, T, ...] -> [B, length, ...]."""
    return jnp.pad(x, ((0, 0), (0, length - x.shape[1]), *((0, 0),) * (x.ndim - 2)))
