"""The decode loop: one `lax.while_loop` around the step, the whole of it one XLA program."""

import jax
import jax.numpy as jnp
from jax import lax

from sharpi_jax.decode.controls import Controls
from sharpi_jax.decode.state import DecodeState
from sharpi_jax.decode.step import Drafter, decode_step
from sharpi_jax.model.config import ModelConfig
from sharpi_jax.model.params import ModelParams
from sharpi_jax.quant import for_few_rows


def decode_loop(
    params: ModelParams,
    state: DecodeState,
    controls: Controls,
    drafter: Drafter,
    until: jax.Array,
    *,
    cfg: ModelConfig,
) -> DecodeState:
    """Steps until every unfinished row has emitted at least `until` tokens in all (it may overshoot by K).

    Args:
      until: int32 scalar; the whole budget runs to the end, 1 more than what is out makes a single step.
    """

    def unfinished(s: DecodeState) -> jax.Array:
        return jnp.any(s.active & (s.emitted < until))

    params, drafter = for_few_rows((params, drafter))
    return lax.while_loop(unfinished, lambda s: decode_step(params, cfg, s, controls, drafter), state)
