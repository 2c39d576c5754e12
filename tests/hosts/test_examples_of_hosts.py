"""The examples of other people's loops run as they stand, and their models learn."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("name", ["trainer_with_techniques.py", "loop_with_techniques.py"])
def test_an_example_learns(name: str) -> None:
    losses = runpy.run_path(str(EXAMPLES / name))["main"]()
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("name", ["trainer_with_techniques.py", "loop_with_techniques.py"])
def test_an_example_says_how_it_is_started(name: str) -> None:
    assert f"python examples/{name}" in (EXAMPLES / name).read_text(encoding="utf-8")
