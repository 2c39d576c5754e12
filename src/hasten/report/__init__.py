"""Reports: the gain of each technique on the user's own job, as JSON, table and page.

`compare` measures two training loops of anybody's against each other. It is imported on first use:
most users of this package need none of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hasten.measure.loops import compare

__all__ = ["compare"]


def __getattr__(name: str) -> Any:
    if name != "compare":
        raise AttributeError(f"module 'hasten.report' has no attribute {name!r}")
    from hasten.measure.loops import compare

    return compare
