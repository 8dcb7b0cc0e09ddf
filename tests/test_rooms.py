"""The shape of the code: imports run one way, text and flags stay in their rooms, files and functions stay short."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "sharpi_jax"
FILES = sorted(PACKAGE.rglob("*.py"))
# Each room may import those before it; checkpoint stands beside decode and meets it only in api.
MAY_IMPORT = {
    "errors": set(),
    "version": set(),
    "assets": set(),
    "folders": set(),
    "kernel": {"errors", "folders"},
    "quant": {"errors", "kernel"},
    "model": {"errors", "kernel", "quant"},
    "decode": {"errors", "quant", "model"},
    "evaluate": {"errors", "version", "folders", "quant", "model", "decode"},
    "checkpoint": {"errors", "quant", "model"},
    "evaluation_files": {"errors", "version", "assets", "evaluate"},
    "api": {"errors", "assets", "kernel", "quant", "model", "decode", "evaluate", "checkpoint", "evaluation_files"},
    "cli": {"errors", "assets", "folders", "version", "api", "checkpoint", "decode", "evaluate", "evaluation_files"},
    "__init__": {"errors", "version", "api", "decode", "evaluate"},
    "__main__": {"cli"},
}
# Types and small host-side modules that the command line shares with the library; none of them decodes.
CLI_MAY_USE = {"decode.options", "decode.stats", "evaluate.perplexity", "evaluate.speed", "evaluate.report.palette"}
CLI_MAY_USE |= {"evaluate.prompts", "evaluate.results", "evaluate.sweep", "evaluate.report.table"}
CLI_MAY_USE |= {"checkpoint", "checkpoint.describe", "checkpoint.gguf_file"}


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path):
    """Modules of this package that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{a.name}" if node.module == "sharpi_jax" else node.module for a in node.names]
        yield from (name.split(".", 1)[1] for name in names if name.startswith("sharpi_jax."))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_run_one_way(path):
    room = room_of(path)
    for module in imports(path):
        target = module.split(".")[0]
        assert target == room or target in MAY_IMPORT[room], f"{room} must not import {module}"
        if room == "cli" and target in ("decode", "evaluate", "checkpoint"):
            assert module in CLI_MAY_USE, f"the command line must not reach into {module}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_files_and_functions_stay_short(path):
    source = path.read_text()
    assert len(source.splitlines()) < 400
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno - node.lineno < 60, node.name


def test_rooms_of_arrays_know_no_files_flags_or_text():
    for room in ("quant", "model", "decode", "evaluate"):
        for path in (PACKAGE / room).glob("*.py"):
            tree = ast.parse(path.read_text())
            found = {a.name.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
            found |= {n.module.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module}
            assert not found & {"absl", "tokenizers", "jinja2", "os", "pathlib", "sys"}, path.name


def test_every_scatter_drops_what_lies_outside():
    for room in ("model", "decode"):
        for path in (PACKAGE / room).glob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "set":
                    modes = [k.value.value for k in node.keywords if k.arg == "mode"]
                    assert modes == ["drop"], f"{path.name}:{node.lineno}"
