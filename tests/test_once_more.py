"""A test that failed by bad luck gets one more run and is named; what is broken stays failed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LUCKY = """
from pathlib import Path
def test_lucky():
    seen = Path("seen")
    again = seen.exists()
    seen.touch()
    assert again
def test_fine():
    with Path("fine").open("a") as file:
        file.write("x")
"""


def outcome(folder: Path, tests: str) -> tuple[int, str]:
    """Exit code and output of the tests, and where they fail of one more run."""
    (folder / "test_some.py").write_text(tests)
    # Options of the run that this test is a part of are no options of that one.
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q"]
    first = subprocess.run(command, cwd=folder, capture_output=True, env=clean)
    if first.returncode == 0:
        return 0, ""
    command = [sys.executable, str(ROOT / "scripts/once_more.py")]
    again = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=clean)
    return again.returncode, again.stdout


def test_what_passes_alone_is_named_and_the_rest_is_not_run_again(tmp_path: Path) -> None:
    code, said = outcome(tmp_path, LUCKY)
    assert code == 0
    assert "UNSTEADY, failed once and then passed: test_some.py::test_lucky\n" in said
    assert (tmp_path / "fine").read_text() == "x"


def test_what_is_broken_fails(tmp_path: Path) -> None:
    assert outcome(tmp_path, "def test_wrong(): assert False")[0] == 1


def test_four_failures_are_no_bad_luck(tmp_path: Path) -> None:
    broken = LUCKY + "".join(f"\ndef test_{i}(): assert False" for i in range(3))
    code, said = outcome(tmp_path, broken)
    assert code == 1
    assert "4 failed" in said


def test_a_run_that_collected_nothing_fails(tmp_path: Path) -> None:
    code, said = outcome(tmp_path, "")
    assert code == 1
    assert "no record" in said
