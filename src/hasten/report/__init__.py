"""From examples to verdicts: what each switch gains on the user's own job, as JSON, table and page.

`ablate` measures a recipe's techniques, `greedy_recipe` one after the other; `compare` measures two
training loops of anybody's against each other. All are imported on first use: a trial's process
needs none of it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hasten.measure.ablation import Design
    from hasten.measure.loops import Comparison, compare
    from hasten.report.speedup import GreedySearch

_HOMES = {
    "GreedySearch": "hasten.report.speedup",
    "Comparison": "hasten.measure.loops",
    "Design": "hasten.measure.ablation",
    "ablate": "hasten.report.speedup",
    "compare": "hasten.measure.loops",
    "greedy_recipe": "hasten.report.speedup",
}
__all__ = ["Comparison", "Design", "GreedySearch", "ablate", "compare", "greedy_recipe"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'hasten.report' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
