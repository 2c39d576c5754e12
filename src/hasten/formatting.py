"""Numbers, times and sizes as text, and text of others made safe to print."""

from __future__ import annotations

import math
from typing import Any


def duration(seconds: float) -> str:
    """``42 s``, ``3 min 05 s``, ``2 h 10 min``."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"
    return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60):02d} min"


def size(count: float) -> str:
    """Bytes as ``1.9 GB`` or ``640 MB``."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def number(value: Any) -> float | None:
    """A finite number, or None; true and false are 1 and 0."""
    if not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:  # JSON may have integers of any length
        return None
    return found if math.isfinite(found) else None


NOT_MEASURED = "not measured"
