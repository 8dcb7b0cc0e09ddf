"""What the decode loop does to its caches: each step touches a few blocks of them, never a whole one."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
import synthetic
from kernels import needs_compiler

from sharpi_jax.decode.controls import Method, make_controls
from sharpi_jax.decode.decoder import _init
from sharpi_jax.decode.draft import MtpDrafter
from sharpi_jax.decode.loop import decode_loop
from sharpi_jax.decode.prefill import begin
from sharpi_jax.model import attention
from sharpi_jax.model.cache import BLOCK, KVCache, to_stored
from sharpi_jax.model.rope import rope_of
from sharpi_jax.model.window import window_at

SMALL = dataclasses.replace(synthetic.REAL_LAYERS, width=64, ffn_width=64, vocab_size=128, context_length=1 << 16)


def compiled(slots, K, cache_dtype, rows=1, method=None):
    """The decode loop's program at this context, never run; nothing of its size is allocated."""
    cfg = dataclasses.replace(SMALL, cache_dtype=cache_dtype)

    def start(rope):
        trunk, mtp, last = _init(rope, cfg=cfg, rows=rows, drafting=K > 0)
        ones = jnp.ones(rows, jnp.int32)
        tokens = jnp.zeros((rows, slots), jnp.int32)
        return begin(params, trunk, mtp, last, tokens, ones, 100 * ones, controls, cfg=cfg, K=K)

    params = synthetic.random_model(cfg)
    controls = make_controls([1.0] * rows, [5], step_ms=[1.0] * (K + 1), method=method)
    state = jax.eval_shape(start, jax.eval_shape(lambda: rope_of(cfg, slots)))
    loop = jax.jit(functools.partial(decode_loop, cfg=cfg), donate_argnums=1)
    return loop.lower(params, state, controls, MtpDrafter(), jnp.int32(1)).compile()


def whole_cache_operations(text, shape):
    """Instructions outside fusions whose result is a cache, except those that pass one on or write it in place."""
    fused, found = False, []
    for line in text.splitlines():
        if line.startswith(("%", "ENTRY")):
            fused = line.startswith(("%fused_", "%wrapped_"))
        match = re.match(rf"\s+(?:ROOT )?%(\S+) = \w+\[{shape}\]\S* ([\w-]+)\(", line)
        if match and not fused and match[2] not in ("parameter", "get-tuple-element", "bitcast"):
            found.append((match[1], match[2], line))
    return found


@pytest.mark.parametrize(
    ("K", "rows", "cache_dtype"),
    [(0, 1, "float16"), (3, 2, "float16"), (3, 1, "bfloat16"), (2, 1, "float32")],
)
def test_no_cache_is_copied_or_converted_in_the_loop(K, rows, cache_dtype):
    """Each cache is the result of one fusion, the write of a window's slots; anything else would be a pass over it."""
    slots = 4096
    program = compiled(slots, K, cache_dtype, rows)
    found = whole_cache_operations(program.as_text(), f"{rows},{slots},{SMALL.key_heads},{SMALL.head_dim}")
    caches = 2 if K == 0 else 6  # keys and values: the trunk's layer; the MTP block's, in the first and deeper passes
    assert len(found) == caches, [line for *_, line in found]
    assert_writes(found)


def test_windows_of_several_widths_copy_no_cache_either():
    """A conditional would copy what it hands through. Three widths of the trunk; three of catching up, and deeper."""
    slots = 4096
    text = compiled(slots, 3, "float16", method=Method(adaptive=True)).as_text()
    found = whole_cache_operations(text, f"1,{slots},{SMALL.key_heads},{SMALL.head_dim}")
    assert len(found) == 2 * 3 + 2 * 3 + 2, [line for *_, line in found]
    assert_writes(found)


def assert_writes(found):
    for name, kind, line in found:
        assert kind == "fusion", line
        assert name.startswith(("wrapped_scatter", "scatter")) or "dynamic-update-slice" in name, line


@needs_compiler
@pytest.mark.parametrize(("K", "rows"), [(0, 1), (3, 2)])
def test_a_recurrent_state_is_only_read_and_then_replayed_in_place(K, rows):
    """Of a state's size there is one result, that of the kernel's call, and it is its operand's buffer."""
    text = compiled(256, K, "float16", rows).as_text()
    E = SMALL.delta_head_dim
    found = whole_cache_operations(text, f"{rows},{SMALL.delta_heads},{E},{E}")
    assert [kind for _, kind, _ in found] == ["custom-call"], [line for *_, line in found]
    (line,) = (line for *_, line in found)
    assert "sharpi_delta_replay" in line
    assert re.search(r"output_to_operand_aliasing=\{\{\}: \(0, \{\}\)\}", line)
    assert text.count('"sharpi_delta_window') == 1


def test_a_step_needs_no_more_memory_for_a_longer_context():
    """A step works on blocks of the caches: from 1k to 32k slots its temporary memory stays what it is."""
    small, large = (compiled(slots, 3, "float16") for slots in (1024, 32768))
    assert large.memory_analysis().temp_size_in_bytes < 1.2 * small.memory_analysis().temp_size_in_bytes + (1 << 18)


@pytest.mark.parametrize("cache_dtype", ["float16", "uint16", "float32"])
@pytest.mark.parametrize(("N", "G", "E"), [(2, 4, 256), (2, 2, 32), (3, 1, 80)])
def test_attention_is_float64s_and_its_bits_know_no_other_queries_rows_or_slots(cache_dtype, N, G, E):
    """Windows of 1 to 9 queries that start at, before and after a block's end, in caches of several sizes."""
    B, T, dtype = 3, 9, jnp.dtype(cache_dtype)
    rng = np.random.default_rng(E)
    starts = np.array([BLOCK - 1, 0, 2 * BLOCK - 3], np.int32)
    k, v = (to_stored(jnp.asarray(rng.standard_normal((B, 5 * BLOCK, N, E), np.float32)), dtype) for _ in range(2))
    q = jnp.asarray(rng.standard_normal((B, T, N, G, E), np.float32) * E**-0.5)
    attend = jax.jit(attention._attend)

    def run(rows, width, slots):
        window = window_at(jnp.asarray(starts[rows]), jnp.full(len(starts[rows]), width), width, row_exact=True)
        return np.asarray(attend(q[rows, :width], window, KVCache(k[rows, :slots], v[rows, :slots])))

    everything = slice(0, B)
    whole = run(everything, T, 5 * BLOCK)
    keys, values = (np.asarray(attention.from_stored(x), np.float64) for x in (k, v))
    for row in range(B):
        for t in range(T):
            seen = starts[row] + t + 1
            scores = np.einsum("nge,sne->ngs", np.asarray(q[row, t], np.float64), keys[row, :seen])
            shares = np.exp(scores - scores.max(-1, keepdims=True))
            want = np.einsum("ngs,sne->nge", shares / shares.sum(-1, keepdims=True), values[row, :seen])
            assert np.abs(whole[row, t] - want).max() < 2e-6
    for width in (1, 2, 4, 7):
        assert models.same_bits(run(everything, width, 3 * BLOCK), whole[:, :width])
    for row in range(B):
        assert models.same_bits(run(slice(row, row + 1), 3, 3 * BLOCK), whole[row : row + 1, :3])
