"""A change selects the tests that import it, nearest first, and of those what the time allows."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from script_modules import load

SCRIPT = Path(__file__).parents[2] / "scripts" / "quick.py"
FILES = {
    "src/hasten/__init__.py": "_HOMES = {'Late': 'hasten.late'}",
    "src/hasten/late.py": "class Late: pass",
    "src/hasten/core/__init__.py": "",
    "src/hasten/core/engine.py": "class Engine: power = 1",
    "src/hasten/core/wheel.py": "class Wheel: turns = 1",
    "src/hasten/car.py": "def car():\n    from hasten.core.engine import Engine\n    return Engine",
    "src/hasten/road.py": "import hasten.car",
    "src/hasten/show.py": "TEMPLATE = 'page.html'",
    "tests/test_engine.py": "def test_it():\n    from hasten.road import NAME",
    "tests/test_direct.py": "from hasten.core import engine\ndef test_it(): pass",
    "tests/test_one_off.py": "from hasten.car import car\ndef test_it(): car()",
    "tests/test_two_off.py": "import hasten.road\ndef test_it(): pass\ndef test_two(): pass",
    "tests/test_lazy.py": "import hasten\ndef test_it(): assert hasten.Late",
    "tests/common/jobs.py": "from hasten.core.wheel import Wheel\ndef train(): pass",
    "tests/test_ranks.py": "def test_it(): assert 'jobs:train'",
    "tests/test_command.py": "def test_it(): assert ['python', '-m', 'hasten.late']",
    "tests/test_patch.py": "def test_it(): assert 'hasten.core.wheel.Wheel.turns'",
    "tests/test_page.py": "from hasten.show import TEMPLATE\ndef test_it(): pass",
    "tests/test_guide.py": "def test_it(): assert 'guide.md'",
    "tests/docs/test_pages.py": "def test_it(): pass",
    "tests/conftest.py": "import shared",
    "tests/common/shared.py": "from hasten.core import wheel",
}


quick = load("quick_script", SCRIPT)


def selected(*changed: str) -> dict[str, int]:
    """Test file -> distance, in the order in which they run."""
    tests = quick.distances({**dict.fromkeys(changed, ""), **FILES}, changed)
    order = quick.nearest_files(FILES, tests, 1e9)
    return {path.removeprefix("tests/"): tests[path] for path in order}


def test_importers_come_in_the_order_of_their_distance_and_the_quickest_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where no seconds are recorded
    found = selected("src/hasten/core/engine.py")
    assert list(found.items()) == [
        ("test_engine.py", 0),  # by its name
        ("test_direct.py", 1),
        ("test_one_off.py", 2),  # through an import inside a function
        ("test_two_off.py", 3),
    ]
    assert selected("src/hasten/late.py")["test_lazy.py"] == 2
    both = {"tests/test_two_off.py": 1, "tests/test_direct.py": 1}
    assert quick.nearest_files(FILES, both, 0.1) == ["tests/test_direct.py"]


def test_strings_name_jobs_commands_and_what_is_patched() -> None:
    found = selected("src/hasten/core/wheel.py")
    assert (found["test_ranks.py"], found["test_patch.py"]) == (2, 1)
    assert selected("tests/common/jobs.py")["test_ranks.py"] == 1
    assert selected("src/hasten/late.py")["test_command.py"] == 1


def test_what_all_tests_share_selects_all_and_its_imports_select_none() -> None:
    every = {path.removeprefix("tests/") for path in FILES if "/test_" in path}
    assert set(selected("tests/conftest.py")) == every
    assert set(selected("tests/common/shared.py")) == every
    assert set(selected("src/hasten/core/wheel.py")) == {"test_ranks.py", "test_patch.py"}


def test_what_is_no_python_selects_what_names_it_and_the_tests_of_its_folder() -> None:
    assert selected("docs/guide.md") == {"docs/test_pages.py": 1, "test_guide.py": 1}
    assert selected("src/hasten/page.html") == {"test_page.py": 2}
    assert selected("README.md") == {}


def test_a_deleted_module_selects_what_still_imports_it() -> None:
    files = {"src/hasten/gone.py": "", "tests/test_old.py": "import hasten.gone"}
    assert quick.distances({**FILES, **files}, ["src/hasten/gone.py"]) == {"tests/test_old.py": 1}


def start(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--processes", "1", *words]
    # Options of the run that this test is a part of are no options of that one.
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    clean |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=clean)


@pytest.mark.cold
def test_a_folder_outside_of_git_is_one_sentence(tmp_path: Path) -> None:
    done = start(tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("quick: ")
    assert len(done.stderr.splitlines()) == 1


def put(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))


def commit(root: Path) -> None:
    quick.git(root, "add", "--all")
    who = ("-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false")
    quick.git(root, *who, "commit", "--quiet", "--message", "x")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project of which one module has changed and is broken."""
    quick.git(tmp_path, "init", "--quiet")
    put(
        tmp_path,
        {
            ".gitignore": "__pycache__/\n.pytest_cache/",
            "pyproject.toml": """
                [tool.pytest.ini_options]
                markers = ["long", "slow", "timing"]
                pythonpath = ["src"]
                """,
            "src/hasten/__init__.py": "",
            "src/hasten/wide.py": "fine = True",
            "tests/test_it.py": """
                import pytest
                from hasten import wide

                def test_it(): assert wide.fine

                @pytest.mark.long
                def test_long(): raise SystemExit
                """,
            "tests/test_other.py": "def test_it(): raise SystemExit",
        },
    )
    commit(tmp_path)
    put(tmp_path, {"src/hasten/wide.py": "fine = False"})
    return tmp_path


@pytest.mark.cold
def test_only_tests_of_the_change_run_and_their_failure_is_the_exit_code(project: Path) -> None:
    done = start(project)
    assert done.returncode == 1
    assert "Changed since HEAD: src/hasten/wide.py." in done.stdout
    assert "1  tests/test_it.py" in done.stdout
    assert "1 failed, 1 deselected" in done.stdout


@pytest.mark.cold
def test_what_has_no_time_left_is_counted_and_no_failure(project: Path) -> None:
    done = start(project, "--limit", "0.001")
    assert done.returncode == 0
    assert "1 tests and 0 test files had no time left" in done.stdout


@pytest.mark.cold
def test_a_clean_tree_means_the_last_commit_and_nothing_to_run_is_fine(project: Path) -> None:
    put(project, {"src/hasten/wide.py": "fine = True", "notes.txt": ""})
    commit(project)
    done = start(project)
    assert done.returncode == 0
    assert done.stdout == "No test reaches what changed since HEAD~1: notes.txt.\n"
    assert start(project, "--since", "never").returncode == 2
