"""The cost model of a cluster: layouts, seconds, memory and money, predicted before renting.

``plan`` is imported on first use, and so are ``learn`` and ``tune`` of `hasten.tune`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hasten.planner.planning import plan

# `learn` and `tune` start from a recipe and are in higher layers than this package.
_HOMES = {
    "learn": "hasten.tune.learning_study",
    "plan": "hasten.planner.planning",
    "tune": "hasten.tune.api",
}
__all__ = ["learn", "plan", "tune"]  # found by __getattr__


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'hasten.planner' has no attribute {name!r}")
