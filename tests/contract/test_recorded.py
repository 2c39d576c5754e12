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
    assert numbers(variants) == kept["expected"]
    assert any(row["ratio"] for row in kept["expected"]["variants"])
