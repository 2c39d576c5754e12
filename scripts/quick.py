"""Run the tests that a change can break, nearest first, within a time budget.

    make quick                  # what differs from HEAD; in a clean tree, the last commit
    make quick SINCE=main~3     # what differs from main~3

(1) git names the changed files  ->  (2) the imports of every Python file make a graph
->  (3) a test's distance is the number of imports between it and a change  ->  (4) the nearest
test files fill the budget  ->  (5) pytest, with this module as a plugin, picks tests of these files
and starts none that would end after the limit.

Nearly every test reaches nearly every core module, so the nearest tests stand for the rest; only
``make test`` runs them all. The graph is read from the sources at every start. It knows no folder
by name except ``src`` and ``tests``, so files may move.
"""

from __future__ import annotations

import argparse
import ast
import functools
import heapq
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, TypeGuard

import pytest

PLAN_VARIABLE = "HASTEN_QUICK_PLAN"  # names the plan's file to pytest's processes
RECORDED = Path(".pytest_cache/v/hasten/seconds")  # written by tests/common/suite_report.py
UNKNOWN_SECONDS = 0.3  # expected of a test without an example: the suite's mean
COLLECTING_SECONDS = 0.1  # expected of importing one test file
FILE_SHARE = 1 / 6  # the most of the budget for one file, until every file has had its turn
COMMON = "tests/conftest.py"  # part of every test
NEVER = ("long", "timing")  # markers: takes minutes, or needs the machine for itself
PROCESSES = min(2, os.cpu_count() or 1)
SHOWN = 8
FAR = 1000  # a distance for what a change doesn't reach
MODULE = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*"
LEAVES = (ast.Name, ast.expr_context, ast.operator, ast.cmpop)  # half of a tree, without imports

Reference = tuple[int, str, str]  # as in `from ..module import name`: level, module, name


class ChangeError(Exception):
    """git can't say what changed; the message says why."""


# (1) What changed.


def git(folder: Path, *words: str) -> str:
    """What git prints; ChangeError where it fails."""
    done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True)
    if done.returncode:
        raise ChangeError(done.stderr.strip() or f"git {words[0]} failed")
    return done.stdout


def checkout(folder: Path) -> Path:
    """The root of the git checkout that a folder is in."""
    try:
        return Path(git(folder, "rev-parse", "--show-toplevel").rstrip("\n"))
    except (ChangeError, FileNotFoundError):
        raise ChangeError(f"{folder} is in no git checkout, so its changes are unknown.") from None


def changed_files(root: Path, since: str | None) -> tuple[list[str], str]:
    """Paths that differ from a commit, untracked ones too, and the commit's name.

    Without ``since`` the commit is HEAD, or HEAD~1 where nothing differs from HEAD.
    """
    for base in [since] if since else ["HEAD", "HEAD~1"]:
        try:
            commit = git(root, "rev-parse", "--verify", "--end-of-options", base + "^{commit}")
        except ChangeError:
            raise ChangeError(f"{base!r} names no commit; name one with --since.") from None
        # A renamed file counts under both names: an importer may still use the old one.
        differ = git(root, "diff", "--name-only", "--no-renames", "-z", commit.strip(), "--")
        new = git(root, "ls-files", "--others", "--exclude-standard", "-z")
        if paths := sorted({*differ.split("\0"), *new.split("\0")} - {""}):
            return paths, base
    return [], base


# (2) Which file imports which.


def parsed(text: str) -> ast.AST:
    """The syntax tree; an empty one of what is no Python (importing it will say so)."""
    try:
        return ast.parse(textwrap.dedent(text))
    except (SyntaxError, ValueError):
        return ast.Module([], [])


def string_of(node: ast.AST | None) -> str:
    """The string that a node is, or the empty one."""
    value = node.value if isinstance(node, ast.Constant) else ""
    return value if isinstance(value, str) else ""


def is_type_checking(node: ast.AST) -> TypeGuard[ast.If]:
    """Whether this is ``if TYPE_CHECKING:``, whose imports never happen."""
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def is_lone_string(node: ast.AST) -> bool:
    """Whether this statement is a string and nothing else, as a docstring is."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def runtime_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node that may run and import: nothing in ``if TYPE_CHECKING:``, no docstring."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        inner = node.orelse if is_type_checking(node) else ast.iter_child_nodes(node)
        waiting += [c for c in inner if not isinstance(c, LEAVES) and not is_lone_string(c)]


@dataclass
class ImportReader:
    """Collects what Python code says of other files, as names that are still to be resolved."""

    packages: Collection[str]  # of src: a string that begins with one of them may name a module
    references: set[Reference] = field(default_factory=set)
    scripts: set[str] = field(default_factory=set)  # "folder/script.py" in a string

    def read(self, tree: ast.AST, strings: bool = True) -> None:
        """Read a syntax tree; ``strings`` says whether those in it can name modules."""
        nodes = list(runtime_nodes(tree))
        bound: dict[str, str] = {}  # what `import` binds: name -> module
        for node in nodes:
            if isinstance(node, ast.Import):
                self.references |= {(0, alias.name, "") for alias in node.names}
                for alias in node.names:
                    top = alias.name.partition(".")[0]
                    bound |= {alias.asname: alias.name} if alias.asname else {top: top}
            elif isinstance(node, ast.ImportFrom):
                self.references |= {(node.level, node.module or "", a.name) for a in node.names}
            elif strings and (text := string_of(node)):
                self._read_string(text)
            elif strings and isinstance(node, (ast.List, ast.Tuple)):
                words = [string_of(item) for item in node.elts]
                after_m = {b for a, b in itertools.pairwise(words) if a == "-m" and b}
                self.references |= {(0, name, "__main__") for name in after_m}
        for node in nodes:  # `package.name`: the package may hand the name on
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                module = bound.get(node.value.id)
                self.references |= {(0, module, node.attr)} if module else set()

    def _read_string(self, text: str) -> None:
        """Modules in a string: of a job, of a command, of a patch, or of code."""
        if job := re.fullmatch(rf"({MODULE}):[A-Za-z_]\w*", text):
            self.references.add((0, job[1], ""))
        self.references |= {(0, name, "__main__") for name in re.findall(rf"-m ({MODULE})", text)}
        for name in re.findall(MODULE, text):
            module, _, last = name.rpartition(".")
            if module.partition(".")[0] in self.packages:
                self.references.add((0, module, last))
        self.scripts |= set(re.findall(r"[\w./-]*\w\.py\b", text))
        if "import " in text:
            self.read(parsed(text), strings=False)


def exports_of(tree: ast.AST) -> dict[str, Reference]:
    """Names that a package's ``__init__`` hands on -> where it has them from.

    Read from imports, those for type checkers included, and from tables {name: "module"} of names
    that are imported on first use.
    """
    found: dict[str, Reference] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""
            found |= {a.asname or a.name: (node.level, module, a.name) for a in node.names}
        elif isinstance(node, ast.Dict):
            for key, value in zip(map(string_of, node.keys), node.values, strict=True):
                if key and re.fullmatch(MODULE, string_of(value)):
                    found[key] = (0, string_of(value), key)
    return found


class ImportGraph:
    """Which Python file of a checkout imports which.

    ``from package import name`` is an import of the module that defines the name. A package's
    ``__init__`` runs too whenever one of its modules is imported. That doesn't count, or an
    ``__init__`` that imports a whole catalogue would join everything to everything. What COMMON
    imports is left out for the same reason; see `kindred`.
    """

    def __init__(self, root: Path, changed: Iterable[str] = ()) -> None:
        listed = git(root, "ls-files", "--cached", "--others", "--exclude-standard", "-z")
        # A deleted file is still one that its importers name.
        there = {path for path in listed.split("\0") if path and (root / path).is_file()}
        self.root = root
        self.paths = sorted(there | set(changed))
        self.files = {path for path in self.paths if path.endswith(".py")}
        self.tests = sorted(p for p in self.files if re.match(r"tests/(.*/)?test_[^/]*$", p))
        self.packages = sorted({p.split("/")[1] for p in self.files if re.match("src/[^/]+/", p)})
        self._loose = sorted(path for path in self.files if not path.startswith("src/"))
        self._tops = sorted({p.split("/")[0] for p in self._loose if "/" in p} - {"tests"})
        self._texts: dict[str, str] = {}
        self._exports: dict[str, dict[str, Reference]] = {}
        self.imports = {path: self._imports(path) for path in sorted(self.files)}
        self.importers: dict[str, list[str]] = defaultdict(list)
        for path, targets in self.imports.items():
            for target in sorted(targets):
                self.importers[target].append(path)

    def text(self, path: str) -> str:
        """A file's text; none of one that is gone or is no text."""
        if path not in self._texts:
            try:
                self._texts[path] = (self.root / path).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                self._texts[path] = ""
        return self._texts[path]

    def closure_size(self, path: str) -> int:
        """How many files this one reaches through imports, itself included."""
        seen, waiting = {path}, [path]
        while waiting:
            new = self.imports[waiting.pop()] - seen
            seen |= new
            waiting += new
        return len(seen)

    def _imports(self, path: str) -> set[str]:
        """Files that this one imports; of a test, its folders' conftest.py too, but COMMON."""
        reader = ImportReader(self.packages)
        # Strings in __init__ are tables of what is imported on first use.
        reader.read(parsed(self.text(path)), strings=not path.endswith("__init__.py"))
        found = {self._resolve(path, reference) for reference in reader.references}
        found |= {self._script(path, script) for script in reader.scripts}
        if path in self.tests:
            above = {f"{folder}/conftest.py" for folder in PurePosixPath(path).parents}
            found |= (above & self.files) - {COMMON}
        return {target for target in found if target is not None} - {path}

    def _script(self, path: str, script: str) -> str | None:
        """The Python file outside src that a string names: beside ``path``, or the only such."""
        beside = f"{PurePosixPath(path).parent}/{script}"
        ends = [p for p in self._loose if p.endswith("/" + script.lstrip("./"))]
        return beside if beside in self.files else ends[0] if len(ends) == 1 else None

    def _module(self, name: str, folders: Iterable[str]) -> str | None:
        """The file of a module, searched for in these folders."""
        for folder in folders:
            base = f"{folder}/{name.replace('.', '/')}"
            for candidate in (f"{base}.py", f"{base}/__init__.py"):
                if candidate in self.files:
                    return candidate
        return None

    def _resolve(self, path: str, reference: Reference) -> str | None:
        """The file that defines what ``path`` refers to; None where it isn't of this checkout."""
        level, module, name = reference
        folder = PurePosixPath(path)
        if level:
            folders = [str(folder.parents[level - 1])]
        elif path.startswith("src/"):
            folders = ["src"]
        else:  # a script has its own folder on its path, and tests have tests/
            folders = [str(folder.parent), "tests/common", "tests", "src", *self._tops]
        inner = self._module(f"{module}.{name}".strip("."), folders)
        found = self._module(module or "__init__", folders)
        if found is None:  # a namespace package, or in a string an attribute of an attribute
            outer, _, last = module.rpartition(".")
            return inner or (self._resolve(path, (level, outer, last)) if outer else None)
        if not found.endswith("__init__.py"):
            return found
        if found not in self._exports:
            self._exports[found] = exports_of(parsed(self.text(found)))
        source = self._exports[found].get(name, reference)
        is_own_module = inner is not None and source[:2] == (level, module)
        if source != reference and not is_own_module:
            return self._resolve(found, source) or found
        return inner or found


# (3) How near every file is to a change.


@dataclass(frozen=True)
class Reach:
    """How near a file is to a change, and what makes it so."""

    distance: int
    reason: str


def nearer(one: Reach, other: Reach) -> Reach:
    """The nearer of two; the first of equals."""
    return min(one, other, key=lambda reach: reach.distance)


def naming(graph: ImportGraph, name: str, among: Iterable[str]) -> list[str]:
    """Files whose text has this name as a word of its own."""
    word = re.compile(rf"(?<![\w.-]){re.escape(name)}(?![\w-])")
    return sorted(path for path in among if word.search(graph.text(path)))


def users_of_file(graph: ImportGraph, changed: str) -> dict[str, Reach]:
    """Python files that name a file, or that name a template or header which includes it.

    A file of src that nobody names is used by the modules of the nearest folder that has some.
    """
    in_src = changed.startswith("src/")
    # What a module says of a document is meant for readers: the module doesn't open it.
    readers = {path for path in graph.files if in_src or not path.startswith("src/")}
    includers = {p for p in graph.paths if p.startswith("src/") and p not in graph.files}
    found: dict[str, Reach] = {}
    names = [changed]
    for included in names:  # what includes it is added to the end
        name = PurePosixPath(included).name
        # "run" is a word of any text: a name like that must stand there with its folder.
        word = included if name.isidentifier() and name.islower() else name
        for path in naming(graph, word, readers - set(found)):
            found[path] = Reach(1, f"names {included}")
        names += naming(graph, name, includers - set(names)) if in_src else []
    for folder in PurePosixPath(changed).parents if in_src and not found else ():
        if beside := [path for path in sorted(readers) if PurePosixPath(path).parent == folder]:
            return {path: Reach(1, f"stands beside {changed}") for path in beside}
    return found


def first_reached(graph: ImportGraph, changed: Iterable[str]) -> dict[str, Reach]:
    """Python files that a change reaches without an import: itself, and those that name it."""
    found: dict[str, Reach] = {}
    for path in changed:
        new: dict[str, Reach] = {}
        if not path.endswith(".py") or not path.startswith(("src/", "tests/")):
            new |= users_of_file(graph, path)
        if path.endswith("__init__.py"):
            inner = [p for p in graph.files if p.startswith(path.removesuffix("__init__.py"))]
            new |= {p: Reach(1, f"is in the package of {path}") for p in inner}
        if path in graph.files:
            new[path] = Reach(0, "changed itself")
        found |= {p: nearer(reach, found.get(p, reach)) for p, reach in new.items()}
    return found


def all_reached(graph: ImportGraph, changed: Iterable[str]) -> dict[str, Reach]:
    """Every Python file that a change reaches: Dijkstra's algorithm, where each import is 1."""
    reached: dict[str, Reach] = {}
    waiting = [(r.distance, path, r.reason) for path, r in first_reached(graph, changed).items()]
    heapq.heapify(waiting)
    while waiting:
        distance, path, reason = heapq.heappop(waiting)
        if path not in reached:
            reached[path] = Reach(distance, reason)
            for importer in graph.importers[path]:
                heapq.heappush(waiting, (distance + 1, importer, f"imports {path}"))
    return reached


def kindred(graph: ImportGraph, changed: str, reached: Collection[str]) -> dict[str, Reach]:
    """Test files that belong to a changed file by their name, or by the folder they look at."""
    place = PurePosixPath(changed)
    top = place.parts[0]
    found: dict[str, Reach] = {}
    if changed == COMMON or (top == "tests" and changed in graph.imports.get(COMMON, ())):
        found |= dict.fromkeys(graph.tests, Reach(1, f"uses {changed}"))
    if len(place.parts) > 1 and top != "tests":
        # A test that walks through a folder names the folder and none of its files.
        walk = re.compile(rf"[\"']{re.escape(top)}[\"'/].*glob\(", re.DOTALL)
        walking = [test for test in graph.tests if walk.search(graph.text(test))]
        found |= {test: Reach(2, f"walks through {top}/") for test in walking}
        inside = [test for test in graph.tests if test.startswith(f"tests/{top}/")]
        found |= {test: Reach(1, f"is in tests/{top}/") for test in inside}
    if place.suffix == ".py":
        name = place.parent.name if place.name == "__init__.py" else place.stem
        same = [test for test in reached if PurePosixPath(test).stem == f"test_{name}"]
        found |= {test: Reach(0, f"is the test of {changed}") for test in same}
    return found


def reached_tests(
    graph: ImportGraph, changed: Iterable[str], reached: Mapping[str, Reach]
) -> dict[str, Reach]:
    """Test file -> how near it is to the change."""
    tests = {path: reached[path] for path in graph.tests if path in reached}
    for path in changed:
        for test, reach in kindred(graph, path, tests).items():
            tests[test] = nearer(tests.get(test, reach), reach)
    return tests


# (4) The files that fill the budget.


@dataclass(frozen=True)
class Plan:
    """What pytest's processes are told: JSON in the file that PLAN_VARIABLE names."""

    files: dict[str, int]  # test file -> distance, nearest first; all of them are collected
    modules: dict[str, int]  # module of src -> distance, of those that the change reaches
    packages: list[str]  # of src
    seconds: dict[str, float]  # of every test in its last run
    budget: float  # expected seconds of the tests to pick, all processes together
    deadline: float  # the time.time() at which the last test should end

    def share(self, path: str) -> float:
        """The seconds that one file may use before every other has had its turn."""
        return self.budget if self.files[path] == 0 else self.budget * FILE_SHARE

    def expected(self, item: pytest.Item) -> float:
        """Seconds that a test is expected to take."""
        return self.seconds.get(item.nodeid, UNKNOWN_SECONDS)


def file_of(name: str) -> str:
    """The file of a test."""
    return name.partition("::")[0]


def recorded_seconds(root: Path) -> dict[str, float]:
    """Seconds of every test in its last run; none where there was no run."""
    try:
        return dict(json.loads((root / RECORDED).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def seconds_by_file(graph: ImportGraph, recorded: Mapping[str, float]) -> dict[str, list[float]]:
    """Test file -> seconds of its tests; its functions are counted where nothing is recorded."""
    found: dict[str, list[float]] = {path: [] for path in graph.tests}
    for name, value in recorded.items():
        if file_of(name) in found:
            found[file_of(name)].append(value)
    functions = re.compile(r"^\s*(?:async )?def test_", re.MULTILINE)
    for path in graph.tests:
        count = len(functions.findall(graph.text(path)))
        found[path] = found[path] or [UNKNOWN_SECONDS] * count
    return found


def module_name(path: str) -> str:
    """The dotted name of a file of src."""
    return ".".join(PurePosixPath(path).with_suffix("").parts[1:]).removesuffix(".__init__")


def nearest_first(
    graph: ImportGraph, tests: Mapping[str, Reach], seconds: Mapping[str, Sequence[float]]
) -> list[str]:
    """Test files in the order in which they are worth running.

    At the same distance a file that reaches half as many others goes first: it is more about the
    change than one that reaches everything. Then the quickest goes first.
    """

    def nearness(path: str) -> tuple[int, int, float, str]:
        distance = tests[path].distance
        breadth = graph.closure_size(path).bit_length() if distance else 0
        return distance, breadth, sum(seconds[path]), path

    return sorted(tests, key=nearness)


def make_plan(
    graph: ImportGraph,
    reached: Mapping[str, Reach],
    tests: Mapping[str, Reach],
    recorded: Mapping[str, float],
    budget: float,
    deadline: float,
) -> Plan:
    """The nearest test files whose tests fill the budget."""
    seconds = seconds_by_file(graph, recorded)
    sources = [path for path in reached if path.startswith("src/")]
    modules = {module_name(path): reached[path].distance for path in sources}
    files = {path: tests[path].distance for path in nearest_first(graph, tests, seconds)}
    plan = Plan(files, modules, graph.packages, dict(recorded), budget, deadline)
    filling: dict[str, int] = {}
    left = budget
    for path, distance in files.items():
        if left > 0:
            filling[path] = distance
            left -= COLLECTING_SECONDS + min(sum(seconds[path]), plan.share(path))
    return replace(plan, files=filling)


# (5) The plugin, in each of pytest's processes.


@functools.cache
def current_plan() -> Plan:
    """The plan of this run."""
    return Plan(**json.loads(Path(os.environ[PLAN_VARIABLE]).read_text(encoding="utf-8")))


def subjects(item: pytest.Item, packages: Collection[str]) -> dict[int, str]:
    """Parameters of a test that are classes or objects of src: id -> module of the class."""
    call = getattr(item, "callspec", None)
    values = call.params.values() if call else ()
    kinds = {id(value): value if isinstance(value, type) else type(value) for value in values}
    modules = {key: kind.__module__ for key, kind in kinds.items()}
    return {key: module for key, module in modules.items() if module.split(".")[0] in packages}


def ranked(items: Sequence[pytest.Item], plan: Plan, distance: int) -> list[pytest.Item]:
    """Tests of one file, the most telling first.

    A test with a class of src as a parameter is as near as the module of that class. It is left out
    if the file reaches the change only through such classes, and not through this one. Every class
    is run with the first of the other parameters before any is run with the next.
    """
    about = {item: subjects(item, plan.packages) for item in items}
    near = {
        item: min(plan.modules.get(module, FAR) for module in modules.values())
        for item, modules in about.items()
        if modules
    }
    nearest = min(near.values(), default=FAR)
    turns: Counter[tuple[Any, ...]] = Counter()
    ranks: dict[pytest.Item, tuple[int, int, float]] = {}
    for item in items:
        if nearest < distance and near.get(item) == FAR:
            continue
        subject = (getattr(item, "originalname", item.name), *sorted(about[item]))
        turn = turns[subject] if about[item] else 0
        turns[subject] += 1
        ranks[item] = (near.get(item, nearest), turn, plan.expected(item))
    return sorted(ranks, key=lambda item: ranks[item])


def picked(items: Sequence[pytest.Item], plan: Plan) -> list[pytest.Item]:
    """The tests that fit the budget, in the order of the plan's files."""
    by_file: dict[str, list[pytest.Item]] = {path: [] for path in plan.files}
    for item in items:
        by_file[file_of(item.nodeid)].append(item)
    queues = {path: ranked(by_file[path], plan, plan.files[path]) for path in plan.files}
    chosen: set[pytest.Item] = set()
    left = plan.budget
    for is_first_turn in (True, False):
        for path, queue in queues.items():
            allowed = plan.share(path) if is_first_turn else left
            for item in queue:
                cost = plan.expected(item)
                if item not in chosen and cost <= min(allowed, left):
                    chosen.add(item)
                    allowed -= cost
                    left -= cost
    return [item for path in plan.files for item in by_file[path] if item in chosen]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests that the budget has room for."""
    may_run = [item for item in items if not any(map(item.get_closest_marker, NEVER))]
    kept = picked(may_run, current_plan())
    config.hook.pytest_deselected(items=list(set(items) - set(kept)))
    items[:] = kept


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """Pass over a test that would end too late; True tells pytest that it is done with."""
    plan = current_plan()
    return True if time.time() + plan.expected(item) > plan.deadline else None


@dataclass(eq=False)  # a plugin must be hashable
class Tally:
    """A plugin of the process that was started: which tests were picked and which ran."""

    picked: set[str] = field(default_factory=set)
    ran: set[str] = field(default_factory=set)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.picked = {item.nodeid for item in session.items}
        files = len({file_of(name) for name in self.picked})
        line = f"{len(self.picked)} tests are picked (files: {files})."
        session.config.get_terminal_writer().line(line)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.ran.add(report.nodeid)


# The command.


def announce(
    changed: Sequence[str], base: str, plan: Plan, tests: Mapping[str, Reach], total: int
) -> None:
    """Say what changed and which test files are collected because of that."""
    more = f" and {len(changed) - SHOWN} more" if len(changed) > SHOWN else ""
    print(f"Changed since {base}: {', '.join(changed[:SHOWN])}{more}.")
    print(f"{len(tests)} of {total} test files reach that; {len(plan.files)} have room, first:")
    for path, distance in list(plan.files.items())[:SHOWN]:
        print(f"  {distance}  {path} {tests[path].reason}")
    sys.stdout.flush()


def run_pytest(plan: Plan, processes: int, options: Sequence[str], tally: Tally) -> int:
    """Run the plan; pytest's exit code."""
    parallel = ["--processes", str(processes)] if processes > 1 else []
    sys.path.insert(0, str(Path(__file__).resolve().parent))  # where -p finds this module
    with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as file:
        json.dump(asdict(plan), file)
        file.flush()
        os.environ[PLAN_VARIABLE] = file.name
        words = ["-p", Path(__file__).stem, *parallel, *options, *plan.files]
        return int(pytest.main(words, plugins=[tally]))


def conclude(
    tally: Tally, limit: float, tests: Collection[str], seconds: Mapping[str, Sequence[float]]
) -> None:
    """Say which tests did not run, and how to run them."""
    late = tally.picked - tally.ran
    if late:
        files = len({file_of(name) for name in late})
        print(f"{len(late)} picked tests (files: {files}) had no time left before {limit:g} s.")
    ran = Counter(file_of(name) for name in tally.ran)
    rest = {path: count for path in tests if (count := len(seconds[path]) - ran[path]) > 0}
    if rest:
        print(
            f"About {sum(rest.values())} tests that reach the change did not run "
            f"(files: {len(rest)}); `make test` runs them."
        )


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--since", help="a commit; else HEAD, or HEAD~1 in a clean tree")
    parser.add_argument("--seconds", type=float, default=100.0, help="of tests (100)")
    parser.add_argument("--limit", type=float, default=115.0, help="seconds for everything (115)")
    parser.add_argument("--processes", type=int, default=PROCESSES, help=f"({PROCESSES})")
    parser.add_argument("options", nargs="*", help="of pytest, after --")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """pytest's exit code; 0 where no test reaches the change, 2 where the change is unknown."""
    began = time.time()
    given = arguments(words)
    try:
        root = checkout(Path.cwd())
        changed, base = changed_files(root, given.since)
    except ChangeError as error:
        print(f"quick: {error}", file=sys.stderr)
        return 2
    os.chdir(root)
    graph = ImportGraph(root, changed)
    reached = all_reached(graph, changed)
    tests = reached_tests(graph, changed, reached)
    recorded = recorded_seconds(root)
    budget, deadline = given.seconds * given.processes, began + given.limit
    plan = make_plan(graph, reached, tests, recorded, budget, deadline)
    if tests:
        announce(changed, base, plan, tests, len(graph.tests))
    tally = Tally()
    code = run_pytest(plan, given.processes, given.options, tally) if tests else 5
    if code == pytest.ExitCode.NO_TESTS_COLLECTED:
        print(f"No test reaches what changed since {base}: {', '.join(changed) or 'nothing'}.")
        return 0
    conclude(tally, given.limit, tests, seconds_by_file(graph, recorded))
    return code


if __name__ == "__main__":
    sys.exit(main())
