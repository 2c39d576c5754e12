"""The README's picture shows the figures of the demo's table."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

SCRIPT = Path(__file__).parents[2] / "scripts" / "gains_picture.py"


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gains_picture", SCRIPT)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_picture_is_that_of_the_table() -> None:
    gains_picture = script()
    page = gains_picture.PAGE.read_text(encoding="utf-8")
    assert gains_picture.PICTURE.read_text(encoding="utf-8") == gains_picture.drawing_of(page)


def test_a_bar_begins_where_the_one_above_ends() -> None:
    rows = ["| + a | 2.00× [1.5, 2.5] | helped | 2.00× [1.50, 2.50] | 1 |"]
    rows += ["| + b | 0.95× [0.9, 1.1] | undecided | 1.90× [1.40, 2.40] | 1 |"]
    bars = script().bars_of("\n".join(["<!-- demo table -->", *rows, "<!-- /demo table -->"]))
    assert [bar.start for bar in bars] == [None, 1.0, 2.0]
    assert [bar.tone for bar in bars] == ["base", "gain", "other"]
    assert (bars[2].value, bars[2].low, bars[2].high) == (1.9, 1.4, 2.4)
