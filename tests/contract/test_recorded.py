"""Records of experiments that an earlier version made give the numbers that it took from them.

make_recorded.py made them with the version of 2026-11-24, on a machine that others used, too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from contract.make_recorded import EXPERIMENTS, numbers
from hasten.core.plan import Plan
from hasten.measure.ablation import Design
from hasten.measure.rounds import variants_of

RECORDED = sorted(Path(__file__).with_name("recorded").glob("*.json"))


def test_there_is_a_record_of_each_experiment() -> None:
    assert len(RECORDED) == len(EXPERIMENTS) == 20


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_a_record_gives_the_numbers_that_it_gave(path: Path) -> None:
    kept: dict[str, Any] = json.loads(path.read_text())
    plans = dict.fromkeys(kept["plans"], Plan())
    design = Design(**kept["design"])
    variants = variants_of(kept["events"], plans, kept["kinds"], design)
    # Quantiles of Student's t differ in the last digits between processors and libraries.
    expect_equal(numbers(variants), kept["expected"])
    assert any(row["ratio"] for row in kept["expected"]["variants"])


def expect_equal(found: Any, expected: Any, where: str = "") -> None:
    """Asserts equal values, with floats equal to 12 digits."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key in expected:
            expect_equal(found[key], expected[key], f"{where}/{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for position, pair in enumerate(zip(found, expected, strict=True)):
            expect_equal(*pair, f"{where}/{position}")
    else:
        is_float = isinstance(expected, float)
        assert found == (
            pytest.approx(expected, rel=1e-12, nan_ok=True) if is_float else expected
        ), where
