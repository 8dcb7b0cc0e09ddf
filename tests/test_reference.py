"""Hold the NumPy reference to engines that know nothing of it: llama.cpp, transformers, and gguf-py's dequantisers.

The JAX code is proved against the reference, so the reference itself needs an outside witness.
"""

from dataclasses import dataclass, replace
from functools import cache

import fixtures
import numpy as np
import pytest
from reference import numpy_model as nm
from reference.numpy_decode import decode, judge, simulate_from_drafts

MODELS = ["qwen35-tiny", "qwen35-tiny256", "qwen35moe-tiny", "qwen35moe-tiny256"]

# accepted / drafted of llama.cpp's own greedy speculation, per n_max.
LLAMA_COUNTS = {
    "qwen35-tiny": {1: (28, 34), 2: (36, 54), 3: (38, 74)},
    "qwen35-tiny256": {1: (27, 35), 2: (35, 53), 3: (38, 70)},
    "qwen35moe-tiny": {1: (27, 36), 2: (34, 58), 3: (38, 75)},
    "qwen35moe-tiny256": {1: (30, 32), 2: (36, 53), 3: (40, 65)},
}
COUNTED_TOKENS = 63  # llama.cpp's 64 include the one its prompt pass emits, outside its steps


@dataclass(frozen=True)
class Case:
    """A model, the independent engine's arrays for it, and the reference's own passes over the same tokens."""

    name: str
    reference: nm.Reference
    arrays: dict
    tokens: list
    prompt: list
    trunk: dict
    mtp: dict

    @property
    def greedy(self):
        return self.tokens[len(self.prompt) :]


@cache
def make_case(name, gguf_name, tokens_key):
    reference, arrays = nm.load(fixtures.fixture(gguf_name)), fixtures.reference(name)
    tokens, prompt = arrays[tokens_key].tolist(), arrays["prompt"].tolist()
    trunk = reference.trunk(tokens)
    return Case(name, reference, arrays, tokens, prompt, trunk, reference.mtp(tokens, trunk["hidden"]))


@pytest.fixture(scope="module", params=MODELS)
def case(request):
    """A float32 file with llama.cpp's and transformers' outputs."""
    return make_case(request.param, f"{request.param}-f32", "tokens")


@pytest.fixture(scope="module", params=fixtures.quantised(*MODELS))
def quantised(request):
    """A quantised file with outputs under exact arithmetic on its dequantised weights."""
    return make_case(request.param, request.param, "dequant_tokens")


@pytest.fixture(scope="module")
def tiny():
    return make_case("qwen35-tiny", "qwen35-tiny-f32", "tokens")


def session_drafts(reference, tokens, K):
    """Drafts [T, K] after every prefix of tokens[T], from one growing session."""
    session = nm.Session(reference)
    rows = []
    for token in tokens:
        session.append(token)
        rows.append(session.draft(K))
    return np.array(rows)


def assert_close(got, want, tolerance, name=""):
    assert got.shape == want.shape, name
    assert np.abs(got - want).max() <= tolerance, name


# --- against the other engines ----------------------------------------------------------------------------------------


def test_logits_and_hiddens_are_llama_cpps(case):
    got = {"logits": case.trunk["logits"], "hidden": case.trunk["hidden"]}
    got |= {"mtp_logits": case.mtp["logits"], "mtp_hidden": case.mtp["hidden"]}
    for name, value in got.items():
        assert value.dtype == np.float64
        assert_close(value, case.arrays[name], 1e-5, name)
        assert (value.argmax(-1) == case.arrays[name].argmax(-1)).all()


def test_logits_are_transformers(case):
    assert_close(case.trunk["logits"], case.arrays["hf_logits"], 2e-5)
    assert_close(case.mtp["logits"], case.arrays["hf_mtp_logits"], 2e-5)


def test_drafts_are_llama_cpps_at_every_position(case):
    assert (session_drafts(case.reference, case.tokens, 3) == case.arrays["draft_ids"]).all()
    for p in (0, 1, 17, len(case.tokens) - 1):
        drafts = case.reference.draft(case.tokens[: p + 1], case.trunk["hidden"], 3)
        assert drafts == case.arrays["draft_ids"][p].tolist()


def test_quantised_files_under_exact_arithmetic(quantised):
    want = quantised.arrays
    for kind, own in (("logits", quantised.trunk["logits"]), ("mtp_logits", quantised.mtp["logits"])):
        assert_close(own[:, ::2], want[f"dequant_{kind}_even"], 1e-5)
        first, second = np.sort(own, axis=-1)[:, :-3:-1].T
        assert_close(first - second, want[f"dequant_{kind}_gap"], 1e-5)
        assert (own.argmax(-1) == want[f"dequant_{kind}_argmax"])[first - second > 1e-5].all()
    plain = decode(quantised.reference, quantised.prompt, max_tokens=len(quantised.greedy), K=0)
    assert plain.tokens == quantised.greedy
    top = np.sort(quantised.trunk["logits"][len(quantised.prompt) - 1 : -1], axis=-1)
    assert (top[:, -1] - top[:, -2]).min() == pytest.approx(float(want["dequant_greedy_min_margin"]), abs=1e-6)
    assert (session_drafts(quantised.reference, quantised.tokens, 3) == want["dequant_draft_ids"]).all()


# llama.cpp's name of an activation : the reference's. FORM brings the reference's values into llama.cpp's form.
GDN_NAMES = """
    attn_norm:norm linear_attn_qkv_mixed:qkv z:z beta_sigmoid:beta gate:g conv_output_silu:convolved
    q_conv_predelta:q k_conv_predelta:k v_conv_predelta:v attn_output:delta_out new_state:S final_output:gated
    linear_attn_out:mixed ffn_out:ffn l_out:out
"""
ATTENTION_NAMES = """
    attn_norm:norm Qcur:q_roped Kcur:k_full Vcur:v gate_sigmoid:gate attn_pregate:pregate attn_output:mixed
    ffn_out:ffn l_out:out
"""
MTP_NAMES = """
    mtp_concat:concat mtp_eh_proj:eh_proj mtp_attn_norm:norm mtp_Qcur_full:q_full mtp_Qcur_normed:q_normed
    mtp_Kcur_normed:k_normed mtp_Vcur:v mtp_gate:gate mtp_attn_pregate:pregate mtp_attn_out:mixed
    mtp_attn_residual:residual mtp_attn_post_norm:post_norm mtp_ffn_out:ffn mtp_post_ffn:out
"""
FORM = {"gate_sigmoid": nm.sigmoid, "new_state": lambda S: S.swapaxes(-1, -2)}  # ggml keeps its state as [Hv, Dv, Dk]


def name_pairs(table):
    return (pair.split(":") for pair in table.split())


def test_every_recorded_activation_is_llama_cpps(tiny):
    ref, trunk, mtp = tiny.reference, {}, {}
    prompt_pass = ref.trunk(tiny.prompt, trace=trunk)
    ref.mtp(tiny.tokens, tiny.trunk["hidden"], trace=mtp)
    embd = ref.weights["token_embd.weight"]
    got = {
        "act.model.input_embed": embd[tiny.prompt],
        "act.result_norm": prompt_pass["hidden"],
        "act_mtp.mtp_tok_embd-4": embd[tiny.tokens],
        "act_mtp.mtp_enorm-4": mtp["4.concat"][:, :64],
        "act_mtp.mtp_hnorm-4": mtp["4.concat"][:, 64:],
        "act_mtp.mtp_shared_head_norm": tiny.mtp["hidden"],
    }
    for layer, recurrent in enumerate(ref.cfg.recurrent):
        for llama, ours in name_pairs(GDN_NAMES if recurrent else ATTENTION_NAMES):
            got[f"act.{llama}-{layer}"] = FORM.get(llama, lambda x: x)(trunk[f"{layer}.{ours}"])
    got |= {f"act_mtp.{llama}-4": mtp[f"4.{ours}"] for llama, ours in name_pairs(MTP_NAMES)}
    want = fixtures.arrays("qwen35-tiny.act")
    assert set(got) == set(want)
    for name in want:
        assert_close(got[name].reshape(want[name].shape), want[name], 1e-5, name)


def test_a_session_is_one_pass_token_by_token(case):
    session, tokens = nm.Session(case.reference), case.prompt
    logits = np.array([session.append(token) for token in tokens])
    whole = case.reference.trunk(tokens)
    assert_close(logits, whole["logits"], 1e-11)
    for state, want in zip(session.states, whole["states"], strict=True):
        for name in want:
            assert_close(state[name], want[name], 1e-11, name)
    assert_close(session.mtp["k"], case.mtp["k"][: len(tokens)], 1e-11)
    assert_close(session.mtp["logits"][0], case.mtp["logits"][len(tokens) - 1], 1e-11)


def test_a_file_without_mtp_is_the_trunk_of_the_one_with(tiny):
    with_mtp, without = (nm.load(fixtures.fixture(f"qwen35-tiny-{name}f16")) for name in ("", "nomtp-"))
    assert (with_mtp.trunk(tiny.prompt)["logits"] == without.trunk(tiny.prompt)["logits"]).all()
    assert decode(without, tiny.prompt, max_tokens=5, K=0).tokens == tiny.greedy[:5]
    with pytest.raises(ValueError, match="no MTP"):
        decode(without, tiny.prompt, max_tokens=5, K=1)


def test_fused_attention_projection_is_the_split_one(tiny):
    weights = dict(tiny.reference.weights)
    for layer in (3, 4):
        parts = [weights.pop(f"blk.{layer}.attn_{p}.weight") for p in "qkv"]
        weights[f"blk.{layer}.attn_qkv.weight"] = np.concatenate(parts)
    fused = replace(tiny.reference, weights=weights)
    assert_close(fused.mtp(tiny.tokens, fused.trunk(tiny.tokens)["hidden"])["logits"], tiny.mtp["logits"], 1e-11)


def test_another_architecture_is_refused():
    with pytest.raises(ValueError, match="'qwen3'"):
        nm.read_config({"general.architecture": "qwen3"})


# --- controls: what a wrong wiring looks like -------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["swap_halves", "pre_norm_hidden"])
def test_a_wrong_mtp_wiring_moves_its_logits_and_never_the_text(case, flag):
    wrong = replace(case.reference, **{flag: True})
    mtp = wrong.mtp(case.tokens, wrong.handed_over(case.trunk))
    assert np.abs(mtp["logits"] - case.arrays["mtp_logits"]).max() > 0.1
    result = decode(wrong, case.prompt, max_tokens=COUNTED_TOKENS, K=3)
    assert result.tokens == case.greedy[:COUNTED_TOKENS]
    agreement = (session_drafts(wrong, case.tokens, 3) == case.arrays["draft_ids"]).mean(axis=0)
    if flag == "pre_norm_hidden":  # measured: 38/74 and 38/70, as with the right wiring; only the logits tell
        assert agreement.min() > 0.8
    elif case.name == "qwen35-tiny":  # measured: 3/174
        assert agreement.max() < 0.1
        assert result.accepted < 0.05 * result.drafted
    else:  # measured: 32/89, where the right wiring has 38/70: a fall, not a collapse
        assert agreement[0] < 0.7
        assert agreement[2] < 0.3
        assert result.drafted > LLAMA_COUNTS[case.name][3][1]


def test_drafts_shifted_by_one_collapse(case):
    for shift in (-1, 1):
        table = np.roll(case.arrays["draft_ids"], shift, axis=0)
        drafted, accepted = simulate_from_drafts(case.tokens, len(case.prompt), table, 3, COUNTED_TOKENS)
        assert accepted < 0.05 * drafted


def test_repeating_key_heads_instead_of_tiling_them_shows(case, monkeypatch):
    monkeypatch.setattr(nm, "tile_heads", lambda x, count: np.repeat(x, count // x.shape[1], axis=1))
    assert np.abs(case.reference.trunk(case.tokens)["logits"] - case.arrays["logits"]).max() > 0.1


# --- elementary functions ---------------------------------------------------------------------------------------------


def test_activations_at_ordinary_and_extreme_arguments():
    x = np.array([-1000.0, -1.0, 0.0, 2.0, 1000.0])
    assert nm.sigmoid(x) == pytest.approx([0.0, 1 / (1 + np.e), 0.5, 1 / (1 + np.exp(-2.0)), 1.0], abs=1e-15)
    assert nm.softplus(x) == pytest.approx([0.0, np.log1p(np.exp(-1)), np.log(2), np.log1p(np.exp(2)), 1000.0])
    assert nm.silu(x) == pytest.approx(x * nm.sigmoid(x))


def test_norms_and_query_scale():
    x, w = np.array([[3.0, 4.0]]), np.array([1.0, 2.0])
    assert nm.rms_norm(x, w, 0.0) == pytest.approx(np.array([[3.0, 8.0]]) / np.sqrt(12.5))
    assert nm.l2norm(x, 11.0) == pytest.approx(x / 6.0)
    assert nm.scale_query(np.ones((1, 2, 16))) == pytest.approx(np.full((1, 2, 16), 0.25))


def test_rope_turns_pairs_half_the_rotated_dims_apart():
    x = np.zeros((1, 1, 6))
    x[0, 0] = [1.0, 0.0, 0.0, 1.0, 5.0, 6.0]
    out = nm.rope_neox(x, [3], 4, 100.0)[0, 0]
    assert out == pytest.approx([np.cos(3), -np.sin(0.3), np.sin(3), np.cos(0.3), 5.0, 6.0])


def test_convolution_splits_anywhere():
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(7, 5)), rng.normal(size=(5, 4))
    whole, state = nm.causal_conv_silu(x, w, np.zeros((3, 5)))
    assert (state == x[4:]).all()
    assert whole[3] == pytest.approx(nm.silu((x[:4] * w.T).sum(axis=0)))
    first, middle = nm.causal_conv_silu(x[:2], w, np.zeros((3, 5)))
    second, last = nm.causal_conv_silu(x[2:], w, middle)
    assert (np.concatenate([first, second]) == whole).all()
    assert (last == state).all()


def test_delta_rule_reads_back_what_it_learned_and_overwrites_it():
    k = nm.l2norm(np.array([[[1.0, 2.0, 2.0]], [[1.0, 2.0, 2.0]]]), 0.0)
    v = np.array([[[5.0, 7.0]], [[-1.0, 4.0]]])
    o, S = nm.delta_rule(k, k, v, np.full((2, 1), -0.5), np.ones((2, 1)), np.zeros((1, 3, 2)))
    assert o == pytest.approx(v)
    still, S2 = nm.delta_rule(k[:1], k[:1], v[:1], np.zeros((1, 1)), np.zeros((1, 1)), S)  # beta = g = 0: a pure read
    assert still[0] == pytest.approx(v[1])
    assert (S2 == S).all()


def test_attention_of_equal_keys_is_the_running_mean_of_its_group():
    v = np.arange(12.0).reshape(3, 2, 2)
    q, k = np.ones((3, 4, 2)), np.ones((3, 2, 2))
    mean = np.cumsum(v, axis=0) / np.arange(1, 4)[:, None, None]
    assert nm.gated_attention(q, k, v, np.zeros((3, 4, 2))) == pytest.approx(0.5 * np.repeat(mean, 2, axis=1))
    assert nm.causal_attention(q[2:], k, v) == pytest.approx(np.repeat(mean[2:], 2, axis=1))


# --- the decode rule --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("K", [1, 2, 3])
def test_drafted_and_accepted_counts_are_llama_cpps(case, K):
    want = LLAMA_COUNTS[case.name][K]
    table = case.arrays["draft_ids"]
    assert simulate_from_drafts(case.tokens, len(case.prompt), table, K, COUNTED_TOKENS) == want[::-1]
    result = decode(case.reference, case.prompt, max_tokens=COUNTED_TOKENS, K=K)
    assert (result.accepted, result.drafted) == want
    assert (result.accepted_argmax, result.accepted_p_min) == (want[0], 0)
    assert sum(result.drafted_per_position) == result.drafted
    assert sum(result.accepted_per_position) == result.accepted
    assert result.counters["steps"] == COUNTED_TOKENS - result.accepted


@pytest.mark.parametrize("K", range(6))
def test_speculation_at_p_min_1_is_greedy_for_every_draft_length(case, K):
    result = decode(case.reference, case.prompt, max_tokens=64, K=K)
    assert (result.tokens, result.finish_reason) == (case.greedy, "length")


def oracle_drafter(tokens, wrong_at=None):
    """Drafts that continue the known sequence `tokens`, except that draft number `wrong_at` is a wrong one."""

    def drafter(prefix, K):
        drafts = tokens[len(prefix) : len(prefix) + K]
        return [(d + 1) % 512 if j == wrong_at else d for j, d in enumerate(drafts)]

    return drafter


@pytest.mark.parametrize("wrong_at", [0, 1, 2, None])
def test_the_accepted_prefix_ends_at_the_first_wrong_draft(tiny, wrong_at):
    drafter = oracle_drafter(tiny.tokens, wrong_at)
    result = decode(tiny.reference, tiny.prompt, max_tokens=20, K=3, drafter=drafter)
    assert result.tokens == tiny.greedy[:20]
    assert {step.accepted for step in result.steps[:-1]} == {3 if wrong_at is None else wrong_at}
    assert result.steps[0].position == len(tiny.prompt)
    assert all(p > 0 for step in result.steps for p in step.probs)


def test_the_last_windows_shrink_to_the_budget_and_to_the_context(tiny):
    drafter = oracle_drafter(tiny.tokens)
    for room in range(1, 7):
        by_budget = decode(tiny.reference, tiny.prompt, max_tokens=room, K=3, drafter=drafter)
        ctx = len(tiny.prompt) + room
        by_context = decode(tiny.reference, tiny.prompt, max_tokens=99, ctx=ctx, K=3, drafter=drafter)
        assert by_budget.tokens == by_context.tokens == tiny.greedy[:room]
        assert (by_budget.finish_reason, by_context.finish_reason) == ("length", "context")
        assert by_budget.counters == by_context.counters
        assert by_budget.drafted == room - len(by_budget.steps)


@pytest.mark.parametrize("at", range(6))
def test_a_stop_token_ends_the_row_wherever_it_stands(tiny, at):
    """Index `at` of the output is the certain token of a step (0, 4) or an accepted draft (1, 2, 3, 5)."""
    stop = tiny.greedy[at]
    assert stop not in tiny.greedy[:at]
    drafter = oracle_drafter(tiny.tokens)
    result = decode(tiny.reference, tiny.prompt, max_tokens=20, K=3, stop_ids=[stop], drafter=drafter)
    assert (result.tokens, result.finish_reason) == (tiny.greedy[:at], "stop")
    assert len(result.steps) + result.accepted == at
    if at:
        assert result.steps[-1].next_token == stop


def test_order_of_the_reasons_to_end(tiny):
    stop, P = tiny.greedy[0], len(tiny.prompt)
    endings = [(0, [stop]), (1, [stop]), (1, [])]
    end = [decode(tiny.reference, tiny.prompt, max_tokens=n, ctx=P, K=2, stop_ids=ids) for n, ids in endings]
    assert [r.finish_reason for r in end] == ["length", "stop", "context"]
    assert all(r.tokens == [] and r.steps == [] for r in end)


def test_suppressed_tokens_are_never_emitted_though_still_drafted(tiny):
    banned = tiny.greedy[1]
    runs = [decode(tiny.reference, tiny.prompt, max_tokens=30, K=K, suppress_ids=[banned]) for K in (0, 2)]
    assert runs[0].tokens == runs[1].tokens
    assert banned not in runs[0].tokens
    options = {"max_tokens": 3, "K": 1, "drafter": lambda tokens, K: [banned]}
    forced = decode(tiny.reference, tiny.prompt, suppress_ids=[banned], **options)
    assert forced.steps[0].probs == [0.0]
    assert forced.accepted == 0


def test_a_lossy_threshold_counts_its_acceptances_apart(tiny):
    """A threshold between the runner-up's probability and zero lets the runner-up through, as a p_min acceptance."""
    second = int(np.argsort(tiny.trunk["logits"][len(tiny.prompt)])[-2])
    options = {"max_tokens": 3, "K": 1, "drafter": lambda tokens, K: [second]}
    p = decode(tiny.reference, tiny.prompt, **options).steps[0].probs[0]
    loose = decode(tiny.reference, tiny.prompt, p_min=p * 0.999, **options)
    assert loose.tokens[1] == second
    assert (loose.steps[0].accepted, loose.steps[0].is_argmax) == (1, [False])
    assert loose.accepted_p_min >= 1
    ended = decode(tiny.reference, tiny.prompt, p_min=p * 0.999, stop_ids=[second], **options)
    assert (ended.tokens, ended.finish_reason, ended.accepted) == (tiny.greedy[:1], "stop", 0)
    assert ended.steps[0].next_token == second  # the accepted stop token, not the target's argmax
    for p_min in (p * 1.001, 1.0, 0.0, -1.0):
        assert decode(tiny.reference, tiny.prompt, p_min=p_min, **options).tokens == tiny.greedy[:3]


def test_judge_on_ties_and_on_nan():
    tie = np.array([0.0, 0.0, -np.inf])
    assert judge(tie, 0, 1.0) == (True, True, 0.5)
    assert judge(tie, 1, 0.5) == (True, False, 0.5)
    assert judge(tie, 1, 0.501) == (False, False, 0.5)
    assert judge(tie, 2, 1e-9)[0] is False
    for bad in (np.nan, np.inf):
        accept, is_argmax, p = judge(np.array([0.0, bad, 1.0]), 2, 1e-9)
        assert (accept, is_argmax) == (False, False)
        assert np.isnan(p)
