"""Parts of bench/gpu.py: whole models, held to the CPU, and timed by draft length, window and engine."""

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import sharpi_jax
from bench.make_model import SHAPES, write
from sharpi_jax import checkpoint
from sharpi_jax.decode.controls import make_controls
from sharpi_jax.decode.decoder import Decoder
from sharpi_jax.decode.score import score
from sharpi_jax.decode.state import DecodeState
from sharpi_jax.evaluate.speed import IdleDrafter, step_bytes
from sharpi_jax.quant import Tiled

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import models  # the fixtures, and what is compared of a state

SLOTS, TOKENS, ROUNDS = 128, 48, 3
PROMPT = [1 + i % 250 for i in range(16)]


def fixture_run(name: str, K: int) -> DecodeState:
    """A fixture's reference prompt and TOKENS tokens after it, on the default device."""
    decoder = _fixture(name)
    controls = make_controls([1.0], [])
    state = decoder.prefill([models.reference(_base(name))["prompt"].tolist()], [TOKENS], SLOTS, controls, K=K)
    return jax.block_until_ready(decoder.advance(state, controls, TOKENS))


_decoders: dict[tuple[str, Any], Decoder] = {}


def _fixture(name: str) -> Decoder:
    key = (name, jax.config.jax_default_device)
    if key not in _decoders:
        engine = "xla" if key[1] is not None else None
        read = checkpoint.read(models.fixture(name), engine=engine)
        _decoders[key] = Decoder(read.params, read.config)
    return _decoders[key]


def _base(name: str) -> str:
    return name[: name.rindex("-")]


def _ids(state: DecodeState) -> list[int]:
    start, end = int(state.prompt_length[0]), int(state.length[0])
    return np.asarray(state.tokens)[0, start:end].tolist()


def against_cpu(name: str, depths: tuple[int, ...]) -> dict[str, Any]:
    """Whether a fixture's tokens are the CPU's and its bits the same with and without drafts, and how logits differ."""
    with jax.default_device(jax.devices("cpu")[0]):
        want = _ids(fixture_run(name, 0))
        text = models.reference(_base(name))["prompt"].tolist() + want
        cpu_logits = score(_fixture(name), text).logits
    plain = fixture_run(name, 0)
    found: dict[str, Any] = {"file": name, "logits_difference": None, "logits_size": float(np.abs(cpu_logits).max())}
    found["logits_difference"] = float(np.abs(score(_fixture(name), text).logits - cpu_logits).max())
    for K in depths:
        state = fixture_run(name, K) if K else plain
        pairs = zip(models.committed(state, 0), models.committed(plain, 0), strict=True)
        same = [models.same_bits(a, b) for a, b in pairs]
        found[f"K={K}"] = {"ids_are_the_cpus": _ids(state) == want, "bits_are_those_of_K=0": all(same)}
    return found


class Timed:
    """A random model of a real shape on the device, on which every draft is accepted.

    Attributes:
      decoders: one per engine, on the same weights.
    """

    def __init__(self, shape: str, file_type: str, folder: Path) -> None:
        path = folder / f"{shape}-{file_type}.gguf"
        write(path, SHAPES[shape], file_type, "ceiling")
        self.nbytes = path.stat().st_size
        read = checkpoint.read(path)
        path.unlink()
        plain = jax.tree.map(_plainly, read.params, is_leaf=lambda leaf: isinstance(leaf, Tiled))
        self.decoders = {"": Decoder(read.params, read.config), "xla": Decoder(plain, read.config)}
        self._states: dict[tuple[str, int], DecodeState] = {}

    def run(self, K: int, engine: str = "", *, idle: bool = False) -> dict[str, float]:
        """Medians of a few runs. With `idle` drafts cost nothing, and a step is a window of K + 1 positions."""
        decoder, controls = self.decoders[engine], make_controls([1.0], [])
        compiled = decoder.programs.compile_s
        key = (engine, K)
        if key not in self._states:
            self._states[key] = decoder.prefill([PROMPT], [TOKENS], SLOTS, controls, K=K)
        times = []
        for _ in range(1 + ROUNDS):
            state = jax.block_until_ready(jax.tree.map(jnp.copy, self._states[key]))  # which the loop takes over
            spent, began = decoder.programs.compile_s, time.perf_counter()
            state = jax.block_until_ready(decoder.advance(state, controls, TOKENS, IdleDrafter() if idle else None))
            times.append(time.perf_counter() - began - (decoder.programs.compile_s - spent))
        run_s, steps = statistics.median(times[1:]), int(state.counters.steps[0])
        nbytes = step_bytes(decoder.params, decoder.cfg, 0 if idle else K)
        return {
            "K": K,
            "tokens_per_s": int(state.emitted[0]) / run_s,
            "step_ms": 1e3 * run_s / steps,
            "tokens_per_step": int(state.emitted[0]) / steps,
            "gb_per_s": nbytes * steps / run_s / 1e9,
            "compile_s": decoder.programs.compile_s - compiled,
        }


def _plainly(leaf: Any) -> Any:
    return leaf.replace(engine="xla") if isinstance(leaf, Tiled) else leaf


def versions() -> dict[str, Any]:
    """What this ran on."""
    device = jax.devices()[0]
    memory = device.memory_stats() or {}
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "memory_gb": memory.get("bytes_limit", 0) / 1e9,
        "jax": jax.__version__,
        "sharpi_jax": sharpi_jax.__version__,
    }
