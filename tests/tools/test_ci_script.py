"""``.ci/run`` runs every part whatever failed before it, and its end says what failed and why."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="a shell script")
ROOT = Path(__file__).parents[2]
MAKE = """#!/bin/sh
echo "make $1 data=$HASTEN_TEST_DATA articles=$HASTEN_TEST_ARTICLES home=$HOME in=$PWD" \\
  >> "$PLACE/calls"
[ "$1" = install ] && mkdir -p .venv/bin && cp "$PLACE/bin/python" .venv/bin/python
[ "$1" = test ] && echo "failed: tests/test_a.py::test_b: assert 1 == 2"
case " $BROKEN " in *" $1 "*) exit 2 ;; esac
exit 0
"""
PYTHON = """#!/bin/sh
echo "$*" >> "$PLACE/calls"
"""
COMMIT = (*("-c", "user.name=A", "-c", "user.email=a@b.c"), "commit", "--quiet", "--message", "A")


def project_in(folder: Path, is_clone: bool) -> Path:
    """A folder with nothing but the script, which ``make`` and Python of ``bin`` serve."""
    project = folder / "checkout"
    (project / ".ci").mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "run", project / ".ci" / "run")
    for name in ("data", "articles"):
        (folder / "shared" / name).mkdir(parents=True)
    for name, text in (("make", MAKE), ("python", PYTHON)):
        path = folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    for words in (["init", "--quiet"], ["add", "."], COMMIT) if is_clone else ():
        subprocess.run(["git", *words], cwd=project, check=True)
    return project


def ci(folder: Path, broken: str, is_clone: bool = True) -> tuple[int, list[str], str]:
    """Exit code, output, and the commands that were run, with ``make`` and Python replaced."""
    return run_in(project_in(folder, is_clone), broken)


def run_in(project: Path, broken: str = "", **variables: str) -> tuple[int, list[str], str]:
    """The same in a project that exists."""
    folder = project.parent
    places = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "PLACE": str(folder)}
    done = subprocess.run(
        ["bash", str(project / ".ci" / "run")],
        env={**os.environ, **places, "BROKEN": broken, **variables},
        capture_output=True,
        text=True,
        cwd="/",
    )
    return done.returncode, done.stdout.splitlines(), (folder / "calls").read_text()


def places(calls: str) -> set[Path]:
    """The folders in which ``make`` was called."""
    return {Path(line.partition(" in=")[2]) for line in calls.splitlines() if " in=" in line}


def test_all_parts_run_in_one_fresh_clone_named_hasten_below_a_folder_with_a_space(
    tmp_path: Path,
) -> None:
    code, said, calls = ci(tmp_path, "")
    assert code == 0
    assert [line.split()[2] for line in said[-6:]] == [
        *("install", "lint", "docs", "real-examples", "compiled", "suite")
    ]
    assert not any("not in the clone" in line for line in said)
    (place,) = places(calls)
    assert place.name == "hasten"
    assert " " in place.parent.name
    assert not place.exists(), "nothing is left behind"
    assert calls.count("make install ") == 1
    shared = tmp_path / "shared"
    known = f"data={shared / 'data'} articles={shared / 'articles'}"
    assert f"make test-data {known} home={os.environ['HOME']}" in calls
    suite = next(line for line in calls.splitlines() if line.startswith("make test "))
    assert "data= articles= " in suite, "a newcomer has no such folders"
    assert f"home={os.environ['HOME']}" not in suite, "nor any cache"


def test_what_is_not_committed_is_named(tmp_path: Path) -> None:
    project = project_in(tmp_path, is_clone=True)
    (project / "new file.py").touch()
    _, said, _ = run_in(project)
    at = said.index("not committed, so not in the clone that is tested:")
    assert said[at + 1] == '?? "new file.py"'


def test_a_tree_that_is_no_clone_is_tested_where_it_is_and_that_is_said(tmp_path: Path) -> None:
    code, said, calls = ci(tmp_path, "", is_clone=False)
    assert code == 0
    assert places(calls) == {tmp_path / "checkout"}
    assert said[0].startswith(f"{tmp_path / 'checkout'} is not a git clone: ")


def test_a_folder_of_another_clone_is_no_clone(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    _, said, calls = ci(tmp_path, "", is_clone=False)
    assert places(calls) == {tmp_path / "checkout"}
    assert "is not a git clone" in said[0]


def test_a_clone_without_a_commit_is_an_error(tmp_path: Path) -> None:
    project = project_in(tmp_path, is_clone=False)
    subprocess.run(["git", "init", "--quiet"], cwd=project, check=True)
    (tmp_path / "calls").touch()
    code, _, calls = run_in(project)
    assert code == 1
    assert not calls


def test_a_hook_of_git_names_another_repository_in_vain(tmp_path: Path) -> None:
    other = tmp_path / "other"
    subprocess.run(["git", "init", "--quiet", str(other)], check=True)
    code, _, calls = run_in(project_in(tmp_path, True), GIT_DIR=str(other / ".git"))
    assert code == 0
    assert {place.name for place in places(calls)} == {"hasten"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
def test_root_tests_a_clone_of_another_user(tmp_path: Path) -> None:
    project = project_in(tmp_path, is_clone=True)
    for path in (project, *project.rglob("*")):
        os.chown(path, 12345, 12345)
    code, _, calls = run_in(project)
    assert code == 0
    assert {place.name for place in places(calls)} == {"hasten"}


def test_a_part_that_fails_hides_no_other_and_is_named_last(tmp_path: Path) -> None:
    code, said, calls = ci(tmp_path, "lint test")
    assert code == 1
    assert all(f"make {part} " in calls for part in ("docs", "test-data", "test"))
    last = said[-40:]
    assert "failed: tests/test_a.py::test_b: assert 1 == 2" in last
    failed = [line for line in last if "FAILED" in line]
    assert [line.split()[2] for line in failed] == ["lint", "suite"]


def test_without_an_installation_nothing_runs(tmp_path: Path) -> None:
    code, _, calls = ci(tmp_path, "install")
    assert code == 1
    assert "make test" not in calls
