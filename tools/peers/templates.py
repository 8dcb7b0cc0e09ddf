"""Store llama-server's chat prompts: PYTHONPATH=tests python -m tools.peers.templates --peers=FOLDER.

Run it from the repository's root; it writes tests/data/chat_prompts.json: what /apply-template gives for the templates
and conversations of tests/chat_cases.py. FOLDER is what tools/peers/fetch.py filled.
"""

import contextlib
import json
import pathlib
import tempfile
from collections.abc import Iterator
from typing import Any

import chat_cases
import vocabularies
from absl import app, flags

from tools.peers import fetch, vocabulary
from tools.peers.server import Server, running


@contextlib.contextmanager
def serving(binary: pathlib.Path, name: str) -> Iterator[Server]:
    """A server with one of the templates."""
    source = chat_cases.SOURCES[name]
    own = ("--chat-template", name) if name == chat_cases.CHATML else ()
    with tempfile.TemporaryDirectory() as folder:
        model = pathlib.Path(folder) / "model.gguf"
        known = source.tokens in vocabularies.KINDS
        tokens = vocabularies.unpack(source.tokens, folder) if known else chat_cases.DATA / source.tokens
        vocabulary.wrap(tokens, model, pre=source.tokens if known else None, template=source.text)
        with running(binary, model, *vocabulary.FLAGS, "--jinja", *own) as server:
            yield server


def ask(server: Server, case: dict[str, Any]) -> str:
    """The prompt of one of `chat_cases.cases`."""
    body: dict[str, Any] = {"messages": chat_cases.CONVERSATIONS[case["conversation"]]}
    if case["thinking"] is not None:
        body["chat_template_kwargs"] = {chat_cases.SOURCES[case["template"]].switch: case["thinking"]}
    prompt: str = server.ask("apply-template", body)["prompt"]
    return prompt


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]}")
    binary = fetch.find(_PEERS.value).server
    prompts = []
    for name in chat_cases.SOURCES:
        with serving(binary, name) as server:
            if name == chat_cases.CHATML:
                chatml = server.properties()["chat_template"]
            prompts += [case | {"prompt": ask(server, case)} for case in chat_cases.cases() if case["template"] == name]
    document = {"chatml": chatml, "prompts": prompts}
    chat_cases.STORED.write_text(json.dumps(document, ensure_ascii=False, indent=1) + "\n")
    print(f"{chat_cases.STORED}: {len(prompts)} prompts")


if __name__ == "__main__":
    _PEERS = flags.DEFINE_string("peers", None, "The folder of tools/peers/fetch.py.", required=True)
    app.run(main)
