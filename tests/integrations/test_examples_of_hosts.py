"""The examples of other people's loops run as they stand, and their models learn."""

from __future__ import annotations

import importlib.util
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = ("trainer_with_techniques.py", "lightning_with_techniques.py", "loop_with_techniques.py")
NEEDS = {"lightning_with_techniques.py": "lightning"}


@pytest.mark.parametrize("name", NAMES)
def test_an_example_learns(name: str) -> None:
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"needs {NEEDS[name]}")
    losses = runpy.run_path(str(EXAMPLES / name))["main"]()
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("name", NAMES)
def test_an_example_says_how_it_is_started(name: str) -> None:
    assert f"python examples/{name}" in (EXAMPLES / name).read_text(encoding="utf-8")
