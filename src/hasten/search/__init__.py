"""The search for a good plan: what a layout on a cluster costs, predicted before renting.

``hasten.search.plan`` is imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hasten.search.planning import plan

__all__ = ["plan"]


def __getattr__(name: str) -> Any:
    if name == "plan":
        from hasten.search.planning import plan

        return plan
    raise AttributeError(f"module 'hasten.search' has no attribute {name!r}")
