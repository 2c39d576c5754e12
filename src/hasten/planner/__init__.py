"""The search for a good plan: predicted before renting (``plan``), measured on a job (``tune``);
and for its hyper-parameters (``learn``).

All are imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hasten.planner.planning import plan

# What starts from a recipe lives above this room, in `hasten.tune`.
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
