"""The packages and the direction of imports between them, read from the imports themselves."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "hasten"
# A package may import itself and the packages of earlier lines.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "formatting", "version"),
    ("progress", "foreign_files"),
    ("machine",),
    ("parts",),
    ("core",),
    ("models", "data"),
    ("techniques",),
    ("launch",),
    ("recipe",),
    ("measure",),
    ("report",),
    ("training",),
    ("planner",),
    ("tune",),
    ("integrations",),
    ("monitor",),
    ("release",),
    ("cli",),
    ("__init__", "__main__"),
)
PACKAGES = {package for layer in LAYERS for package in layer}
# Stricter than the layers.
NEVER: dict[str, set[str]] = {
    "core": {"parts"},
    "models": {"core"},
    "data": {"core"},
    "launch": {"models", "data", "techniques"},
    "planner": {"measure", "training", "techniques"},
    "monitor": PACKAGES - {"errors", "formatting", "progress", "foreign_files", "monitor"},
    "integrations": {"recipe", "training"},
    "tune": {"planner"},
}
# Two modules may import more: for stored choices, and for the form of a state on disk.
BESIDES: dict[str, set[str]] = {
    "integrations/speed_up.py": {"recipe"},
    "core/state.py": {"parts"},
}
# Of core, each module imports earlier ones only, for types too.
CORE = (
    *("slot", "context", "technique", "plan", "job", "timing", "layout", "setup", "health"),
    *("step", "resume_check", "loop", "state"),
)
PARTS = ("kernels", "data", "nn", "optim", "checkpoint", "comm", "distributed")  # layers, too
INSIDE = {"core": CORE, "parts": PARTS}
# Package -> libraries beyond the standard one; a package that isn't here: any that the project has.
MAY_USE: dict[str, set[str]] = {
    "errors": set(),
    "formatting": set(),
    "foreign_files": set(),
    "progress": {"rich"},
    "machine": {"torch", "psutil", "numpy", "filelock", "pynvml", "pydantic"},
    "parts": {
        *("torch", "triton", "numpy", "transformers", "safetensors", "xxhash", "pyarrow"),
        "deepspeed",
    },
    "core": {"torch"},
    "techniques": {"torch"},
    "measure": {"numpy", "torch", "scipy"},
    "report": {"numpy", "jinja2", "yaml", "pydantic"},
    "planner": {"numpy", "torch"},
    "tune": {"numpy", "optuna", "scipy"},
    "monitor": {"psutil", "rich", "starlette", "uvicorn"},
}
# The largest size of a package: lines of all its text files (also C++, templates and JSON) and
# Python statements without docstrings. A commit that raises a number says what went for it.
BUDGETS: dict[str, tuple[int, int]] = {
    "src/hasten/cli": (4350, 2370),
    "src/hasten/core": (4770, 2420),
    "src/hasten/data": (7490, 3930),
    "src/hasten/integrations": (4530, 2490),
    "src/hasten/launch": (1640, 730),
    "src/hasten/machine": (3080, 1500),
    "src/hasten/measure": (8400, 4690),
    "src/hasten/models": (5130, 2500),
    "src/hasten/monitor": (2540, 1150),
    "src/hasten/parts": (30020, 14200),
    "src/hasten/planner": (3200, 1560),
    "src/hasten/recipe": (8110, 3840),
    "src/hasten/release": (1370, 730),
    "src/hasten/report": (4690, 2120),
    "src/hasten/techniques": (5830, 3490),
    "src/hasten/training": (2280, 1350),
    "src/hasten/tune": (1610, 880),
    "tools": (5610, 2930),
    "scripts": (3430, 1270),
}
TEXT_FILES = {".py", ".cpp", ".h", ".json", ".yaml", ".jinja", ".html", ".sh"}
LISTED_LINES = 600  # a longer module is listed in the log of the tests, not refused


def _package(path: Path) -> str:
    inside = path.relative_to(SOURCE)
    return inside.parts[0] if len(inside.parts) > 1 else inside.stem


@functools.cache
def _nodes(path: Path) -> tuple[ast.AST, ...]:
    """Of a module's syntax tree, the module itself first."""
    return tuple(ast.walk(ast.parse(path.read_text())))


@pytest.fixture(autouse=True, scope="module")
def _trees_are_forgotten() -> Iterator[None]:
    """A million nodes, of no use to the tests of other files."""
    yield
    _nodes.cache_clear()


def _imports(path: Path) -> Iterator[tuple[int, str]]:
    for node in _nodes(path):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            if node.module == "hasten":
                yield from ((node.lineno, f"hasten.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, node.module


@functools.cache
def _modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def _may_import(package: str, other: str) -> bool:
    height = {name: number for number, layer in enumerate(LAYERS) for name in layer}
    return package == other or (
        height[other] < height[package] and other not in NEVER.get(package, set())
    )


def test_every_package_has_its_layer() -> None:
    assert {_package(path) for path in _modules()} <= PACKAGES


def test_packages_import_only_packages_of_lower_layers() -> None:
    wrong = []
    for path in _modules():
        package = _package(path)
        for line, name in _imports(path):
            parts = name.split(".")
            if parts[0] != "hasten":
                continue
            target = parts[1] if len(parts) > 1 and parts[1] in PACKAGES else "__init__"
            besides = BESIDES.get(path.relative_to(SOURCE).as_posix(), set())
            if target not in besides and not _may_import(package, target):
                wrong.append(f"{path.relative_to(SOURCE)}:{line}: {package} imports {name}")
            elif package == target and package in INSIDE:
                order, ours = INSIDE[package], path.relative_to(SOURCE / package).parts[0]
                if order.index(parts[2]) > order.index(ours.removesuffix(".py")):
                    wrong.append(f"{path.relative_to(SOURCE)}:{line}: {ours} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_packages_use_only_their_libraries() -> None:
    wrong = []
    for path in _modules():
        if _package(path) not in MAY_USE:
            continue
        allowed = MAY_USE[_package(path)]
        for line, name in _imports(path):
            library = name.split(".")[0]
            if library in sys.stdlib_module_names or library == "hasten" or library in allowed:
                continue
            wrong.append(f"{path.relative_to(SOURCE)}:{line}: uses {library}")
    assert not wrong, "\n".join(wrong)


def test_one_module_reads_the_environment() -> None:
    wrong = []
    for path in _modules():
        if path == SOURCE / "machine" / "environment.py":
            continue
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            if "os.environ" in line or "getenv" in line:
                wrong.append(f"{path.relative_to(SOURCE)}:{number}")
    assert not wrong, wrong


def test_who_reads_the_catalogue() -> None:
    """The recipe for all; and what chooses techniques where there is no recipe."""
    readers = {
        path.relative_to(SOURCE).as_posix()
        for path in _modules()
        if any(isinstance(node, ast.Name) and node.id == "CATALOGUE" for node in _nodes(path))
    }
    assert readers == {
        "techniques/__init__.py",
        "recipe/shorthands.py",
        "integrations/speed_up.py",
        "cli/keys.py",  # lists it
    }


def test_no_module_is_left_without_a_use() -> None:
    """Another module imports it or names it in a string, or the documentation names it."""
    names = {
        _dotted(path): path for path in _modules() if path.stem not in {"__init__", "__main__"}
    }
    pages = "".join(path.read_text() for path in (SOURCE.parents[1] / "docs").rglob("*.md"))
    used = {name for name in names if name in pages}
    for path in _modules():
        for node in _nodes(path):
            mentioned: list[Any] = []
            if isinstance(node, ast.Import):
                mentioned = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                mentioned = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Constant):
                mentioned = [node.value]
            used |= {name for name in mentioned if names.get(name, path) != path}
    assert sorted(names.keys() - used) == []


def test_modules_begin_with_what_they_are() -> None:
    assert [path for path in _modules() if not ast.get_docstring(_nodes(path)[0])] == []  # type: ignore[arg-type]
    for path in _modules():
        if (lines := path.read_text().count("\n")) > LISTED_LINES:
            print(f"{path.relative_to(SOURCE)} has {lines} lines")


def test_no_module_imports_itself_through_others() -> None:
    """Imports in functions and for types count, too."""
    names = {_dotted(path): path for path in _modules()}
    graph: dict[str, set[str]] = {}
    for name, path in names.items():
        found = set()
        for node in _nodes(path):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                wanted = [f"{node.module}.{alias.name}" for alias in node.names]
                found |= {full if full in names else node.module for full in wanted}
        graph[name] = (found & set(names)) - {name}
    while graph:  # take away what imports nothing that is left
        free = {name for name, needs in graph.items() if not needs & set(graph)}
        assert free, f"a circle among {sorted(graph)}"
        graph = {name: needs for name, needs in graph.items() if name not in free}


def test_a_class_name_has_one_meaning() -> None:
    """A technique may share the name of the part that it puts into its slot."""
    homes: dict[str, list[str]] = {}
    for path in _modules():
        for node in _nodes(path):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(path.relative_to(SOURCE).as_posix())
    several = {name: places for name, places in homes.items() if len(places) > 1}
    shared = [{place.partition("/")[0] for place in places} for places in several.values()]
    assert all(packages == {"techniques", "parts"} for packages in shared), several


def test_a_command_prints_through_one_function_which_escapes_what_terminals_obey() -> None:
    prints = [
        f"{path.name}:{node.lineno}"
        for path in (SOURCE / "cli").glob("*.py")
        if path.name != "output.py"
        for node in _nodes(path)
        if isinstance(node, ast.Name | ast.Attribute)
        and ast.unparse(node) in ("print", "typer.echo")  # called, or handed on
    ]
    assert not prints


def _dotted(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_importing_hasten_imports_neither_torch_nor_transformers() -> None:
    code = "import hasten, sys; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def _size(folder: Path) -> tuple[int, int]:
    """Returns a folder's lines of text and its Python statements without docstrings."""
    files = [path for path in folder.rglob("*") if path.suffix in TEXT_FILES]
    lines = sum(path.read_bytes().count(b"\n") for path in files)
    nodes = (node for path in files if path.suffix == ".py" for node in _nodes(path))
    statements = sum(
        isinstance(node, ast.stmt)
        and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for node in nodes
    )
    return lines, statements


def test_no_package_is_larger_than_its_budget() -> None:
    packages = {f"src/hasten/{path.name}" for path in SOURCE.iterdir() if any(path.glob("*.py"))}
    assert packages <= BUDGETS.keys()
    sizes = {name: _size(SOURCE.parents[1] / name) for name in BUDGETS}
    too_large = [
        f"{name} has {lines} lines and {statements} statements, of {BUDGETS[name]}"
        for name, (lines, statements) in sizes.items()
        if lines > BUDGETS[name][0] or statements > BUDGETS[name][1]
    ]
    assert not too_large
