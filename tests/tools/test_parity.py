"""The net of a rewrite: equal states compare equal, and each change is named."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from script_modules import load

parity = load("parity")
SCRIPT = Path(__file__).parents[2] / "scripts" / "parity.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_state_compares_equal_to_itself_and_a_changed_value_is_named(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    assert run("record", str(record), "--part", "predictions").returncode == 0
    equal = run("compare", str(record), "--part", "predictions")
    assert (equal.returncode, equal.stdout.splitlines()[-1][:14]) == (0, "0 differences ")
    found = json.loads(record.read_text())
    name = next(iter(found["values"]))
    found["values"][name][0] += 1e-9
    record.write_text(json.dumps(found))
    changed = run("compare", str(record), "--part", "predictions")
    assert changed.returncode == 1
    assert name in changed.stdout
    assert "1 differences" in changed.stdout


def test_an_order_may_gain_layouts_and_may_not_lose_or_swap_any() -> None:
    before = {"plans/x/order": ["a", "b"]}
    assert not parity.differences(before, {"plans/x/order": ["a", "new", "b"]})
    assert parity.differences(before, {"plans/x/order": ["b", "a"]})
    assert parity.differences(before, {"plans/x/order": ["a"]})
    assert parity.differences(before, {})


def test_there_are_configurations_and_layouts_to_compare() -> None:
    assert len(parity.import_cases()) >= 120
    layouts = parity.runnable_layouts(8)
    assert len(layouts) >= 60
    assert all(parity.is_runnable(layout) for layout in layouts)
