"""``.ci/run`` runs every part whatever failed before it, and its end says what failed and why."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="a shell script")
ROOT = Path(__file__).parents[1]
MAKE = """#!/bin/sh
echo "make $1 data=$HASTEN_TEST_DATA articles=$HASTEN_TEST_ARTICLES home=$HOME" >> "$PLACE/calls"
[ "$1" = test ] && echo "failed: tests/test_a.py::test_b: assert 1 == 2"
case " $BROKEN " in *" $1 "*) exit 2 ;; esac
exit 0
"""
PYTHON = """#!/bin/sh
echo "$*" >> "$PLACE/calls"
case " $BROKEN " in *" once_more "*) exit 1 ;; esac
exit 0
"""


def ci(folder: Path, broken: str) -> tuple[int, list[str], str]:
    """Exit code, output, and the commands that were run, with ``make`` and Python replaced."""
    project = folder / "project"
    (project / ".ci").mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "run", project / ".ci" / "run")
    for name in ("data", "articles"):
        (folder / "shared" / name).mkdir(parents=True)
    for path, text in ((folder / "bin/make", MAKE), (project / ".venv/bin/python", PYTHON)):
        path.parent.mkdir(parents=True)
        path.write_text(text)
        path.chmod(0o755)
    places = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "PLACE": str(folder)}
    done = subprocess.run(
        ["bash", str(project / ".ci" / "run")],
        env={**os.environ, **places, "BROKEN": broken},
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout.splitlines(), (folder / "calls").read_text()


def test_all_parts_run_and_their_seconds_are_printed(tmp_path: Path) -> None:
    code, said, calls = ci(tmp_path, "")
    assert code == 0
    assert [line.split()[2] for line in said[-5:]] == [
        *("install", "lint", "docs", "real-records", "suite")
    ]
    shared = tmp_path / "shared"
    known = f"data={shared / 'data'} articles={shared / 'articles'}"
    assert f"make test-data {known} home={os.environ['HOME']}" in calls
    suite = next(line for line in calls.splitlines() if line.startswith("make test "))
    assert "data= articles= " in suite, "a newcomer has no such folders"
    assert not suite.endswith(f"home={os.environ['HOME']}"), "nor any cache"


def test_a_part_that_fails_hides_no_other_and_is_named_last(tmp_path: Path) -> None:
    code, said, calls = ci(tmp_path, "lint test once_more")
    assert code == 1
    assert all(f"make {part} " in calls for part in ("docs", "test-data", "test"))
    last = said[-40:]
    assert "failed: tests/test_a.py::test_b: assert 1 == 2" in last
    failed = [line for line in last if "FAILED" in line]
    assert [line.split()[2] for line in failed] == ["lint", "suite"]


def test_what_passes_once_more_is_no_failure(tmp_path: Path) -> None:
    code, _, calls = ci(tmp_path, "test")
    assert code == 0
    assert "scripts/once_more.py" in calls


def test_without_an_installation_nothing_runs(tmp_path: Path) -> None:
    code, _, calls = ci(tmp_path, "install")
    assert code == 1
    assert "make test" not in calls
