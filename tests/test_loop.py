"""The loop's invariants, and what goes wrong for people who do this job (the field's cases by number)."""

import dataclasses

import jax
import models
import numpy as np
import pytest
from scripted import ScriptedDrafter

from sharpi_jax.decode.controls import make_controls
from sharpi_jax.decode.draft import MtpDrafter
from sharpi_jax.decode.generate import row_statistics
from sharpi_jax.decode.options import DecodeOptions
from sharpi_jax.decode.state import FINISH_REASONS
from sharpi_jax.model.cache import DeltaState, KVCache

MODEL, SLOTS, K = "qwen35-tiny-f32", 128, 3
PROMPT = models.reference("qwen35-tiny")["prompt"].tolist()
GREEDY = models.reference("qwen35-tiny")["greedy"].tolist()
RIGHT, WRONG = "right", "wrong"


def start(prompts, budgets, *, slots=SLOTS, K=K, stop_ids=(), p_min=1.0):
    stops = (*stop_ids, *[2**31 - 1] * (4 - len(stop_ids)))  # the same shape in every test
    controls = make_controls([p_min] * len(prompts), stops)
    return models.decoder(MODEL).prefill(prompts, budgets, slots, controls, K=K), controls


def finish(prompts, budgets, drafter=None, until=10**6, **how):
    state, controls = start(prompts, budgets, **how)
    return jax.device_get(models.decoder(MODEL).advance(state, controls, until, drafter))


def script(prompts, *, right, slots=SLOTS, wrong=None, budget=60):
    """A drafter that knows plain decoding; `right` is a count, or a function of the position of the certain token."""
    plain = finish(prompts, [budget] * len(prompts), slots=slots, K=0)
    counts = np.fromfunction(np.vectorize(right), (len(prompts), slots), dtype=int) if callable(right) else right
    counts = np.broadcast_to(np.asarray(counts, np.int32), plain.tokens.shape)
    bad = (plain.tokens + 1) % 470 if wrong is None else np.full_like(plain.tokens, wrong)
    return ScriptedDrafter(plain.tokens, np.array(counts), bad)


def output(state, row=0):
    return state.tokens[row, state.prompt_length[row] : state.length[row]].tolist()


def reason(state, row=0):
    return FINISH_REASONS[state.finish[row]]


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("stop", ["first", "second"])
def test_case_1_a_stop_token_inside_an_accepted_chain(index, stop):
    """The output ends before it, wherever in the chain of three accepted drafts it stands, whichever stop id it is."""
    drafter = script([PROMPT], right=K)
    at = 5 + index  # windows hold 4 tokens, so token 5 is the first draft of the second window
    ids = (GREEDY[at], 511) if stop == "first" else (511, GREEDY[at])
    assert GREEDY[at] not in GREEDY[:at]
    state = finish([PROMPT], [40], drafter, stop_ids=ids)
    assert output(state) == GREEDY[:at]
    assert reason(state) == "stop"
    stats = row_statistics(state, 0)
    assert stats.accepted == 3 + index
    assert stats.drafted == 6
    assert stats.steps == 2
    assert stats.accepted_per_position == tuple(1 + (j < index) for j in range(3))
    plain = finish([PROMPT], [40], K=0, stop_ids=ids)
    assert output(plain) == output(state)
    for a, b in zip(models.committed(plain, 0), models.committed(state, 0), strict=True):
        assert models.same_bits(a, b)


def test_case_1_a_stop_token_that_is_the_certain_token():
    state = finish([PROMPT], [40], script([PROMPT], right=K), stop_ids=(GREEDY[8],))
    assert output(state) == GREEDY[: GREEDY.index(GREEDY[8])]
    assert reason(state) == "stop"
    first = finish([PROMPT], [40], stop_ids=(GREEDY[0],))
    assert output(first) == []
    assert reason(first) == "stop"
    assert row_statistics(first, 0).steps == 0


@pytest.mark.parametrize("right", [0, 1, 2])
def test_case_2_a_rejected_drafted_stop_token_stops_nothing(right):
    drafter = script([PROMPT], right=right, wrong=477)
    state = finish([PROMPT], [40], drafter, stop_ids=(477,))
    assert output(state) == GREEDY[:40]
    assert reason(state) == "length"


@pytest.mark.parametrize("right", [K, 0])
@pytest.mark.parametrize("max_tokens", range(K + 3))
def test_case_3_exactly_max_tokens(max_tokens, right):
    state = finish([PROMPT], [max_tokens], script([PROMPT], right=right))
    assert output(state) == GREEDY[:max_tokens]
    assert reason(state) == "length"


@pytest.mark.parametrize("right", [0, 1, 2, 3, lambda row, at: at % 4])
def test_case_4_counts_add_up(right):
    prompts = [PROMPT, PROMPT[:7]]
    state = finish(prompts, [37, 20], script(prompts, right=right))
    for row, emitted in enumerate((37, 20)):
        stats = row_statistics(state, row)
        assert 0 <= stats.accepted <= stats.drafted
        assert stats.accepted == stats.accepted_argmax + stats.accepted_p_min
        assert list(stats.accepted_per_position) == sorted(stats.accepted_per_position, reverse=True)
        assert stats.mean_accepted_length == pytest.approx(emitted / stats.steps)
        assert sum(stats.accepted_per_position) == stats.accepted


def test_case_4_no_drafts_give_rate_zero():
    stats = row_statistics(finish([PROMPT], [5], K=0), 0)
    assert (stats.drafted, stats.acceptance_rate, stats.mean_accepted_length) == (0, 0.0, 1.0)
    untouched = row_statistics(finish([PROMPT], [0]), 0)
    assert (untouched.steps, untouched.acceptance_rate, untouched.mean_accepted_length) == (0, 0.0, 0.0)


@pytest.mark.parametrize("left", [0, 1, K, 46, 47])
@pytest.mark.parametrize("right", [K, 0, None])
def test_case_5_the_end_of_the_context(left, right):
    """`left` positions are left by the prompt in 48: from ctx - 1 down to none."""
    prompt = (PROMPT + GREEDY)[: 48 - left]
    drafter = MtpDrafter() if right is None else script([prompt], right=right, slots=48)
    plain = finish([prompt], [100], slots=48, K=0)
    state = finish([prompt], [100], drafter, slots=48)
    assert output(state) == output(plain)
    assert len(output(state)) == left == state.emitted[0]
    assert reason(state) == reason(plain) == "context"
    if right == 0:  # a token a step: with r positions left, r - 1 drafts can follow the certain token
        assert row_statistics(state, 0).drafted == sum(min(K, r - 1) for r in range(1, left + 1))
    for a, b in zip(models.committed(plain, 0), models.committed(state, 0), strict=True):
        assert models.same_bits(a, b)


@pytest.mark.parametrize("right", [0, lambda row, at: at % 4])
def test_case_6_states_equal_one_by_one_decoding_at_each_step(right):
    """Reject everything, or a changing count: conv window and delta state equal plain decoding's after every step."""
    steps = 64 if right == 0 else 24
    prompt = PROMPT[:20]
    decoder = models.decoder(MODEL)
    drafter = script([prompt], right=right, budget=80)
    drafted, controls = start([prompt], [80])
    plain, plain_controls = start([prompt], [80], K=0)
    for _ in range(steps):
        emitted = int(drafted.emitted[0])
        drafted = decoder.advance(drafted, controls, emitted + 1, drafter)
        plain = decoder.advance(plain, plain_controls, int(drafted.emitted[0]))
        assert right != 0 or int(drafted.emitted[0]) == emitted + 1
        for a, b in zip(models.committed(plain, 0), models.committed(drafted, 0), strict=True):
            assert models.same_bits(a, b)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
def test_case_7_prompts_shorter_than_the_convolution(length):
    prompt = PROMPT[:length]
    plain = finish([prompt], [30], K=0)
    assert output(finish([prompt], [30])) == output(plain)
    everything = models.model(MODEL).score([*prompt, *output(plain)])
    assert everything.logits.argmax(-1)[length - 1 : -1].tolist() == output(plain)


def test_case_9_drafts_shifted_by_one_collapse():
    """Under 5% accepted when every draft is proposed one position too early."""
    reference = models.reference("qwen35-tiny")
    tokens, drafts = reference["tokens"], reference["draft_ids"][:, 0]
    plain = finish([PROMPT], [63], K=0)
    truth = np.zeros_like(plain.tokens)
    truth[0, 2 : len(tokens) + 1] = drafts[: len(tokens) - 1]  # the head's draft for p + 1, proposed at p + 2
    state = finish([PROMPT], [63], ScriptedDrafter(truth, np.full_like(truth, K), truth))
    stats = row_statistics(state, 0)
    assert output(state) == GREEDY[:63]
    assert stats.acceptance_rate < 0.05


@pytest.mark.parametrize("depth", [2, 3])
def test_case_9_swapped_halves_collapse(depth):
    decoder = models.decoder(MODEL)
    mtp = decoder.params.mtp
    D = decoder.cfg.width
    swapped = mtp.proj.blocks[:, np.r_[D : 2 * D, 0:D]]
    wrong = dataclasses.replace(mtp, proj=dataclasses.replace(mtp.proj, blocks=swapped))
    broken = dataclasses.replace(decoder, params=dataclasses.replace(decoder.params, mtp=wrong))
    controls = make_controls([1.0], [2**31 - 1] * 4)
    state = jax.device_get(broken.advance(broken.prefill([PROMPT], [63], SLOTS, controls, K=depth), controls, 10**6))
    assert output(state) == GREEDY[:63], "a wrong wiring never breaks the text"
    assert row_statistics(state, 0).acceptance_rate < 0.05


def test_case_1_a_stop_token_that_only_p_min_lets_through():
    """It ends the row too, though the model's own choice there is another token."""
    prompt = PROMPT + GREEDY[:4]  # here the head drafts "'s", then " gentle" (446), to which the model gives 0.08
    lossy = finish([prompt], [30], p_min=0.05)
    assert output(lossy)[:3] == [*GREEDY[4:6], 446]
    stopped = finish([prompt], [30], p_min=0.05, stop_ids=(446,))
    assert output(stopped) == GREEDY[4:6]
    assert reason(stopped) == "stop"
    assert 446 not in output(finish([prompt], [30], stop_ids=(446,)))


@pytest.mark.parametrize("scripted", [True, False])
def test_invariants_hold_after_every_step_and_finished_rows_never_change(scripted):
    prompts = [PROMPT, PROMPT[:5], PROMPT[:17]]
    budgets = [12, 3, 40]
    drafter = script(prompts, right=lambda row, at: (at + row) % 4) if scripted else MtpDrafter()
    state, controls = start(prompts, budgets, stop_ids=(GREEDY[30],))
    frozen = {}
    for _ in range(40):
        before = jax.device_get(state)
        still = before.emitted[before.finish == 0]
        state = models.decoder(MODEL).advance(state, controls, int(still.min()) + 1, drafter)
        after = jax.device_get(state)
        for row in range(3):
            assert after.length[row] == after.prompt_length[row] + after.emitted[row]
            assert after.budget[row] == budgets[row] - after.emitted[row]
            assert not after.tokens[row, after.length[row] :].any(), "nothing is written past the length"
            if row in frozen:
                assert all(models.same_bits(a, b) for a, b in zip(frozen[row], _row(after, row), strict=True))
            else:
                assert after.length[row] - before.length[row] in range(1, K + 2)
            if after.finish[row]:
                frozen.setdefault(row, _row(after, row))
        if after.finish.all():
            break
    assert after.finish.all()
    assert len(frozen) == 3


def _row(state, row):
    """Everything a row owns, its committed caches whole."""
    own = [
        state.tokens,
        state.length,
        state.budget,
        state.next_token,
        state.window_hidden,
        state.finish,
        state.behind,
    ]
    own += jax.tree.leaves(state.counters)
    for layer in (*state.trunk.layers, state.mtp):
        own += [layer.k, layer.v] if isinstance(layer, KVCache) else [layer.conv, layer.recurrent]
        assert isinstance(layer, KVCache | DeltaState)
    return [np.asarray(x[row]) for x in own]


def test_interrupted_equals_uninterrupted():
    whole = finish([PROMPT], [50])
    state, controls = start([PROMPT], [50])
    for until in (1, 2, 9, 10, 31, 10**6):
        state = models.decoder(MODEL).advance(state, controls, until)
        assert int(state.emitted[0]) >= min(until, 50)
        assert int(state.emitted[0]) <= until + K
    cut = jax.device_get(state)
    assert output(cut) == output(whole)
    assert row_statistics(cut, 0) == row_statistics(whole, 0)
    for a, b in zip(models.committed(whole, 0), models.committed(cut, 0), strict=True):
        assert models.same_bits(a, b)


def test_rows_may_have_their_own_p_min():
    """One program, three thresholds: each row decodes as it would alone."""
    values = [1.0, 0.05, 0.0]
    controls = make_controls(values, [2**31 - 1] * 4)
    decoder = models.decoder(MODEL)
    state = decoder.advance(decoder.prefill([PROMPT] * 3, [40] * 3, SLOTS, controls, K=K), controls, 10**6)
    state = jax.device_get(state)
    for row, p in enumerate(values):
        assert output(state, row) == output(finish([PROMPT], [40], p_min=p))
    assert output(state, 0) == output(state, 2) == GREEDY[:40]
    assert output(state, 1) != GREEDY[:40]


def test_every_p_min_above_one_half_gives_the_ids_of_one():
    """Eight thresholds in the eight rows of one program, over prompts of several lengths."""
    rng = np.random.default_rng(11)
    decoder = models.decoder(MODEL)
    for _ in range(12):
        prompt = rng.integers(0, 470, rng.integers(1, 40)).tolist()
        values = [1.0, 0.501, *rng.uniform(0.501, 1, 6)]
        controls = make_controls(values, [2**31 - 1] * 4)
        state = decoder.advance(decoder.prefill([prompt] * 8, [40] * 8, SLOTS, controls, K=K), controls, 10**6)
        state = jax.device_get(state)
        assert all(output(state, row) == output(state, 0) for row in range(8)), values
        assert len({row_statistics(state, row) for row in range(8)}) == 1


@pytest.mark.parametrize("stop_ids", [(477,), (GREEDY[6], GREEDY[3]), (GREEDY[0],)])
def test_ignore_eos_masks_the_stop_ids(stop_ids):
    """They neither stop nor appear, and drafting changes nothing."""
    decoder = models.decoder(MODEL)
    outputs = []
    for depth in (0, K):
        controls = make_controls([1.0], stop_ids, ignore_eos=True)
        state = decoder.advance(decoder.prefill([PROMPT], [40], SLOTS, controls, K=depth), controls, 10**6)
        outputs.append(output(jax.device_get(state)))
    assert outputs[0] == outputs[1]
    assert len(outputs[0]) == 40
    assert not set(outputs[0]) & set(stop_ids)


@pytest.mark.parametrize("name", ["qwen35-tiny256-q8_0", "qwen35-tiny-bf16"])
def test_weights_stay_packed_inside_the_loop(name):
    """XLA would move the unpacking in front of the loop and keep every weight in float32 while it runs."""
    decoder = models.decoder(name)
    controls = make_controls([1.0], [477])
    state = decoder.prefill([[1, 2, 3]], [20], SLOTS, controls, K=K)
    decoder.advance(state, controls, 10**6)
    compiled = next(program for key, program in decoder.programs.items() if key == "decode_loop")
    unpacked = sum(4 * w.in_features * w.out_features for w in models.packed_weights(decoder.params))
    assert compiled.memory_analysis().temp_size_in_bytes < unpacked / 3


def test_options_out_of_range_are_refused():
    from sharpi_jax.errors import OptionError

    for wrong in (
        {"max_tokens": -1},
        {"spec_type": "eagle"},
        {"spec_draft_n_max": 0},
        {"spec_draft_n_max": 17},
        {"spec_draft_p_min": 1.5},
        {"spec_draft_p_min": float("nan")},
        {"ctx_size": 0},
    ):
        with pytest.raises(OptionError):
            DecodeOptions(**wrong)
