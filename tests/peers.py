"""The live peers, for tests marked `peers`: llama-server and a real model that nobody here made.

`python -m tools.peers.fetch --folder=FOLDER` fetches them; `SHARPI_PEERS=FOLDER pytest -m peers` runs the tests.
"""

import os
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tools.peers import fetch
from tools.peers.server import Server, running

VARIABLE = "SHARPI_PEERS"


def found() -> fetch.Peers:
    """The peers' paths; the test fails, with what to do, where they have not been fetched: it was asked for by name."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        pytest.fail(f"{VARIABLE} must name the folder that python -m tools.peers.fetch --folder=FOLDER has filled")
    try:
        return fetch.find(folder)
    except FileNotFoundError as error:
        pytest.fail(str(error))


def llama_server(model: str | Path, *flags: str) -> AbstractContextManager[Server]:
    """A llama-server with a model, for a with statement; `flags` are further flags of it, such as -c 1024."""
    return running(found().server, model, *flags)
