"""All tests run whatever fails, and the end names each failure."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.cold,  # these processes need nothing of what is loaded
    pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="sets the cores"),
]
ROOT = Path(__file__).parents[2]
INI = """[pytest]
addopts = -q -m "not long"
markers =
    timing:
    long:
    slow:
    data:
"""
TWO = """
import pytest
def test_first():
    assert 1 == 2
@pytest.mark.timing
def test_second():
    assert 3 == 4
@pytest.mark.long
def test_full_count():
    assert 5 == 6
"""


def on_one_core() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def outcome(folder: Path, tests: str) -> tuple[int, str]:
    """Exit code and output of ``run_tests``."""
    (folder / "pytest.ini").write_text(INI)
    (folder / "test_some.py").write_text(tests)
    # Options of the run that this test is a part of are no options of that one.
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    clean["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts/run_tests.py")],
        cwd=folder,
        capture_output=True,
        text=True,
        env=clean,
        preexec_fn=on_one_core,  # there tests run in one process: each more takes a second
    )
    return done.returncode, done.stdout


def test_what_fails_is_named_at_the_end(tmp_path: Path) -> None:
    code, said = outcome(tmp_path, TWO)
    assert code == 1
    assert said.count("2 failed") == 1
    last = said.splitlines()[-3:]
    assert last[0].startswith("failed: test_some.py::test_first")
    assert last[1].startswith("failed: test_some.py::test_second")
    assert "test_full_count" not in said
