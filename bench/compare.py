"""This package and llama-server on one file: the same prompt and threads, in turn, never both busy.

    python -m bench.compare --model=FILE.gguf --server=PATH/llama-server [--threads=2] [--k=0,3] [--rounds=5]

llama-server decodes plainly for K = 0, and with `--spec-type draft-mtp` and that many drafts otherwise; its figures are
its own (`timings`). Medians. GB/s are the file's bytes, trunk and head for each step, MTP block and head for each
draft; their share is that of the bandwidth at which memory was read in the same rounds.
"""

import contextlib
import itertools
import json
import random
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import app, flags

from sharpi_jax.checkpoint.gguf_file import open_gguf
from sharpi_jax.cli import device
from sharpi_jax.errors import OptionError, SharpiError
from tools.peers.server import Server, running

if TYPE_CHECKING:  # JAX is imported when the number of threads is settled
    from sharpi_jax.api import Model

PREFILL_TOKENS = 512
OURS, THEIRS = "sharpi-jax", "llama-server"
Run = dict[str, Any]


def compare(model: "Model", servers: dict[int, Server], values: flags.FlagValues):
    """Runs of each (side, K), prefill runs of each side, and bandwidths: one of each a round, the first not kept."""
    from sharpi_jax.evaluate.bandwidth import Bandwidth

    rounds, max_tokens, vocab = values.rounds, values.max_tokens, values.spec_draft_vocab
    bandwidth, prompt = Bandwidth(values.threads), _prompt(model, values.prompt_tokens)
    long_prompt = _prompt(model, PREFILL_TOKENS)
    runs: dict[tuple[str, int], list[Run]] = {(side, K): [] for K in servers for side in (OURS, THEIRS)}
    prefill: dict[str, list[float]] = {OURS: [], THEIRS: []}
    read: list[float] = []
    for index in range(rounds + 1):
        for K, server in servers.items():
            runs[OURS, K].append(_ours(model, prompt, max_tokens, K, vocab))
            runs[THEIRS, K].append(_theirs(server, prompt, max_tokens))
        prefill[OURS].append(_ours(model, long_prompt, 1, 0, vocab)["prefill"])
        prefill[THEIRS].append(_theirs(next(iter(servers.values())), long_prompt, 1)["prefill"])
        read.append(bandwidth.measure())
        print(f"round {index} of {rounds}" + (" (compiles, not counted)" if index == 0 else ""), flush=True)
    for kept in (*runs.values(), *prefill.values()):
        del kept[0]
    return runs, prefill, max(read)


def _prompt(model: "Model", tokens: int) -> list[int]:
    """Made-up ids, the same every time; none special, and none a lone byte, which need not be text."""
    draw = random.Random(0)
    drawn = (draw.randrange(model.config.vocab_size) for _ in itertools.count())
    return list(itertools.islice((i for i in drawn if model.byte_size(i) > 1), tokens))


def _ours(model: "Model", prompt: list[int], max_tokens: int, K: int, draft_vocab: str) -> Run:
    from sharpi_jax import DecodeOptions

    spec_type = "mtp" if K else "none"
    options = DecodeOptions(max_tokens, spec_type, max(K, 1), spec_draft_vocab=draft_vocab, ignore_eos=True)
    run = model.generate(prompt, options)
    return {
        "speed": run.timing.decode_tokens_per_s,
        "prefill": run.timing.prefill_tokens_per_s,
        "steps": run.stats.steps,
        "drafted": run.stats.drafted,
        "accepted": run.stats.accepted,
        "ids": list(run.output_ids),
    }


def _theirs(server: Server, prompt: list[int], max_tokens: int) -> Run:
    body = {"prompt": prompt, "n_predict": max_tokens, "temperature": 0, "ignore_eos": True}
    answer = server.ask("completion", body | {"cache_prompt": False, "return_tokens": True})
    timings = answer["timings"]
    drafted, accepted = timings.get("draft_n", 0), timings.get("draft_n_accepted", 0)
    return {
        "speed": timings["predicted_per_second"],
        "prefill": timings["prompt_per_second"],
        "steps": timings["predicted_n"] - accepted,
        "drafted": drafted,
        "accepted": accepted,
        "ids": answer["tokens"],
    }


def step_and_draft_bytes(path: str, layers: int) -> tuple[int, int]:
    """Of the file: read by a step, and by a draft."""
    sizes = {name: info.nbytes for name, info in open_gguf(path).tensors.items()}
    head = sizes.get("output.weight", sizes["token_embd.weight"])
    block = {name: int(name.split(".")[1]) for name in sizes if name.startswith("blk.")}
    trunk = sum(sizes[name] for name, index in block.items() if index < layers)
    mtp = sum(sizes[name] for name, index in block.items() if index >= layers)
    return trunk + head, mtp + head


def summary(runs: dict[tuple[str, int], list[Run]], prefill: dict[str, list[float]], read: float, sizes) -> Run:
    """Medians and ratios."""
    sides = []
    for (side, K), kept in runs.items():
        run, speed = kept[0], statistics.median(r["speed"] for r in kept)
        seconds = len(run["ids"]) / speed
        moved = (run["steps"] * sizes[0] + run["drafted"] * sizes[1]) / seconds / 1e9
        sides.append(
            {"side": side, "K": K, "tokens_per_s": speed, "drafted": run["drafted"], "accepted": run["accepted"]}
            | {"gb_per_s": moved, "bandwidth_share": moved / read, "same_ids": run["ids"] == runs[OURS, K][0]["ids"]}
        )
    speeds = {(entry["side"], entry["K"]): entry["tokens_per_s"] for entry in sides}
    depths = sorted({K for _, K in speeds})
    rates = {side: statistics.median(kept) for side, kept in prefill.items()}
    found: Run = {"sides": sides, "bandwidth_gb_per_s": read}
    found["ours_to_theirs"] = {K: speeds[OURS, K] / speeds[THEIRS, K] for K in depths}
    if 0 in depths:
        found["gain"] = {s: {K: speeds[s, K] / speeds[s, 0] for K in depths if K} for s in (OURS, THEIRS)}
    return found | {"prefill_tokens_per_s": rates, "prefill_ours_to_theirs": rates[OURS] / rates[THEIRS]}


def report(found: Run) -> Iterator[str]:
    """The summary, line by line."""
    yield f"memory reads {found['bandwidth_gb_per_s']:.1f} GB/s"
    yield f"{'':<14}{'K':>2} {'tokens/s':>9} {'accepted':>9} {'GB/s':>6} {'share':>6}  ids of {OURS}"
    for s in found["sides"]:
        accepted, same = f"{s['accepted']}/{s['drafted']}", "yes" if s["same_ids"] else "no"
        yield (
            f"{s['side']:<14}{s['K']:>2} {s['tokens_per_s']:>9.2f} {accepted:>9} {s['gb_per_s']:>6.1f} "
            f"{s['bandwidth_share']:>6.1%}  {same}"
        )
    for K, ratio in found["ours_to_theirs"].items():
        yield f"K = {K}: {ratio:.2f} times {THEIRS}"
    for side, gains in found.get("gain", {}).items():
        for K, ratio in gains.items():
            yield f"{side}: K = {K} is {ratio:.2f} times K = 0"
    rates = found["prefill_tokens_per_s"]
    yield (
        f"prefill of {PREFILL_TOKENS}: {rates[OURS]:.1f} and {rates[THEIRS]:.1f} tokens/s, "
        f"{found['prefill_ours_to_theirs']:.2f} times {THEIRS}"
    )


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]}")
    values = flags.FLAGS
    try:
        depths = sorted({int(K) for K in values.k})
    except ValueError:
        raise app.UsageError(f"--k must be integers separated by commas, not {','.join(values.k)}") from None
    if not Path(values.server).is_file():
        raise app.UsageError(f"--server={values.server} is no file")
    device.configure("cpu", values.threads)
    try:
        found = _measure(values, depths)
    except (SharpiError, RuntimeError) as error:  # RuntimeError: llama-server did not start
        raise SystemExit(f"compare: {error}") from None
    print(f"{values.model}: {values.threads} threads, {values.max_tokens} tokens after {values.prompt_tokens}")
    print("\n".join(report(found)))
    if values.output_json:
        Path(values.output_json).write_text(json.dumps(found, indent=1) + "\n")


def _measure(values: flags.FlagValues, depths: list[int]) -> Run:
    import sharpi_jax

    model = sharpi_jax.load(values.model, act_quant=values.act_quant, engine=values.engine)
    if max(depths) > 0 and not model.has_mtp:
        raise OptionError(f"{values.model} has no MTP head; give --k=0.")
    context = max(PREFILL_TOKENS, values.prompt_tokens) + values.max_tokens + 64
    common = ("-t", str(values.threads), "-np", "1", "-c", str(context))
    with contextlib.ExitStack() as stack:
        servers = {}
        for K in depths:
            drafting = ("--spec-type", "draft-mtp", "--spec-draft-n-max", str(K)) if K else ()
            servers[K] = stack.enter_context(running(values.server, values.model, *common, *drafting))
        measured = compare(model, servers, values)
    return summary(*measured, step_and_draft_bytes(values.model, len(model.config.layer_kinds)))


if __name__ == "__main__":
    flags.DEFINE_string("model", None, "GGUF file with an MTP head", required=True)
    flags.DEFINE_string("server", None, "llama-server, with its libraries beside it", required=True)
    flags.DEFINE_integer("threads", 2, "of either side", lower_bound=1)
    flags.DEFINE_integer("rounds", 5, "runs of each kind, after one that compiles", lower_bound=1)
    flags.DEFINE_integer("prompt_tokens", 64, "tokens before the decoded ones", lower_bound=1)
    flags.DEFINE_integer("max_tokens", 64, "tokens of each run", lower_bound=1)
    flags.DEFINE_enum("act_quant", "q8", ["none", "q8"], "our activations; llama-server's are always rounded")
    flags.DEFINE_enum("engine", "auto", ["auto", "native", "xla"], "what multiplies on our side")
    flags.DEFINE_enum("spec_draft_vocab", "auto", ["auto", "full"], "among which tokens we draft")
    flags.DEFINE_list("k", "0,3", "drafts per step")
    flags.DEFINE_string("output_json", None, "a file for the figures")
    app.run(main)
