"""accelerate's example scripts as tests: each runs in this process, on its checkout's small data.

`peer_tests.py` gives this file to pytest with the root of the checkout as working folder.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

MOCKED = "TESTING_MOCKED_DATALOADERS"  # a script that reads it has small data for tests
SCRIPTS = sorted(
    path for path in Path("examples").rglob("*.py") if MOCKED in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_example_runs_to_its_end(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MOCKED, "1")
    monkeypatch.setattr(sys, "argv", [str(script), "--cpu"])
    monkeypatch.syspath_prepend(str(script.parent))
    runpy.run_path(str(script), run_name="__main__")
