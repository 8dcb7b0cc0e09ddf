"""llama-server as a live peer: started on a free port, asked over HTTP, stopped."""

import contextlib
import json
import os
import pathlib
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

_START_SECONDS = 120.0
_ANSWER_SECONDS = 600.0


class DiedError(RuntimeError):
    """llama-server was ended by a signal, as by an instruction that the processor does not have."""


class Server:
    """A llama-server that answers at `url`."""

    def __init__(self, url: str) -> None:
        self.url = url

    def properties(self) -> dict[str, Any]:
        """What it says about itself and its model."""
        with urllib.request.urlopen(f"{self.url}/props", timeout=_ANSWER_SECONDS) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    def ask(self, path: str, body: dict[str, Any]) -> Any:
        """The answer, parsed, to a POST of a JSON object.

        Raises:
          urllib.error.HTTPError: the server refuses it.
        """
        request = urllib.request.Request(
            f"{self.url}/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=_ANSWER_SECONDS) as answer:
            return json.load(answer)

    def tokenize(self, text: str) -> list[int]:
        """The ids of a text, without a BOS; special tokens in it are found, as in a prompt."""
        return self.ask("tokenize", {"content": text, "add_special": False, "parse_special": True})["tokens"]

    def is_ready(self) -> bool:
        """Whether the model is loaded."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=1):
                return True
        except OSError:  # nobody listens yet, or it answers 503 while it loads
            return False


@contextlib.contextmanager
def running(binary: str | os.PathLike[str], model: str | os.PathLike[str], *flags: str) -> Iterator[Server]:
    """A llama-server that has loaded the model; it ends with the context.

    Args:
      binary: llama-server; the libraries beside it are the ones that it is run with.
      model: a GGUF file with weights: one that holds a vocabulary only is refused (see `vocabulary.wrap`).
      flags: further flags of llama-server.

    Raises:
      DiedError: a signal ended it while it loaded the model.
      RuntimeError: it ended, or did not load the model in time; the message holds the end of what it wrote.
    """
    binary, port = pathlib.Path(binary), _free_port()
    command = [str(binary), "-m", str(model), "--host", "127.0.0.1", "--port", str(port), *flags]
    environment = os.environ | {"LD_LIBRARY_PATH": str(binary.parent)}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            server = Server(f"http://127.0.0.1:{port}")
            deadline = time.monotonic() + _START_SECONDS
            while not server.is_ready():
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    kind = DiedError if (process.poll() or 0) < 0 else RuntimeError
                    raise kind(f"llama-server did not start: {log.read()[-2000:].decode(errors='replace')}")
                time.sleep(0.05)
            yield server
        finally:
            process.terminate()
            process.wait()


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port
