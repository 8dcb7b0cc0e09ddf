"""A branch that leaves large buffers where they are."""

from collections.abc import Callable
from typing import TypeVar

import jax
from jax import lax

Carry = TypeVar("Carry")


def run_if(wanted: jax.Array, body: Callable[[Carry], Carry], carry: Carry) -> Carry:
    """body(carry) where `wanted`, a bool scalar, holds, else carry.

    XLA copies what a conditional hands through, a cache as a whole, but not what a loop carries: this is a loop of one
    trip or none.
    """
    _, after = lax.while_loop(lambda c: c[0], lambda c: (jax.numpy.zeros_like(c[0]), body(c[1])), (wanted, carry))
    done: Carry = after
    return done
