"""Run the tests that a change can break, nearest first, within two minutes.

    make quick                  # what differs from HEAD; in a clean tree, the last commit
    make quick SINCE=main~3     # what differs from main~3

(1) git names the changed files  ->  (2) the imports of every Python file make a graph
->  (3) a test's distance is the number of imports between it and a change  ->  (4) the nearest
test files whose tests fill the time are collected  ->  (5) pytest starts no test after the limit.

Nearly every test reaches nearly every core module, so the nearest tests stand for the rest; only
``make test`` runs them all. The graph is read from the sources at every start.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import pytest

RECORDED = Path(".pytest_cache/v/hasten/seconds")  # written by tests/common/suite_report.py
UNKNOWN_SECONDS = 0.3  # expected of a test without a record: the suite's mean
COLLECTING_SECONDS = 0.1  # expected of importing one test file
COMMON = "tests/conftest.py"  # part of every test
LEFT_OUT = "not long and not slow and not timing"
PROCESSES = min(2, os.cpu_count() or 1)
SHOWN = 8


class ChangeError(Exception):
    """git can't say what changed; the message says why."""


# (1) What changed.


def git(folder: Path, *words: str) -> str:
    """What git prints; ChangeError where it fails."""
    done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True)
    if done.returncode:
        raise ChangeError(done.stderr.strip() or f"git {words[0]} failed")
    return done.stdout


def changed_files(root: Path, since: str | None) -> tuple[list[str], str]:
    """Paths that differ from a commit, untracked ones too, and the commit's name.

    Without ``since`` the commit is HEAD, or HEAD~1 where nothing differs from HEAD.
    """
    for base in [since] if since else ["HEAD", "HEAD~1"]:
        # A renamed file counts under both names: an importer may still use the old one.
        differ = git(root, "diff", "--name-only", "--no-renames", "-z", f"{base}^{{commit}}", "--")
        new = git(root, "ls-files", "--others", "--exclude-standard", "-z")
        if paths := sorted({*differ.split("\0"), *new.split("\0")} - {""}):
            return paths, base
    return [], base


# (2) Which file imports which.


def module_name(path: str, paths: Collection[str]) -> str:
    """The name by which others import a file: from the first folder above it that is a package."""
    parts = Path(path).with_suffix("").parts
    first = len(parts) - 1
    while "/".join((*parts[:first], "__init__.py")) in paths:
        first -= 1
    return ".".join(parts[first:]).removesuffix(".__init__")


def named_modules(text: str) -> Iterator[str]:
    """Names of modules, and of what is in them: in imports, and in strings of jobs and patches."""
    try:
        tree = ast.parse(text)
    except SyntaxError:  # importing it will say so
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from re.findall(r"\bhasten(?:\.\w+)+", node.value)  # of a command, or patched
            yield from re.findall(r"^(\w+):\w+$", node.value)  # a function that ranks run
            yield from (Path(name).stem for name in re.findall(r"[\w/]+\.py\b", node.value))


def importers(texts: dict[str, str]) -> dict[str, set[str]]:
    """Python file -> those that import it."""
    homes = {module_name(path, texts): path for path in texts}
    found: dict[str, set[str]] = defaultdict(set)
    for path, text in texts.items():
        for name in named_modules(text):
            while name and name not in homes:
                name = name.rpartition(".")[0]
            if name:
                found[homes[name]].add(path)
    return found


# (3) How far tests are from the change.


def first_reached(texts: dict[str, str], changed: Iterable[str]) -> dict[str, int]:
    """Python files that a change reaches without an import, with their distances.

    0: the file itself and a test with its name. 1: tests of its folder's name, and what names a
    file that is no Python.
    """
    found: dict[str, int] = {}
    for path in changed:
        folder, name, is_python = path.split("/")[0], Path(path).name, path.endswith(".py")
        for other, text in texts.items():
            if other == path or (is_python and other.endswith(f"/test_{name}")):
                found[other] = 0
            elif other.startswith(f"tests/{folder}/") or (not is_python and name in text):
                found.setdefault(other, 1)
    return found


def distances(texts: dict[str, str], changed: Collection[str]) -> dict[str, int]:
    """Test file -> the number of imports between it and the change."""
    using = importers(texts)
    reached: dict[str, int] = {}
    waiting = sorted((distance, path) for path, distance in first_reached(texts, changed).items())
    for distance, path in waiting:  # which grows, in the order of distances
        if path not in reached:
            reached[path] = distance
            waiting += [(distance + 1, user) for user in using[path]]
    tests = [path for path in texts if re.match(r"tests/(.*/)?test_[^/]*$", path)]
    shared = [COMMON, *(p for p in texts if p.startswith("tests/") and COMMON in using[p])]
    if any(path in changed for path in shared):
        return {path: reached.get(path, 1) for path in tests}
    return {path: reached[path] for path in tests if path in reached}


# (4) The files that fill the time.


def nearest_files(texts: dict[str, str], tests: dict[str, int], seconds: float) -> list[str]:
    """The nearest test files that fill the time; of those as near the quickest come first."""
    recorded: dict[str, float] = {}
    for name, taken in (json.loads(RECORDED.read_text()) if RECORDED.exists() else {}).items():
        path = name.partition("::")[0]
        recorded[path] = recorded.get(path, 0.0) + taken
    expected = {
        path: recorded.get(path, UNKNOWN_SECONDS * texts[path].count("def test_")) for path in tests
    }
    files = []
    for path in sorted(tests, key=lambda path: (tests[path], expected[path])):
        if seconds > 0:
            files.append(path)
            seconds -= COLLECTING_SECONDS + expected[path]
    return files


# (5) pytest.


class TimeLimit:
    """A plugin: tests in the order of their files, none of them after the limit."""

    def __init__(self, files: Collection[str], deadline: float) -> None:
        self.order = {path: number for number, path in enumerate(files)}
        self.deadline = deadline
        self.collected: set[str] = set()
        self.ran: set[str] = set()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: self.order[item.nodeid.partition("::")[0]])

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.collected = {item.nodeid for item in session.items}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self) -> bool | None:
        return True if time.monotonic() > self.deadline else None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.ran.add(report.nodeid)


def main() -> int:
    """pytest's exit code; 0 where no test reaches the change, 2 where the change is unknown."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--since", help="a commit; else HEAD, or HEAD~1 in a clean tree")
    parser.add_argument("--limit", type=float, default=110.0, help="seconds for everything (110)")
    parser.add_argument("--processes", type=int, default=PROCESSES, help=f"({PROCESSES})")
    parser.add_argument("options", nargs="*", help="of pytest, after --")
    options, deadline = parser.parse_args(), time.monotonic()
    deadline += options.limit
    try:
        os.chdir(git(Path.cwd(), "rev-parse", "--show-toplevel").rstrip("\n"))
        changed, base = changed_files(Path.cwd(), options.since)
        listed = git(Path.cwd(), "ls-files", "-co", "--exclude-standard", "-z", "*.py").split("\0")
    except ChangeError as error:
        print(f"quick: {error}", file=sys.stderr)
        return 2
    # A deleted file is still one that its importers name.
    texts = {path: "" for path in changed if path.endswith(".py")}
    texts |= {path: Path(path).read_text("utf-8") for path in listed if Path(path).is_file()}
    tests = {path: d for path, d in distances(texts, changed).items() if Path(path).is_file()}
    if not tests:
        print(f"No test reaches what changed since {base}: {', '.join(changed) or 'nothing'}.")
        return 0
    files = nearest_files(texts, tests, options.limit * options.processes)
    more = f" and {len(changed) - SHOWN} more" if len(changed) > SHOWN else ""
    print(f"Changed since {base}: {', '.join(changed[:SHOWN])}{more}.")
    print(f"{len(tests)} test files reach that; {len(files)} have room, first:")
    for path in files[:SHOWN]:
        print(f"  {tests[path]}  {path}")
    sys.stdout.flush()
    limit = TimeLimit(files, deadline)
    parallel = ["--processes", str(options.processes)] if options.processes > 1 else []
    code = pytest.main(["-m", LEFT_OUT, *parallel, *options.options, *files], plugins=[limit])
    late, others = len(limit.collected - limit.ran), len(tests) - len(files)
    print(f"{late} tests and {others} test files had no time left; `make test` runs them.")
    return 0 if code == pytest.ExitCode.NO_TESTS_COLLECTED else int(code)


if __name__ == "__main__":
    sys.exit(main())
