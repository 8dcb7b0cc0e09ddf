"""The mixture of experts: against NumPy float64, and against itself among other rows."""

import dataclasses

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from reference import numpy_ops

from sharpi_jax.model.feed_forward import mixture_of_experts
from sharpi_jax.model.params import ExpertsParams, FeedForwardParams
from sharpi_jax.model.window import window_at
from sharpi_jax.quant import Packed

CFG = dataclasses.replace(
    models.decoder("qwen35-tiny-f32").cfg, experts=16, experts_used=3, expert_width=40, shared_expert_width=24
)
D, X, F, S = CFG.width, CFG.experts, CFG.expert_width, CFG.shared_expert_width


def weights(seed=0):
    """Arrays by name, of the usual scale."""
    rng = np.random.default_rng(seed)
    shapes = {"router": (X, D), "gate": (X, F, D), "up": (X, F, D), "down": (X, D, F), "shared_gate": (D,)}
    shapes |= {"shared.gate": (S, D), "shared.up": (S, D), "shared.down": (D, S)}
    return {name: (rng.standard_normal(s) * s[-1] ** -0.5).astype(np.float32) for name, s in shapes.items()}


def params_of(arrays):
    packed = {name: Packed(jnp.asarray(a), "F32") for name, a in arrays.items() if name != "shared_gate"}
    shared = FeedForwardParams(*(packed.pop(f"shared.{name}") for name in ("gate", "up", "down")))
    return ExpertsParams(**packed, shared_gate=jnp.asarray(arrays["shared_gate"]), shared=shared)


def expected(a, x, used):
    a = {name: value.astype(np.float64) for name, value in a.items()}
    x = x.astype(np.float64)
    routed = numpy_ops.mixture_of_experts(x, a["router"], a["gate"], a["up"], a["down"], used)
    shared = numpy_ops.swiglu(x, a["shared.gate"], a["shared.up"], a["shared.down"])
    return routed + numpy_ops.sigmoid(x @ a["shared_gate"])[:, None] * shared


def apply(params, x, *, row_exact, count=None, cfg=CFG):
    rows, width = x.shape[:2]
    count = np.full(rows, width) if count is None else count
    window = window_at(jnp.zeros(rows, jnp.int32), jnp.asarray(count), width, row_exact=row_exact)
    return np.asarray(jax.jit(mixture_of_experts, static_argnums=1)(params, cfg, jnp.asarray(x), window))


@pytest.mark.parametrize("used", [1, 3, 16])
@pytest.mark.parametrize(("rows", "width", "row_exact"), [(1, 2, True), (3, 5, True), (1, 64, False), (2, 16, False)])
def test_it_is_float64s(rows, width, row_exact, used):
    a = weights()
    x = np.random.default_rng(1).standard_normal((rows, width, D)).astype(np.float32)
    found = apply(params_of(a), x, row_exact=row_exact, cfg=dataclasses.replace(CFG, experts_used=used))
    assert np.abs(found.reshape(-1, D) - expected(a, x.reshape(-1, D), used)).max() <= 2e-6


def test_equal_experts_in_the_router_go_by_number():
    a = weights()
    a["router"][:] = a["router"][0]
    x = np.random.default_rng(2).standard_normal((2, 3, D)).astype(np.float32)
    assert (
        np.abs(apply(params_of(a), x, row_exact=True).reshape(-1, D) - expected(a, x.reshape(-1, D), 3)).max() <= 2e-6
    )


@pytest.mark.parametrize("ties", [False, True])
def test_a_rows_bits_do_not_depend_on_the_others(ties):
    """Decode windows of 2 to 9 positions in 1 to 5 rows, and rows that crowd into the same experts."""
    a = weights()
    if ties:
        a["router"][1::2] = a["router"][::2]
    params = params_of(a)
    rng = np.random.default_rng(3)
    x = rng.standard_normal((1, 9, D)).astype(np.float32)
    alone = np.concatenate([apply(params, x[:, i : i + 2], row_exact=True)[:, :1] for i in range(8)], axis=1)
    for width in (3, 4, 8, 9):
        together = apply(params, x[:, :width], row_exact=True)
        assert models.same_bits(together[:, :8], alone[:, : min(width, 8)])
    batch = np.concatenate([x[:, :4], x[:, :4] * 0.5, np.repeat(x[:, 1:2], 4, axis=1), x[:, 4:8], x[:, 2:6]])
    assert models.same_bits(apply(params, batch, row_exact=True)[3], alone[0, 4:8])


def test_padding_and_experts_that_nobody_chose_are_not_looked_at():
    """NaN in the weights of unchosen experts, and in positions past a row's count, reaches nothing."""
    a = weights()
    x = np.random.default_rng(4).standard_normal((2, 4, D)).astype(np.float32)
    right = expected(a, x.reshape(-1, D), 3).reshape(x.shape)
    logits = x.reshape(-1, D) @ a["router"].T
    valid = np.array([True, True, False, False, True, True, True, False])
    chosen = np.argsort(-logits, axis=-1)[valid, :3]
    unchosen = np.setdiff1d(np.arange(X), chosen)
    assert unchosen.size
    a["gate"][unchosen] = np.nan
    x[0, 2:], x[1, 3:] = np.nan, np.nan
    for row_exact in (True, False):
        found = apply(params_of(a), x, row_exact=row_exact, count=np.array([2, 3]))
        assert np.abs(found[0, :2] - right[0, :2]).max() <= 2e-6
        assert np.abs(found[1, :3] - right[1, :3]).max() <= 2e-6
