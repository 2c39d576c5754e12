"""The house's rooms and the direction between them, read from the imports themselves."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "hasten"
PARTS_LIBRARIES = {
    *("torch", "triton", "numpy", "transformers", "safetensors", "xxhash", "pyarrow"),
    "deepspeed",
}
# Room -> the rooms it may import. A module at the top level is a room of its own.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "parts": {"parts"},
    "core": {"core", "errors"},
    "techniques": {"techniques", "core", "parts", "models", "errors"},
    "data": {"data", "parts", "errors"},
    "models": {"models", "parts", "errors"},
    "cluster": {"cluster", "core", "parts", "errors"},
    "recipe": {"recipe", "core", "techniques", "parts", "data", "models", "cluster", "errors"},
    "evidence": {"evidence", "core", "errors"},
    "search": {"search", "models", "cluster", "evidence", "core", "parts", "errors"},
    "hosts": {"hosts", "core", "techniques", "recipe", "parts", "cluster", "errors"},
    "sample": {"core", "parts"},
    "run_folder": {"core", "errors"},
    "monitor": {"monitor", "parts", "errors"},
    "recorded": {"core", "recipe", "parts", "monitor"},
    "saving": {"core", "recipe", "models", "sample"},
    "adjusting": {"core", "evidence", "recipe", "run_folder"},
    "run": {
        *("run_folder", "core", "recipe", "data", "models", "cluster", "evidence", "sample"),
        *("adjusting", "saving", "recorded", "monitor", "errors"),
    },
    "trial": {"core", "cluster", "recipe", "evidence", "sample"},
    "guarding": {"guarding", "core", "recipe", "parts", "cluster", "errors"},
    "experiment": {"core", "cluster", "recipe", "data", "evidence", "run", "errors"},
    "tuning": {
        *("tuning", "search", "evidence", "experiment", "recipe", "data", "core", "errors"),
    },
    "cli": {
        *("cli", "core", "techniques", "data", "models", "cluster", "recipe", "evidence"),
        *("hosts", "run", "run_folder", "experiment", "search", "tuning", "parts", "errors"),
        *("monitor", "recorded"),
    },
    "__main__": {"cli"},
    "__init__": {"core", "cluster", "experiment", "hosts", "parts", "errors"},
}
# Room -> libraries beyond the standard one; None: any that the project depends on.
MAY_USE: dict[str, set[str] | None] = {
    "core": {"torch", "psutil"},
    "parts": PARTS_LIBRARIES,
    "evidence": {"numpy", "jinja2", "torch"},
    "techniques": {"torch"},
    "search": {"numpy", "optuna"},
    "monitor": {"psutil", "rich", "starlette", "uvicorn", "wandb", "mlflow"},
}


def _room(path: Path) -> str:
    inside = path.relative_to(SOURCE)
    return inside.parts[0] if len(inside.parts) > 1 else inside.stem


def _imports(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            if node.module == "hasten":
                yield from ((node.lineno, f"hasten.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, node.module


def _modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def test_every_room_has_its_rule() -> None:
    assert {_room(path) for path in _modules()} <= set(MAY_IMPORT)


def test_rooms_import_only_in_the_agreed_direction() -> None:
    wrong = []
    for path in _modules():
        room = _room(path)
        for line, name in _imports(path):
            parts = name.split(".")
            if parts[0] != "hasten" or len(parts) == 1:
                continue
            if parts[1] not in MAY_IMPORT[room]:
                wrong.append(f"{path.relative_to(SOURCE)}:{line}: {room} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_rooms_use_only_their_libraries() -> None:
    wrong = []
    for path in _modules():
        allowed = MAY_USE.get(_room(path))
        if allowed is None:
            continue
        for line, name in _imports(path):
            library = name.split(".")[0]
            if library in sys.stdlib_module_names or library == "hasten" or library in allowed:
                continue
            wrong.append(f"{path.relative_to(SOURCE)}:{line}: uses {library}")
    assert not wrong, "\n".join(wrong)


def test_only_facts_reads_the_environment() -> None:
    wrong = []
    for path in _modules():
        if path.name == "facts.py":
            continue
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            if "os.environ" in line or "getenv" in line:
                wrong.append(f"{path.relative_to(SOURCE)}:{number}")
    assert not wrong, wrong


def test_only_the_recipe_reads_the_catalogue() -> None:
    readers = {
        path.relative_to(SOURCE).as_posix()
        for path in _modules()
        if any(
            isinstance(node, ast.Name) and node.id == "CATALOGUE"
            for node in ast.walk(ast.parse(path.read_text()))
        )
    }
    assert readers == {"techniques/__init__.py", "recipe/build.py"}


@pytest.mark.parametrize("path", _modules(), ids=lambda p: p.relative_to(SOURCE).as_posix())
def test_modules_are_short_enough_to_finish_and_begin_with_what_they_are(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 500
    assert ast.get_docstring(ast.parse(text)), f"{path} has no docstring"


def test_parts_import_no_part_in_a_circle() -> None:
    graph: dict[str, set[str]] = {}
    for path in sorted((SOURCE / "parts").rglob("*.py")):  # a folder of modules is one part
        part = path.relative_to(SOURCE / "parts").parts[0].removesuffix(".py")
        names = {
            name.split(".")[2] for _, name in _imports(path) if name.startswith("hasten.parts.")
        }
        graph[part] = graph.get(part, set()) | names - {part}
    order: list[str] = []
    while len(order) < len(graph):
        ready = [n for n in graph if n not in order and graph[n] <= set(order)]
        assert ready, f"a circle among {set(graph) - set(order)}"
        order += ready


def test_importing_hasten_imports_neither_torch_nor_transformers() -> None:
    import subprocess

    code = "import hasten, sys; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
