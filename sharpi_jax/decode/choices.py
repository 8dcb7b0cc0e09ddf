"""What the target chooses at each position of a window, by itself: its argmax, or its sampler's draw."""

import jax
from flax import struct

from sharpi_jax.decode.controls import Controls
from sharpi_jax.decode.rule_table import RULES
from sharpi_jax.decode.sampling import TARGET, Distribution, distribution, draw, random_keys
from sharpi_jax.decode.shaping import Context, shape_logits
from sharpi_jax.decode.target import Target, target_of


@struct.dataclass
class Choices:
    """At W positions of each row.

    Attributes:
      target: its shaped logits, and what is read off them. choice: [B, W] int32.
      p: the distribution it draws from; None unless the run is sampled or its rule wants it.
      raw: its logits before they were shaped, with log_sum; None unless log-probabilities are asked for.
    """

    target: Target
    choice: jax.Array
    p: Distribution | None
    raw: Target | None


def choices_of(logits: jax.Array, context: Context, controls: Controls) -> Choices:
    """Reads logits [B, W, V]. A draw depends on the seed and the position it is for alone, whatever the window."""
    method = controls.method
    target = target_of(shape_logits(logits, context, controls), with_sum=controls.wants_probabilities)
    raw = None if method.logprobs is None else target_of(logits, with_sum=controls.scored)
    if not (method.sampled or RULES[method.rule].needs_p):
        return Choices(target, target.argmax, None, raw)
    p = distribution(target.logits, target.argmax, controls.sampling)
    if not method.sampled:
        return Choices(target, target.argmax, p, raw)
    keys = random_keys(controls.sampling.seed, context.last + 1, TARGET)
    return Choices(target, draw(p.weights, keys), p, raw)
