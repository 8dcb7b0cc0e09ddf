"""The model's parts against NumPy float64, and whole layers against llama.cpp's recorded activations too."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from models import same_bits
from reference import numpy_model as nm

from sharpi_jax.decode.decoder import Decoder
from sharpi_jax.decode.score import score
from sharpi_jax.model import delta, delta_rule, feed_forward, norms, rope, trunk
from sharpi_jax.model.attention import attention
from sharpi_jax.model.cache import DeltaState, DeltaWindow, KVCache, init_delta_state, init_kv_cache
from sharpi_jax.model.delta import delta_net
from sharpi_jax.model.delta_rule import CHUNK, chunked_delta_rule, recurrent_delta_rule, replay
from sharpi_jax.model.mtp import mtp_block
from sharpi_jax.model.window import window_at

MODEL = "qwen35-tiny-f32"
DELTA_LAYERS, ATTENTION_LAYER, MTP_LAYER = (0, 1, 2), 3, 4
PROMPT = 42  # positions of the recorded prompt pass
SLOTS = 64

run_delta_net = jax.jit(delta_net, static_argnums=1)
run_attention = jax.jit(attention, static_argnums=1)
run_layer = jax.jit(trunk.layer, static_argnums=1)
run_swiglu = jax.jit(feed_forward.swiglu, static_argnums=1)
run_mtp_block = jax.jit(mtp_block, static_argnums=1)


@functools.cache
def tiny():
    """Float64 reference, params, config and rope table of the small fixture."""
    read = models.read(MODEL)
    table = rope.rope_table(SLOTS, read.config.rope_dims, read.config.rope_base)
    return nm.load(models.fixture(MODEL)), read.params, read.config, table


@functools.cache
def activations():
    """llama.cpp's activations, a position a row: "attn_norm-0" of the prompt pass, "mtp_..." of the MTP pass."""
    return {name.partition(".")[2]: array for name, array in models.arrays("qwen35-tiny.act").items()}


def random(*shape, seed=0, scale=1.0):
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def assert_close(got, want, tolerance):
    got = np.asarray(got)
    assert got.dtype == np.float32
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= tolerance


def from_start(rows, width, count=None):
    counts = np.full(rows, width if count is None else count, np.int32)
    return window_at(jnp.zeros(rows, jnp.int32), jnp.asarray(counts), width, row_exact=False)


def exact_window(start, count, width):
    return window_at(jnp.asarray(start, jnp.int32), jnp.asarray(count, jnp.int32), width, row_exact=True)


# --- norms and rope ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [16, 64, 1024])
def test_norms(width):
    w = np.linspace(0.1, 1.0, width, dtype=np.float32)
    rms, l2 = (jax.jit(f, static_argnames="eps") for f in (norms.rms_norm, norms.l2_norm))
    for scale in (1e-4, 1.0, 100.0):
        x = random(3, 5, width, scale=scale)
        assert_close(rms(x, w, eps=1e-6), nm.rms_norm(x.astype(np.float64), w, 1e-6), 1e-6)
        assert_close(l2(x, eps=1e-6), nm.l2norm(x.astype(np.float64), 1e-6), 1e-6)
    assert not np.asarray(rms(0 * x, w, eps=1e-6)).any()


@pytest.mark.parametrize(("dims", "width"), [(8, 32), (16, 64), (64, 256), (32, 32)])
def test_rope_near_and_far(dims, width):
    """Angles come from float64: at position 262143 a float32 angle would be off by up to 0.016."""
    positions = np.array([*range(11), 1000, 100000, 262143], np.int32)
    x = random(2, len(positions), 3, width)
    table = rope.rope_table(262144, dims, 1e7)
    assert table.cos.shape == table.sin.shape == (262144, dims // 2)
    where = np.stack([positions, positions[::-1]])
    got = np.asarray(jax.jit(rope.rotate)(x, table, where))
    want = np.stack([nm.rope_neox(x[b].astype(np.float64), where[b], dims, 1e7) for b in range(2)])
    assert_close(got, want, 1e-6)
    assert same_bits(got[..., dims:], x[..., dims:])
    assert same_bits(got[0, 0], x[0, 0])


# --- convolution ------------------------------------------------------------------------------------------------------


def test_causal_convolution_and_its_state_after_every_count():
    T, C, J = 9, 12, 4
    x, taps, before = random(2, T, C), random(C, J, seed=1), random(2, J - 1, C, seed=2)
    inputs = jnp.concatenate([before, x], axis=1)
    out = np.asarray(jax.nn.silu(delta._causal_conv(inputs, jnp.asarray(taps))))
    for row in range(2):
        want, _ = nm.causal_conv_silu(x[row].astype(np.float64), taps, before[row])
        assert_close(out[row], want, 1e-6)
    for count in range(T + 1):
        counts = np.array([count, T - count], np.int32)
        after = np.asarray(delta.conv_state_after(inputs, jnp.asarray(counts), J))
        for row, n in enumerate(counts):
            _, want = nm.causal_conv_silu(x[row, :n], taps, before[row])
            assert same_bits(after[row], want)


# --- the delta rule ---------------------------------------------------------------------------------------------------

DECAYS = {"strong": -5.0, "weak": -0.01}
# What runs on this machine (test_kernel_delta.py has more of the kernel), and what runs where there is no kernel.
FORMS = {"here": (recurrent_delta_rule, replay), "xla": (delta_rule._window_by_xla, delta_rule._replay_by_xla)}


def delta_inputs(B, T, H, E, decay="weak", seed=0):
    """q, k, v, g, beta and a state, as the layer makes them: normed q and k, g < 0 around `decay`, 0 < beta < 1."""
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((B, T, H, E)) for _ in range(3))
    g = DECAYS[decay] * rng.uniform(0.5, 1.5, (B, T, H))
    beta = nm.sigmoid(2 * rng.standard_normal((B, T, H)))
    state = rng.standard_normal((B, H, E, E)) / np.sqrt(E)
    arrays = nm.scale_query(nm.l2norm(q, 1e-6)), nm.l2norm(k, 1e-6), v, g, beta, state
    return [a.astype(np.float32) for a in arrays]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize(("T", "E"), [(1, 16), (2, 16), (7, 16), (17, 64)])
def test_recurrent_delta_rule_and_every_state_on_the_way(T, E, decay, form):
    q, k, v, g, beta, state = delta_inputs(2, T, 4, E, decay)
    factor = np.exp(g)
    rule, redo = map(jax.jit, FORMS[form])
    outputs, written = rule(q, k, v, factor, beta, state)
    states = [redo(state, k, written, factor, jnp.full(2, n)) for n in range(T + 1)]
    assert same_bits(np.asarray(states[0]), state)
    for row in range(2):
        S = state[row].astype(np.float64)
        for t in range(T):
            o, S = nm.delta_rule(*(a[row, t : t + 1].astype(np.float64) for a in (q, k, v, g, beta)), S)
            assert_close(outputs[row, t], o[0], 1e-6)
            assert_close(states[t + 1][row], S, 1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_the_window_that_a_position_stands_in_leaves_no_trace(form):
    """Windows of every width, and rows that keep unequal counts, have the bits of one position at a time."""
    T, B = 9, 3
    q, k, v, g, beta, state = delta_inputs(B, T, 4, 32)
    decay = np.exp(g)
    rule, redo = map(jax.jit, FORMS[form])
    states, outputs = [state], []
    for t in range(T):
        now = slice(t, t + 1)
        o, d = rule(q[:, now], k[:, now], v[:, now], decay[:, now], beta[:, now], states[-1])
        states.append(np.asarray(redo(states[-1], k[:, now], d, decay[:, now], jnp.ones(B, jnp.int32))))
        outputs.append(np.asarray(o))
    for width in (2, 4, T):
        o, d = rule(*(a[:, :width] for a in (q, k, v, decay, beta)), state)
        assert same_bits(np.asarray(o), np.concatenate(outputs[:width], axis=1))
        for counts in ((0, 1, width), (width, width - 1, 2)):
            after = np.asarray(redo(state, k[:, :width], d, decay[:, :width], jnp.asarray(counts)))
            for row, count in enumerate(counts):
                assert same_bits(after[row], states[count][row])
                alone = redo(
                    *(a[row : row + 1] for a in (state, k[:, :width], d, decay[:, :width])), jnp.full(1, count)
                )
                assert same_bits(np.asarray(alone[0]), states[count][row])


def silenced(g, beta, counts):
    """g and beta with padding as the recurrent form sees it: a step that neither decays nor writes."""
    valid = np.arange(g.shape[1])[None, :] < counts[:, None]
    return valid, np.where(valid[..., None], g, np.float32(0)), np.where(valid[..., None], beta, np.float32(0))


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("T", [16, 64, 128, 256])
def test_chunked_delta_rule_is_the_recurrent_one(T, decay):
    """Rows of unequal counts, none and all among them; garbage in the padding must not leak."""
    counts = np.array([T, T - 1, T // 2 + 3, 1, 0])
    q, k, v, g, beta, state = delta_inputs(len(counts), T, 4, 16, decay)
    valid, quiet_g, quiet_beta = silenced(g, beta, counts)
    outputs, final = (np.asarray(a) for a in jax.jit(chunked_delta_rule)(q, k, v, g, beta, valid, state))
    for row, count in enumerate(counts):
        given = (a[row].astype(np.float64) for a in (q, k, v, quiet_g, quiet_beta, state))
        want, after = nm.delta_rule(*given)
        assert_close(np.where(valid[row, :, None, None], outputs[row] - want, 0).astype(np.float32), 0 * want, 1e-5)
        assert_close(final[row], after, 1e-5)
        assert count or same_bits(final[row], state[row])


def step_by_step(q, k, v, g, beta, state):
    """The rule as its paper writes it, a position after the other, for gradients."""

    def step(S, x):
        q_t, k_t, v_t, g_t, beta_t = x
        S = jnp.exp(g_t)[..., None, None] * S
        d = beta_t[..., None] * (v_t - jnp.einsum("bhe,bhef->bhf", k_t, S))
        S = S + jnp.einsum("bhe,bhf->bhef", k_t, d)
        return S, jnp.einsum("bhe,bhef->bhf", q_t, S)

    final, outputs = jax.lax.scan(step, state, [jnp.moveaxis(a, 1, 0) for a in (q, k, v, g, beta)])
    return jnp.moveaxis(outputs, 0, 1), final


@pytest.mark.parametrize("decay", DECAYS)
def test_chunked_delta_rule_has_the_gradient_of_the_recurrent_one(decay):
    T = 2 * CHUNK
    counts = np.array([T, T // 2 + 3, 0])
    arrays = delta_inputs(len(counts), T, 2, 16, decay)
    probe, probe_state = random(len(counts), T, 2, 16, seed=5), random(*arrays[-1].shape, seed=6)
    valid = silenced(*arrays[3:5], counts)[0]

    def loss(form, q, k, v, g, beta, state):
        mask = jnp.asarray(valid)[..., None]
        if form == "chunked":
            outputs, final = chunked_delta_rule(q, k, v, g, beta, jnp.asarray(valid), state)
        else:
            outputs, final = step_by_step(q, k, v, jnp.where(mask, g, 0), jnp.where(mask, beta, 0), state)
        return jnp.sum(jnp.where(mask[..., None], outputs * probe, 0)) + jnp.sum(final * probe_state)

    gradient = jax.jit(jax.grad(loss, range(1, 7)), static_argnums=0)
    for chunked, recurrent in zip(gradient("chunked", *arrays), gradient("recurrent", *arrays), strict=True):
        assert np.isfinite(np.asarray(chunked)).all()
        assert_close(chunked, np.asarray(recurrent), 1e-4)


# --- layers -----------------------------------------------------------------------------------------------------------


def pair(recorded):
    """Two rows [2, T, D]: what llama.cpp recorded, and noise of ordinary size."""
    return np.stack([recorded, random(*recorded.shape, seed=7)])


def reference_mix(layer, y, state=None, start=0):
    """The reference's mixer on one row."""
    ref = tiny()[0]
    state, y = state or ref.empty_state(layer), y.astype(np.float64)
    if layer in DELTA_LAYERS:
        return ref._gated_delta_net(layer, y, state, None)
    return ref._attention(layer, y, start, state, None)


@pytest.mark.parametrize("layer", DELTA_LAYERS)
def test_delta_net_layer(layer):
    _, params, cfg, _ = tiny()
    act = activations()
    y = pair(act[f"attn_norm-{layer}"])
    out, state = run_delta_net(params.layers[layer].mixer, cfg, y, init_delta_state(cfg, 2), from_start(2, PROMPT))
    for row in range(2):
        want, want_state = reference_mix(layer, y[row])
        assert_close(out[row], want, 1e-5)
        assert_close(state.conv[row], want_state["conv"], 1e-5)
        assert_close(state.recurrent[row], want_state["S"], 1e-5)
    assert_close(out[0], act[f"linear_attn_out-{layer}"], 1e-5)
    assert_close(state.conv[0], act[f"linear_attn_qkv_mixed-{layer}"][-3:], 1e-5)
    assert_close(state.recurrent[0], act[f"new_state-{layer}"].swapaxes(-1, -2), 1e-5)


def test_attention_layer():
    ref, params, cfg, table = tiny()
    act = activations()
    y = pair(act[f"attn_norm-{ATTENTION_LAYER}"])
    cache = init_kv_cache(cfg, 2, SLOTS)
    out, cache = run_attention(params.layers[ATTENTION_LAYER].mixer, cfg, y, cache, from_start(2, PROMPT), table)
    for row in range(2):
        want, kv = reference_mix(ATTENTION_LAYER, y[row])
        assert_close(out[row], want, 1e-5)
        assert_close(cache.k[row, :PROMPT], kv["k"], 1e-5)
        assert_close(cache.v[row, :PROMPT], kv["v"], 1e-5)
    assert_close(out[0], act["attn_output-3"], 1e-5)
    normed = nm.rms_norm(act["Kcur-3"].reshape(PROMPT, 2, -1), ref.weights["blk.3.attn_k_norm.weight"], cfg.norm_eps)
    assert_close(cache.k[0, :PROMPT], nm.rope_neox(normed, range(PROMPT), cfg.rope_dims, cfg.rope_base), 1e-5)
    assert_close(cache.v[0, :PROMPT].reshape(PROMPT, -1), act["Vcur-3"], 1e-5)


@pytest.mark.parametrize("layer", [*DELTA_LAYERS, ATTENTION_LAYER])
def test_whole_layers_and_their_feed_forward(layer):
    ref, params, cfg, table = tiny()
    act = activations()
    x = pair(act["model.input_embed"] if layer == 0 else act[f"l_out-{layer - 1}"])
    empty = init_delta_state(cfg, 2) if layer in DELTA_LAYERS else init_kv_cache(cfg, 2, SLOTS)
    out, _ = run_layer(params.layers[layer], cfg, x, empty, from_start(2, PROMPT), table)
    assert_close(out[0], act[f"l_out-{layer}"], 1e-5)
    for row in range(2):
        assert_close(out[row], ref._block(layer, x[row].astype(np.float64), 0, ref.empty_state(layer), None)[0], 1e-5)
    weights = [ref.weights[f"blk.{layer}.ffn_{part}.weight"] for part in ("gate", "up", "down")]
    residual = act[f"l_out-{layer}"] - act[f"ffn_out-{layer}"]
    y = pair(nm.rms_norm(residual, ref.weights[f"blk.{layer}.post_attention_norm.weight"], cfg.norm_eps))
    fed = run_swiglu(params.layers[layer].ffn, cfg, y.astype(np.float32))
    assert_close(fed[0], act[f"ffn_out-{layer}"], 1e-5)
    assert_close(fed[1], nm.swiglu(y[1], *weights), 1e-5)


def test_mtp_block():
    _, params, cfg, _ = tiny()
    act, arrays = activations(), models.reference("qwen35-tiny")
    tokens, T = arrays["tokens"], len(arrays["tokens"])
    hidden = np.concatenate([np.zeros((1, cfg.width), np.float32), arrays["hidden"][:-1]])
    table = rope.rope_table(T, cfg.rope_dims, cfg.rope_base)
    cache = init_kv_cache(cfg, 1, T)
    out, cache = run_mtp_block(params.mtp, cfg, tokens[None], hidden[None], cache, from_start(1, T), table)
    assert_close(out[0], act["mtp_shared_head_norm"], 1e-5)
    assert_close(cache.v[0, :T], act["mtp_Vcur-4"], 1e-5)
    assert_close(norms.rms_norm(hidden, params.mtp.hidden_norm, cfg.norm_eps), act["mtp_hnorm-4"], 1e-5)


# --- windows ----------------------------------------------------------------------------------------------------------

WIDTH = 4


def as_caches(states):
    """Rows of the reference's keys and values as a cache of SLOTS slots, random where the reference has none."""
    k, v = random(2, len(states), SLOTS, *states[0]["k"].shape[1:], seed=8)
    for row, state in enumerate(states):
        k[row, : len(state["k"])], v[row, : len(state["v"])] = state["k"], state["v"]
    return KVCache(jnp.asarray(k), jnp.asarray(v))


def test_attention_window_row_by_row_or_at_once():
    """A window that continues other rows at other positions; slots past it hold leftovers, which must not be seen."""
    _, params, cfg, table = tiny()
    starts, y = (5, 30), random(2, 30 + WIDTH, cfg.width)
    mixer = params.layers[ATTENTION_LAYER].mixer
    cache = as_caches([reference_mix(ATTENTION_LAYER, y[row, :start])[1] for row, start in enumerate(starts)])
    new = np.stack([y[row, start : start + WIDTH] for row, start in enumerate(starts)])
    window = exact_window(starts, [WIDTH] * 2, WIDTH)
    exact, exact_cache = run_attention(mixer, cfg, new, cache, window, table)
    at_once, cache = run_attention(mixer, cfg, new, cache, dataclasses.replace(window, row_exact=False), table)
    assert_close(exact, np.asarray(at_once), 1e-6)
    assert same_bits(np.asarray(cache.k), np.asarray(exact_cache.k))
    for row, start in enumerate(starts):
        want, kv = reference_mix(ATTENTION_LAYER, y[row, : start + WIDTH])
        assert_close(exact[row], want[start:], 1e-5)
        assert_close(exact_cache.k[row, : start + WIDTH], kv["k"], 1e-5)


@pytest.mark.parametrize("row_exact", [True, False])
def test_padding_and_positions_past_the_end_write_no_slot(row_exact):
    _, params, cfg, table = tiny()
    before = as_caches([{"k": np.zeros((0, 2, 32)), "v": np.zeros((0, 2, 32))}] * 2)
    y = random(2, WIDTH, cfg.width, seed=9)
    cases = [((5, 9), (0, 3)), ((0, 60), (1, 4)), ((SLOTS - 1, SLOTS - 3), (4, 4)), ((SLOTS, SLOTS - 2), (2, 1))]
    for starts, counts in cases:
        window = dataclasses.replace(exact_window(starts, counts, WIDTH), row_exact=row_exact)
        _, after = run_attention(params.layers[ATTENTION_LAYER].mixer, cfg, y, before, window, table)
        for old, new in ((before.k, after.k), (before.v, after.v)):
            changed = (np.asarray(old) != np.asarray(new)).any(axis=(2, 3))
            for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
                assert np.flatnonzero(changed[row]).tolist() == list(range(start, min(start + count, SLOTS)))


def test_delta_net_window_keeps_the_state_after_every_position():
    _, params, cfg, _ = tiny()
    y = random(2, 10 + WIDTH, cfg.width)
    starts = (10, 1)
    states = [reference_mix(1, y[row, :start])[1] for row, start in enumerate(starts)]
    state = DeltaState(*(jnp.asarray(np.stack([s[name] for s in states]), jnp.float32) for name in ("conv", "S")))
    new = np.stack([y[row, start : start + WIDTH] for row, start in enumerate(starts)])
    out, window = run_delta_net(params.layers[1].mixer, cfg, new, state, exact_window(starts, [WIDTH] * 2, WIDTH))
    assert isinstance(window, DeltaWindow)
    for row in range(2):
        for n in range(1, WIDTH + 1):
            want, after = reference_mix(1, new[row, :n], states[row])
            assert_close(out[row, :n], want, 1e-5)
            kept = delta.state_after(state, window, jnp.full(2, n), 4)
            assert_close(kept.recurrent[row], after["S"], 1e-5)
            assert_close(kept.conv[row], after["conv"], 1e-5)


# --- the cache's type -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cache_dtype", "tolerance"), [("float16", 2e-3), ("bfloat16", 16e-3)])
def test_a_narrow_cache_stores_its_type_and_moves_the_logits_a_little(cache_dtype, tolerance):
    """llama.cpp's own float16 cache moves its logits by 1e-3; bfloat16 has three bits less, so eight times that."""
    _, params, cfg, _ = tiny()
    arrays = models.reference("qwen35-tiny")
    tokens = arrays["tokens"].tolist()
    decoder = Decoder(params, dataclasses.replace(cfg, cache_dtype=cache_dtype))
    found = score(decoder, tokens)
    for got, name in ((found.logits, "logits"), (found.mtp_logits, "mtp_logits")):
        assert 1e-4 < np.abs(got - arrays[name]).max() <= tolerance
    chunk = next(decoder.chunks(*decoder.rows_of([tokens], 128), drafting=True))
    stored = {"bfloat16": "uint16"}.get(cache_dtype, cache_dtype)
    assert chunk.trunk.layers[ATTENTION_LAYER].k.dtype == chunk.mtp.v.dtype == stored
    assert chunk.trunk.layers[0].recurrent.dtype == jnp.float32
