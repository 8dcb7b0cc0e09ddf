"""What the model remembers: one state type per layer kind, made here and advanced by the layer that owns it."""

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from sharpi_jax.model.config import ModelConfig
from sharpi_jax.model.rope import RopeTable

BLOCK = 64  # slots that attention reads at a time
_STORED = {"bfloat16": "uint16"}


@struct.dataclass
class KVCache:
    """Keys (rotated) and values of an attention layer by position: [B, S, N, E] each, of cfg.cache_dtype.

    bfloat16 is kept as its bits in uint16: XLA's CPU compiler would convert a bfloat16 cache to float32 and back,
    whole, at every write. S is rounded up to whole blocks of BLOCK slots.

    Slots at or past a row's length may hold leftovers of rejected drafts: attention never looks past its own position,
    and each slot is written before it is first looked at. So rolling back is just a shorter length.
    """

    k: jax.Array
    v: jax.Array


@struct.dataclass
class DeltaState:
    """A Gated DeltaNet layer's state after the last token.

    Attributes:
      conv: [B, J-1, C] float32, the last J-1 inputs of the convolution, oldest first.
      recurrent: [B, H, E, E] float32, key dimension first.
    """

    conv: jax.Array
    recurrent: jax.Array


@struct.dataclass
class DeltaWindow:
    """What a decode window of T positions did to a Gated DeltaNet layer's state, for commit to redo as far as it keeps.

    Attributes:
      conv: [B, J-1+T, C], the inputs of the convolution: rows n to n+J-2 are the conv state after n tokens.
      k, written: [B, T, H, E], each position's key and what it wrote there (d in delta_rule.py).
      decay: [B, T, H].
    """

    conv: jax.Array
    k: jax.Array
    written: jax.Array
    decay: jax.Array


LayerState = KVCache | DeltaState | DeltaWindow


@struct.dataclass
class TrunkCache:
    """States of the trunk's layers in order, and the rope table of their S slots."""

    layers: tuple[LayerState, ...]
    rope: RopeTable


def init_kv_cache(cfg: ModelConfig, rows: int, slots: int) -> KVCache:
    """An empty cache of B rows and S slots, rounded up to whole blocks."""
    shape = (rows, -(-slots // BLOCK) * BLOCK, cfg.key_heads, cfg.head_dim)
    dtype = _STORED.get(cfg.cache_dtype, cfg.cache_dtype)
    return KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def to_stored(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Float32 keys or values as a cache of `dtype` keeps them."""
    return lax.bitcast_convert_type(x.astype(jnp.bfloat16), dtype) if dtype == jnp.uint16 else x.astype(dtype)


def from_stored(x: jax.Array) -> jax.Array:
    """What a cache keeps, as float32."""
    return (lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == jnp.uint16 else x).astype(jnp.float32)


def init_delta_state(cfg: ModelConfig, rows: int) -> DeltaState:
    """The state before the first token: zeros."""
    return DeltaState(
        conv=jnp.zeros((rows, cfg.conv_taps - 1, cfg.conv_channels), jnp.float32),
        recurrent=jnp.zeros((rows, cfg.delta_heads, cfg.delta_head_dim, cfg.delta_head_dim), jnp.float32),
    )


def init_trunk_cache(cfg: ModelConfig, rows: int, rope: RopeTable) -> TrunkCache:
    """Empty states for B rows; the rope table's length is the number of slots S."""
    slots = rope.cos.shape[0]
    return TrunkCache(
        tuple(
            init_kv_cache(cfg, rows, slots) if kind == "attention" else init_delta_state(cfg, rows)
            for kind in cfg.layer_kinds
        ),
        rope,
    )
