"""The programs of a whole run lower for a GPU and for a TPU, which needs neither: a machine with a CPU can say so."""

import functools
import sys

import jax
import models
import pytest

from sharpi_jax import checkpoint
from sharpi_jax.decode.controls import make_controls
from sharpi_jax.decode.decoder import Decoder
from sharpi_jax.decode.programs import Programs
from sharpi_jax.quant import triton

SLOTS, PROMPT = 128, list(range(20))
KERNEL = "__gpu$xla.gpu.triton"


class Lowered(Programs):
    """Lowers for a platform what `Programs` compiles and runs; values are shapes only. `texts`: StableHLO by name."""

    def __init__(self, platform):
        super().__init__()
        self.platform = platform
        self.texts = {}

    def run(self, function, *args, donate=(), **static):
        traced = jax.jit(functools.partial(function, **static), donate_argnums=donate).trace(*args)
        self.texts[function.__name__] = traced.lower(lowering_platforms=(self.platform,)).as_text()
        return traced.out_info


@functools.cache
def read(name, engine):
    return checkpoint.read(models.fixture(name), engine=engine)


def lowered(name, engine, platform, K):
    found, programs = read(name, engine), Lowered(platform)
    decoder, controls = Decoder(found.params, found.config, programs), make_controls([1.0], [])
    state = decoder.prefill([PROMPT], [40], SLOTS, controls, K=K)
    decoder.advance(state, controls, SLOTS)
    return programs.texts


DENSE, EXPERTS = "qwen35-tiny256-q4_k_m", "qwen35moe-tiny256-q6_k"
RUNS = [
    ("qwen35-tiny-f32", "xla", 3, ("cuda", "tpu")),
    (DENSE, "xla", 0, ("cuda", "tpu")),
    (DENSE, "xla", 3, ("cuda", "tpu")),
    (EXPERTS, "xla", 3, ("cuda", "tpu")),
    (DENSE, "triton", 3, ("cuda", "tpu")),
    (EXPERTS, "triton", 3, ("cuda",)),
]


@pytest.mark.parametrize(
    ("name", "engine", "K", "platform"), [(*run, platform) for *run, platforms in RUNS for platform in platforms]
)
def test_a_whole_run_lowers(name, engine, K, platform):
    texts = lowered(name, engine, platform, K)
    assert set(texts) == {"_init", "prefill_trunk", "begin", "decode_loop"} | ({"prefill_mtp"} if K else set())
    few_rows = {"begin", "decode_loop"} | ({"prefill_trunk", "prefill_mtp"} if name == EXPERTS else set())
    has_kernel = {program for program, text in texts.items() if KERNEL in text}
    assert has_kernel == (few_rows if (engine, platform) == ("triton", "cuda") else set())


def test_experts_in_the_loop_by_the_gpus_kernel_give_what_exact_arithmetic_gives(monkeypatch):
    """The kernel in its place, a matrix of a stack at a traced index, run by XLA on this CPU; the rest as ever."""
    module, stacked = sys.modules["sharpi_jax.quant.matmul"], []
    plainly = module._plainly

    def by_kernel(rows, weight, dtype="float32"):
        if weight.index is None or len(rows) > 4:
            return plainly(rows, weight, dtype)
        stacked.append(weight.format)
        return triton.matmul(rows, weight, interpret=True)

    monkeypatch.setattr(module, "_plainly", by_kernel)
    name, tokens = "qwen35moe-tiny-q4_0", 8
    reference, found, controls = models.reference(name), read(name, "triton"), make_controls([1.0], [])
    decoder, prompt = Decoder(found.params, found.config), reference["prompt"].tolist()
    state = decoder.prefill([prompt], [tokens], SLOTS, controls, K=1)
    state = decoder.advance(state, controls, tokens)
    want = reference["dequant_tokens"][len(prompt) :][:tokens].tolist()
    assert state.tokens[0, len(prompt) : len(prompt) + tokens].tolist() == want
    assert stacked
