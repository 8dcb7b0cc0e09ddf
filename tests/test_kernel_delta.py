"""The gated delta rule's C++ kernel, every path of it, against float64 and against itself in other company."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels import lines_by_threads, needs_compiler
from models import same_bits
from reference import numpy_model as nm

from sharpi_jax import kernel
from sharpi_jax.model import delta_kernel
from sharpi_jax.model.delta_rule import recurrent_delta_rule, replay

pytestmark = needs_compiler

PATHS = kernel.paths_here()
B, T, H = 3, 9, 5
# Whole strips of vectors, a part of one, and a part of a vector behind strips of every kind.
WIDTHS = (16, 20, 64, 128, 250)
window = jax.jit(delta_kernel.window, static_argnames="path")
redo = jax.jit(delta_kernel.replay, static_argnames="path")


@functools.cache
def inputs(E):
    """q, k, v, g, beta and a state as a layer has them; heads that forget at once and heads that keep."""
    rng = np.random.default_rng(E)
    q, k, v = (rng.standard_normal((B, T, H, E)) for _ in range(3))
    g = -rng.uniform(0.5, 1.5, (B, T, H)) * np.array([5, 0.01, 1, 0.1, 2])
    beta = nm.sigmoid(2 * rng.standard_normal((B, T, H)))
    state = rng.standard_normal((B, H, E, E)) / np.sqrt(E)
    arrays = nm.scale_query(nm.l2norm(q, 1e-6)), nm.l2norm(k, 1e-6), v, g, beta, state
    return tuple(a.astype(np.float32) for a in arrays)


@functools.cache
def in_float64(E):
    """o [B, T, H, E], and the state after every position [B, T, H, E, E]."""
    *arrays, state = (a.astype(np.float64) for a in inputs(E))
    outputs, states = np.empty((B, T, H, E)), np.empty((B, T, H, E, E))
    for row in range(B):
        S = state[row]
        for t in range(T):
            o, S = nm.delta_rule(*(a[row, t : t + 1] for a in arrays), S)
            outputs[row, t], states[row, t] = o[0], S
    return outputs, states


@functools.cache
def one_at_a_time(E, path):
    """o, d [B, T, H, E], and the state before and after every position [T + 1, B, H, E, E]."""
    q, k, v, g, beta, state = inputs(E)
    decay, outputs, written, states = np.exp(g), [], [], [state]
    for t in range(T):
        now = slice(t, t + 1)
        o, d = window(*(a[:, now] for a in (q, k, v, decay, beta)), states[-1], path=path)
        states.append(np.asarray(redo(states[-1], k[:, now], d, decay[:, now], np.ones(B, np.int32), path=path)))
        outputs.append(np.asarray(o))
        written.append(np.asarray(d))
    return np.concatenate(outputs, axis=1), np.concatenate(written, axis=1), np.stack(states)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("E", WIDTHS)
def test_outputs_and_every_state_are_float64s(E, path):
    outputs, _, states = one_at_a_time(E, path)
    want, states_want = in_float64(E)
    assert np.abs(outputs - want).max() < 1e-6
    assert np.abs(np.moveaxis(states[1:], 0, 1) - states_want).max() < 1e-6


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("E", WIDTHS)
@pytest.mark.parametrize("width", range(1, T + 1))
def test_a_windows_bits_and_those_of_what_it_keeps_are_of_one_position_at_a_time(width, E, path):
    """Whatever the width and the rows beside it; rows keep unequal counts, none among them."""
    *arrays, state = inputs(E)
    q, k, v, g, beta = (a[:, :width] for a in arrays)
    decay = np.exp(g)
    outputs, written, states = one_at_a_time(E, path)
    for rows in (slice(0, B), slice(1, 3), slice(width % B, width % B + 1)):
        o, d = window(*(a[rows] for a in (q, k, v, decay, beta, state)), path=path)
        assert same_bits(np.asarray(o), outputs[rows, :width])
        assert same_bits(np.asarray(d), written[rows, :width])
        for counts in ((0, 1, width), (width, 0, width - 1), (width // 2, width, 0)):
            after = redo(*(a[rows] for a in (state, k)), d, decay[rows], np.int32(counts)[rows], path=path)
            for got, count, row in zip(np.asarray(after), counts[rows], range(B)[rows], strict=True):
                assert same_bits(got, states[count, row])


def test_many_threads_give_the_bits_of_one():
    """Heads are shared out, and none is summed by two."""
    script = """
import hashlib
import jax, numpy as np
from sharpi_jax.model.delta_rule import recurrent_delta_rule, replay
from test_kernel_delta import inputs
q, k, v, g, beta, state = inputs(128)
o, d = jax.jit(recurrent_delta_rule)(q, k, v, np.exp(g), beta, state)
for out in (o, d, jax.jit(replay)(state, k, d, np.exp(g), np.int32([9, 0, 4]))):
    print(hashlib.sha256(np.asarray(out).tobytes()).hexdigest())
"""
    one, two, five = lines_by_threads(script)
    assert len(one) == 3
    assert one == two == five


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_only_a_cpus_program_calls_it(platform):
    q, k, v, g, beta, state = inputs(16)
    counts = jnp.ones(B, jnp.int32)
    for function, args in ((recurrent_delta_rule, (q, k, v, g, beta, state)), (replay, (state, k, v, g, counts))):
        text = jax.jit(function).trace(*args).lower(lowering_platforms=(platform,)).as_text()
        assert ("sharpi_delta" in text) == (platform == "cpu")


def test_without_a_compiler_xla_does_it(monkeypatch):
    monkeypatch.setattr(kernel, "problem", lambda: "no C++ compiler was found")
    monkeypatch.setattr(kernel, "target", lambda *args, **kwargs: pytest.fail("the kernel was asked for"))
    q, k, v, g, beta, state = inputs(20)
    o, d = recurrent_delta_rule(q, k, v, np.exp(g), beta, state)
    after = replay(state, k, d, np.exp(g), jnp.full(B, T))
    outputs, states = in_float64(20)
    assert np.abs(np.asarray(o) - outputs).max() < 1e-6
    assert np.abs(np.asarray(after) - states[:, -1]).max() < 1e-6
