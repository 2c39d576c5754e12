"""A change selects the tests that import it, nearest first, and of those what the time allows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from script_modules import load

SCRIPT = Path(__file__).parents[2] / "scripts" / "quick.py"
FILES = {
    "src/pkg/__init__.py": """
        from typing import TYPE_CHECKING
        if TYPE_CHECKING:
            from pkg.core.engine import Engine
        _HOMES = {"Late": "pkg.late"}
        """,
    "src/pkg/late.py": "class Late: pass",
    "src/pkg/core/__init__.py": "from pkg.core.engine import Engine\nfrom .wheel import Wheel",
    "src/pkg/core/engine.py": "class Engine: power = 1",
    "src/pkg/core/wheel.py": "class Wheel: turns = 1",
    "src/pkg/car.py": "def car():\n    from pkg.core import Engine\n    return Engine",
    "src/pkg/road.py": "import pkg.car\nNAME = 'guide.md tells more'",
    "src/pkg/show.py": "TEMPLATE = 'page.html'",
    "src/pkg/page.html": "{% include 'head.html' %}",
    "src/pkg/head.html": "",
    "tests/test_engine.py": "def test_it():\n    from pkg.road import NAME",
    "tests/test_direct.py": "from pkg.core import Engine\ndef test_it(): assert Engine.power == 1",
    "tests/test_wide.py": "from pkg.core import Engine, Wheel\nimport pkg.late, pkg.show, jobs\n",
    "tests/test_one_off.py": "from pkg.car import car\ndef test_it(): car()",
    "tests/test_two_off.py": "from pkg.road import NAME\ndef test_it(): pass",
    "tests/test_wheel_only.py": "from pkg.core import Wheel\ndef test_it(): pass",
    "tests/test_late.py": "import pkg\ndef test_it(): assert pkg.Late",
    "tests/test_types.py": """
        from typing import TYPE_CHECKING
        if TYPE_CHECKING:
            from pkg.core.engine import Engine
        def test_it(): pass
        """,
    "tests/jobs.py": "from pkg.core.wheel import Wheel\ndef train(): pass",
    "tests/test_ranks.py": "def test_it(): assert 'jobs:train'",
    "tests/test_command.py": "def test_it(): assert ['python', '-m', 'pkg.late']",
    "tests/test_patch.py": "def test_it(): assert 'pkg.core.wheel.Wheel.turns'",
    "tests/test_page.py": "from pkg.show import TEMPLATE\ndef test_it(): pass",
    "tests/test_guide.py": "def test_it(): assert 'guide.md'",
    "tests/docs/test_pages.py": "def test_it(): pass",
    "docs/guide.md": "",
    "tests/conftest.py": "import shared",
    "tests/shared.py": "from pkg.core import Engine",
    "README.md": "",
}


quick = load("quick_script", SCRIPT)


def put(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))


def commit(root: Path) -> None:
    quick.git(root, "add", "--all")
    who = ("-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false")
    quick.git(root, *who, "commit", "--quiet", "--message", "x")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("project")
    quick.git(root, "init", "--quiet")
    put(root, FILES)
    commit(root)
    return root


def selected(project: Path, *changed: str) -> dict[str, int]:
    """Test file -> distance, in the order in which they run."""
    graph = quick.ImportGraph(project, changed)
    tests = quick.reached_tests(graph, changed, quick.all_reached(graph, changed))
    order = quick.nearest_first(graph, tests, quick.seconds_by_file(graph, {}))
    return {path.removeprefix("tests/"): tests[path].distance for path in order}


def test_importers_come_in_the_order_of_their_distance(project: Path) -> None:
    assert selected(project, "src/pkg/core/engine.py") == {
        "test_engine.py": 0,  # by its name
        "test_direct.py": 1,
        "test_wide.py": 1,
        "test_one_off.py": 2,  # through an import inside a function
        "test_two_off.py": 3,
    }
    assert list(selected(project, "src/pkg/core/engine.py"))[:3] == [
        *("test_engine.py", "test_direct.py", "test_wide.py")
    ]


def test_a_name_is_imported_from_the_module_that_defines_it(project: Path) -> None:
    assert "test_wheel_only.py" not in selected(project, "src/pkg/core/engine.py")
    assert selected(project, "src/pkg/core/wheel.py")["test_wheel_only.py"] == 1
    assert selected(project, "src/pkg/late.py")["test_late.py"] == 0
    assert selected(project, "src/pkg/core/__init__.py")["test_direct.py"] == 2


def test_strings_name_jobs_commands_and_what_is_patched(project: Path) -> None:
    found = selected(project, "src/pkg/core/wheel.py")
    assert (found["test_ranks.py"], found["test_patch.py"]) == (2, 1)
    assert selected(project, "tests/jobs.py")["test_ranks.py"] == 1
    assert selected(project, "src/pkg/late.py")["test_command.py"] == 1


def test_imports_for_type_checkers_do_not_count(project: Path) -> None:
    assert "test_types.py" not in selected(project, "src/pkg/core/engine.py")


def test_what_all_tests_share_selects_all_and_its_imports_select_none(project: Path) -> None:
    every = {path.removeprefix("tests/") for path in FILES if "/test_" in path}
    assert set(selected(project, "tests/conftest.py")) == every
    assert set(selected(project, "tests/shared.py")) == every
    assert "test_ranks.py" not in selected(project, "src/pkg/core/engine.py")


def test_a_document_selects_the_tests_that_name_it_and_those_of_its_folder(project: Path) -> None:
    assert selected(project, "docs/guide.md") == {"docs/test_pages.py": 1, "test_guide.py": 1}
    assert selected(project, "README.md") == {}


def test_a_template_selects_the_tests_of_the_module_that_names_it(project: Path) -> None:
    assert selected(project, "src/pkg/page.html")["test_page.py"] == 2
    assert selected(project, "src/pkg/head.html")["test_page.py"] == 2


def test_a_deleted_module_selects_what_still_imports_it(project: Path) -> None:
    assert selected(project, "src/pkg/gone.py") == {}
    put(project, {"tests/test_old.py": "import pkg.gone"})
    assert selected(project, "src/pkg/gone.py") == {"test_old.py": 1}
    (project / "tests/test_old.py").unlink()


def start(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--processes", "1", *words]
    # Options of the run that this test is a part of are no options of that one.
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    clean |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=clean)


@pytest.mark.cold
def test_an_unknown_commit_is_one_sentence(project: Path) -> None:
    done = start(project, "--since", "never")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "quick: 'never' names no commit; name one with --since.\n"


@pytest.mark.cold
def test_a_folder_outside_of_git_is_one_sentence(tmp_path: Path) -> None:
    done = start(tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "is in no git checkout" in done.stderr
    assert len(done.stderr.splitlines()) == 1


EXAM = """
import sys
sys.path.insert(0, "src")
import pytest

from script_modules import load
from pkg.fast import Fast
from pkg.wide import Wide

@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kind", [Fast, Wide])
def test_it(kind, size): assert kind.fine

@pytest.mark.long
def test_long(): raise SystemExit
"""


@pytest.fixture
def exam(tmp_path: Path) -> Path:
    """A project whose test has two classes as parameters; one of them has changed and is broken."""
    quick.git(tmp_path, "init", "--quiet")
    put(
        tmp_path,
        {
            ".gitignore": "__pycache__/\n.pytest_cache/",
            "pyproject.toml": '[tool.pytest.ini_options]\nmarkers = ["long"]',
            "src/pkg/__init__.py": "",
            "src/pkg/fast.py": "class Fast: fine = True",
            "src/pkg/wide.py": "class Wide: fine = True",
            "tests/test_exam.py": EXAM,
            "tests/test_other.py": "def test_it(): raise SystemExit",
        },
    )
    commit(tmp_path)
    put(tmp_path, {"src/pkg/wide.py": "class Wide: fine = False"})
    return tmp_path


@pytest.mark.cold
def test_only_cases_of_the_changed_class_run_and_their_failure_is_the_exit_code(exam: Path) -> None:
    done = start(exam)
    assert done.returncode == 1
    assert "Changed since HEAD: src/pkg/wide.py." in done.stdout
    assert "1  tests/test_exam.py imports src/pkg/wide.py" in done.stdout
    assert "2 failed, 3 deselected" in done.stdout


@pytest.mark.cold
def test_what_has_no_time_left_is_counted_and_no_failure(exam: Path) -> None:
    seconds = {f"tests/test_exam.py::test_it[Wide-{size}]": size * 100 for size in (1, 2)}
    put(exam, {".pytest_cache/v/hasten/seconds": json.dumps(seconds)})
    done = start(exam, "--seconds", "200", "--limit", "50")
    assert done.returncode == 0
    assert "picked tests (files: 1) had no time left before 50 s." in done.stdout
    assert "(files: 1); `make test` runs them." in done.stdout


@pytest.mark.cold
def test_a_clean_tree_means_the_last_commit_and_nothing_to_run_is_fine(exam: Path) -> None:
    put(exam, {"src/pkg/wide.py": "class Wide: fine = True", "notes.txt": ""})
    commit(exam)
    done = start(exam)
    assert done.returncode == 0
    assert done.stdout == "No test reaches what changed since HEAD~1: notes.txt.\n"
