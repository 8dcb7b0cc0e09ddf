"""Verification: one trunk pass over the certain token and its drafts."""

import jax
import jax.numpy as jnp
from flax import struct

from sharpi_jax.decode.state import Controls, DecodeState, suppress
from sharpi_jax.decode.target import Target, target_of
from sharpi_jax.model.cache import TrunkCache
from sharpi_jax.model.config import ModelConfig
from sharpi_jax.model.params import ModelParams
from sharpi_jax.model.trunk import head, trunk
from sharpi_jax.model.window import window_at

# A window of one position is padded with one that is not valid: at T = 1 XLA drops the time axis and fuses otherwise,
# and then plain decoding would not have the bits of a verify window (see quant/matmul.py and model/attention.py).
MIN_WINDOW = 2


@struct.dataclass
class Verified:
    """What the window gave: for commit to choose from.

    Attributes:
      target: at its K+1 positions. hidden: [B, K+1, D]. trunk: the states along it.
    """

    target: Target
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

    Nothing is written for a finished row, nor past a row's last valid position.
    """
    K = drafts.shape[1]
    width = max(K + 1, MIN_WINDOW)
    tokens = jnp.concatenate([state.next_token[:, None], drafts], axis=1)
    tokens = jnp.pad(tokens, ((0, 0), (0, width - (K + 1))))
    count = jnp.where(state.active, proposed + 1, 0)
    window = window_at(state.length, count, width, row_exact=True, used=K + 1)
    hidden, cache = trunk(params, cfg, tokens, state.trunk, window)
    hidden = hidden[:, : K + 1]
    logits = suppress(head(params.head, cfg, hidden), controls)
    return Verified(target_of(logits, with_sum=controls.wants_probabilities), hidden, cache)
