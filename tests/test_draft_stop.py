"""Drafting that stops by the drafter's own probability: llama-server's counts, and what a step then costs."""

import json

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest

from sharpi_jax.decode.candidates import pick
from sharpi_jax.decode.controls import Method, make_controls
from sharpi_jax.decode.options import DecodeOptions
from sharpi_jax.decode.verify import verify_widths

# What tools/peers/drafts.py stores of llama-server: greedy, 63 tokens after the first, 3 drafts at most.
LLAMA = json.loads((models.DATA / "draft_stop.json").read_text())
RUNS = {name: [run for run in LLAMA if run["name"] == name] for name in sorted({run["name"] for run in LLAMA})}


@pytest.mark.parametrize("name", RUNS)
def test_counts_are_llama_servers(name):
    """At each p-min and n-min: the drafter's probability among its 10 likeliest candidates, as there."""
    model, prompt = models.model(f"{name}-f32"), models.reference(name)["prompt"].tolist()
    for run in RUNS[name]:
        options = DecodeOptions(
            max_tokens=63,
            spec_draft_stop_p=run["p_min"],
            spec_draft_stop_top_k=10,
            spec_draft_n_min=run["n_min"],
        )
        found = model.generate(prompt, options)
        assert list(found.output_ids) == run["tokens"]
        assert (found.stats.drafted, found.stats.accepted) == (run["drafted"], run["accepted"]), run
    assert len({(run["drafted"], run["accepted"]) for run in RUNS[name]}) > 1, "the cases differ"


def test_the_oracles_row_is_there():
    """ORACLE.md gives accepted / drafted at n 3 and p-min 0.75, measured by others."""
    row = {run["name"]: (run["accepted"], run["drafted"]) for run in LLAMA if run["p_min"] == 0.75 and not run["n_min"]}
    expected = {"qwen35-tiny": (31, 32), "qwen35moe-tiny": (15, 15)}
    assert row == expected | {"qwen35-tiny256": (32, 32), "qwen35moe-tiny256": (37, 37)}


def softmax(logits):
    shares = np.exp(logits.astype(np.float64) - logits.max())
    return shares / shares.sum()


@pytest.mark.parametrize("candidates", [0, 1, 10, 400])
@pytest.mark.parametrize("listed", [False, True])
def test_a_draft_is_sure_by_the_drafters_probability(candidates, listed):
    """Of the whole vocabulary, or of its likeliest candidates; ids that fill up a shortlist count once."""
    rng = np.random.default_rng(candidates)
    logits = (4 * rng.standard_normal((64, 1, 300))).astype(np.float32)
    ids = None
    kept = logits[:, 0]
    if listed:
        ids = jnp.asarray(np.r_[np.arange(0, 580, 2), [578] * 10], jnp.int32)
        logits[:, :, 289:] = logits[:, :, 289:290]
        kept = logits[:, 0, :290]
    best = kept.argmax(-1)
    top = np.sort(kept, axis=-1)[:, ::-1][:, : candidates or None]
    expected = np.array([softmax(row)[0] for row in top])
    for stop_p in (0.2, 0.6, 0.95):
        method = Method(draft_stop=candidates)
        controls = make_controls([1.0] * 64, [], options=DecodeOptions(spec_draft_stop_p=stop_p), method=method)
        found = jax.jit(lambda x, c: pick(x, ids, 600, jnp.zeros(64, jnp.int32), 0, c))(logits, controls)
        clear = np.abs(expected - stop_p) > 1e-5
        assert (np.asarray(found.sure) == (expected >= stop_p))[clear].all()
        assert np.asarray(found.token).tolist() == (best if ids is None else np.asarray(ids)[best]).tolist()


def test_a_step_without_drafts_costs_no_draft_pass_and_a_narrow_window():
    """The block waits: its cache stays as it was, until drafts are wanted; then it knows all between."""
    decoder, prompt = models.decoder("qwen35-tiny-f32"), models.reference("qwen35-tiny")["prompt"].tolist()
    K = 3

    def run(n_max):
        """One step for each entry, which is its most drafts."""
        first = make_controls([1.0], [], n_max=[K])
        state = decoder.prefill([prompt], [40], 128, first, K=K)
        states = []
        for most in n_max:
            controls = make_controls([1.0], [], n_max=[most])
            state = decoder.advance(state, controls, int(state.emitted[0]) + 1)
            states.append(jax.device_get(state))
        return states

    held = run([0] * 5)
    before = held[0].mtp.k
    assert all((state.mtp.k == before).all() for state in held[1:]), "no pass of the block"
    assert [int(state.behind[0]) for state in held] == [1, 2, 3, 4, 5]
    longer = run([0] * 8)
    assert [int(state.behind[0]) for state in longer] == [1, 2, 3, 4, 5, 6, 7, 0]  # eight hiddens fit
    back = run([0, 0, 0, 3])[-1]
    whole = decoder.prefill([back.tokens[0, : int(back.last.position[0])].tolist()], [40], 128, first_controls(K), K=K)
    always = jax.device_get(decoder.advance(whole, first_controls(K), 1))
    assert back.last.drafts.tolist() == always.last.drafts.tolist()


def first_controls(K):
    return make_controls([1.0], [], n_max=[K])


def test_widths_are_few_and_hold_every_window():
    assert verify_widths(0, variable=True) == verify_widths(0, variable=False) == (1,)
    assert verify_widths(1, variable=True) == (1, 2)
    assert verify_widths(3, variable=True) == (1, 2, 4)
    assert verify_widths(7, variable=True) == (1, 2, 4, 8)
    assert verify_widths(7, variable=False) == (8,)


@pytest.mark.parametrize("name", ["qwen35-tiny-q4_0", "qwen35moe-tiny-f32"])
def test_narrow_windows_keep_the_bits(name):
    """Text and caches are those of plain decoding, whatever widths the steps had."""
    decoder, prompt = models.decoder(name), models.reference(name.rsplit("-", 1)[0])["prompt"].tolist()
    plain = decoder.prefill([prompt], [30], 128, make_controls([1.0], []), K=0)
    plain = jax.device_get(decoder.advance(plain, make_controls([1.0], []), 30))
    state = decoder.prefill([prompt], [30], 128, first_controls(7), K=7)
    widths = set()
    for most in [0, 1, 3, 7, 2, 0, 0, 5] * 4:
        state = decoder.advance(state, make_controls([1.0], [], n_max=[most]), int(state.emitted[0]) + 1)
        widths.add(int(state.last.proposed[0]))
    state = jax.device_get(state)
    assert len(widths) > 4
    assert state.tokens[0, : int(state.length[0])].tolist() == plain.tokens[0, : int(plain.length[0])].tolist()
    pairs = zip(models.committed(state, 0), models.committed(plain, 0), strict=True)
    assert all(models.same_bits(a, b) for a, b in pairs)
