"""Store llama-server's draft counts: PYTHONPATH=tests python -m tools.peers.drafts --peers=FOLDER.

Run it from the repository's root; it writes tests/data/draft_stop.json: for each float32 fixture, at each
--spec-draft-p-min and --spec-draft-n-min, how many drafts it proposed and accepted, greedily, and the tokens. FOLDER is
what tools/peers/fetch.py filled.
"""

import itertools
import json

import models
from absl import app, flags

from tools.peers import fetch
from tools.peers.server import running

NAMES = ("qwen35-tiny", "qwen35moe-tiny", "qwen35-tiny256", "qwen35moe-tiny256")
P_MINS = (0.3, 0.4, 0.5, 0.75)
N_MINS = (0, 2)
N_MAX = 3
MAX_TOKENS = 63  # its n_predict is one more: it emits the prompt's token outside of its steps
STORED = models.DATA / "draft_stop.json"
EXACT = ("-np", "1", "-ctk", "f32", "-ctv", "f32", "-ctkd", "f32", "-ctvd", "f32", "-fa", "off", "-t", "1")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]}")
    binary = fetch.find(_PEERS.value).server
    found = []
    for name, p_min, n_min in itertools.product(NAMES, P_MINS, N_MINS):
        drafting = ("--spec-type", "draft-mtp", "--spec-draft-n-max", str(N_MAX))
        drafting += ("--spec-draft-p-min", str(p_min), "--spec-draft-n-min", str(n_min))
        with running(binary, models.fixture(f"{name}-f32"), *EXACT, *drafting) as server:
            answer = server.ask(
                "completion",
                {
                    "prompt": models.reference(name)["prompt"].tolist(),
                    "n_predict": MAX_TOKENS + 1,
                    "temperature": 0,
                    "return_tokens": True,
                    "cache_prompt": False,
                },
            )
        timings = answer["timings"]
        counts = {"drafted": timings.get("draft_n", 0), "accepted": timings.get("draft_n_accepted", 0)}
        found.append({"name": name, "p_min": p_min, "n_min": n_min, **counts, "tokens": answer["tokens"][:MAX_TOKENS]})
    STORED.write_text("[\n" + ",\n".join(json.dumps(row) for row in found) + "\n]\n")
    print(f"{STORED}: {len(found)} runs")


if __name__ == "__main__":
    _PEERS = flags.DEFINE_string("peers", None, "The folder of tools/peers/fetch.py.", required=True)
    app.run(main)
