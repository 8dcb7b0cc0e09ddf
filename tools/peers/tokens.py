"""Store llama-server's ids of hard strings: PYTHONPATH=tests python -m tools.peers.tokens --peers=FOLDER.

Run it from the repository's root; it writes tests/data/vocab/KIND.ids.json.xz
for each kind of vocabulary: the ids of tests/tokenizer_strings.py and a SHA-256 of the strings. FOLDER is what
tools/peers/fetch.py filled.
"""

import json
import lzma
import pathlib
import tempfile

import tokenizer_strings
import vocabularies
from absl import app, flags

from tools.peers import fetch, vocabulary
from tools.peers.server import running


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]}")
    binary = fetch.find(_PEERS.value).server
    strings = tokenizer_strings.strings()
    for kind in vocabularies.KINDS:
        with tempfile.TemporaryDirectory() as folder:
            model = pathlib.Path(folder) / "model.gguf"
            vocabulary.wrap(vocabularies.unpack(kind, folder), model, pre=kind)
            with running(binary, model, *vocabulary.FLAGS) as server:
                ids = [server.tokenize(text) for text in strings]
        document = {"strings": tokenizer_strings.digest(strings), "ids": ids}
        packed = lzma.compress(json.dumps(document, separators=(",", ":")).encode(), preset=9 | lzma.PRESET_EXTREME)
        (vocabularies.FOLDER / f"{kind}.ids.json.xz").write_bytes(packed)
        print(f"{kind}: {len(ids)} strings, {sum(map(len, ids))} ids, {len(packed)} bytes")


if __name__ == "__main__":
    _PEERS = flags.DEFINE_string("peers", None, "The folder of tools/peers/fetch.py.", required=True)
    app.run(main)
