"""What a step's exchange between ranks took on this rank, where the layout can tell.

A layout that can is ``Measures`` by its shape; with any other the step says that it isn't known.
What ranks tell each other beside it (counts, the loss) isn't in here: the clock's marks have it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from hasten.core.clock import BACKWARD


@dataclass(frozen=True)
class Traffic:
    """Of one step's gradients, or of the weights that travel in their place.

    Args:
        exposed: seconds in which this rank had nothing to do but wait for it; None: not known.
        hidden: seconds in which it was under way beside the computation; None: not known.
        sent_bytes: what this rank has handed over for others; None: not known.
        during: the part of the step in which the exposed seconds were spent.
    """

    exposed: float | None
    hidden: float | None = None
    sent_bytes: int | None = None
    during: str = BACKWARD


@runtime_checkable
class Measures(Protocol):
    """A layout, or a wire, that knows what its exchange took."""

    def traffic(self) -> Traffic | None:
        """Of the step that has just moved the weights, or given up; asked once a step."""


def traffic_of(holder: object) -> Traffic | None:
    """What it knows of the step."""
    return holder.traffic() if isinstance(holder, Measures) else None
