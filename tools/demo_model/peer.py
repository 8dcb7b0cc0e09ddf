"""What llama.cpp makes of the exported model: python -m tools.demo_model.peer (--help lists its flags).

Writes greedy tokens without and with `--spec-type draft-mtp`, and drafted / accepted counts, of 20 held-out prompts, as
the JSON that tests/test_demo_model.py holds the package to. `--model` is the F32_OF_Q8_0 export: llama.cpp quantises
activations too when weights are Q8_0, so only on float32 weights are the two engines' tokens meant to be equal.

The server is that of `tools/peers/fetch.py`. It is started anew for every request with drafts: it carries the MTP
block's state over from one request to the next, which changes its counts.
"""

import json
import pathlib
from collections.abc import Iterator
from contextlib import AbstractContextManager

import numpy as np
from absl import app, flags

import sharpi_jax
from tools.demo_model.data import FOLDER, corpus
from tools.demo_model.prompts import held_out_prompts
from tools.peers.server import Server, running

_SERVER = flags.DEFINE_string("server", None, "llama-server.", required=True)
_MODEL = flags.DEFINE_string("model", None, "The float32 GGUF.", required=True)
_OUT = flags.DEFINE_string("out", None, "The JSON file to write.", required=True)
PROMPTS, TOKENS, DEPTHS = 20, 64, (1, 2, 3)
# ORACLE: float32 caches and no flash attention, so that its arithmetic is the plain one.
_CACHES = ["-ctk", "f32", "-ctv", "f32", "-ctkd", "f32", "-ctvd", "f32"]
_EXACT = ["-np", "1", *_CACHES, "-fa", "off", "-t", "2", "-c", "1024"]


def server(*extra: str) -> AbstractContextManager[Server]:
    """A llama-server that is ready to answer."""
    return running(_SERVER.value, _MODEL.value, *_EXACT, *extra)


def complete(peer: Server, prompt: list[int]) -> dict:
    """One greedy request, end tokens masked."""
    body = {
        "prompt": prompt,
        "n_predict": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_tokens": True,
        "cache_prompt": False,
    }
    return peer.ask("completion", body)


def compare(model: sharpi_jax.Model, runs: list[dict]) -> Iterator[str]:
    """How the package's own runs of the same file compare: tokens, and counts where the tokens are equal."""
    same_tokens, same_counts = 0, 0
    for index, run in enumerate(runs):
        for depth in DEPTHS:
            # The server emits the first token outside its steps: its N + 1 tokens are our N.
            options = sharpi_jax.DecodeOptions(max_tokens=TOKENS - 1, spec_draft_n_max=depth, ignore_eos=True)
            ours = model.generate(run["prompt"], options)
            same_counts += [ours.stats.drafted, ours.stats.accepted] == run["counts"][depth]
        pairs = enumerate(zip(ours.output_ids, run["tokens"], strict=False))
        parting = next((at for at, (a, b) in pairs if a != b), None)
        same_tokens += parting is None
        if parting is not None:
            logits = np.sort(model.score([*run["prompt"], *ours.output_ids[:parting]]).logits[-1])
            lead = logits[-1] - logits[-2]
            yield f"prompt {index} parts at token {parting + 1}, where our first choice leads by {lead:.4f}"
    yield f"tokens equal on {same_tokens} of {len(runs)} prompts"
    yield f"drafted and accepted counts equal in {same_counts} of {len(runs) * len(DEPTHS)} runs"


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]}")
    model = sharpi_jax.load(_MODEL.value)
    runs = [
        {"prompt": prompt, "counts": {}}
        for prompt in held_out_prompts(model, corpus(pathlib.Path(FOLDER.value)).test, PROMPTS)
    ]
    with server() as peer:
        for run in runs:
            run["tokens"] = complete(peer, run["prompt"])["tokens"]
    for depth in DEPTHS:
        for run in runs:
            with server("--spec-type", "draft-mtp", "--spec-draft-n-max", str(depth)) as peer:
                answer = complete(peer, run["prompt"])
            assert answer["tokens"] == run["tokens"], "llama.cpp's own output changed with drafting"
            timings = answer["timings"]
            run["counts"][depth] = [timings["draft_n"], timings["draft_n_accepted"]]
    lines = ",\n".join(json.dumps(run) for run in runs)
    pathlib.Path(_OUT.value).write_text(f"[\n{lines}\n]\n")
    for line in compare(model, runs):
        print(line)


if __name__ == "__main__":
    app.run(main)
