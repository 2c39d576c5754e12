"""Foreign load: which share of the machine's processor time others took while an arm had its turn.

Linux counts processor time in ticks of 10 ms, so a share over a short span is coarse: spans below
`SHORTEST_SECONDS` count as calm. Small negative differences, from ticks that fall on the other side
of an instant, count as zero.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from hasten.machine import processes

SHORTEST_SECONDS = 0.2  # 20 ticks


@dataclass(frozen=True)
class Instant:
    """The clocks at one moment, in seconds."""

    wall: float
    busy: float  # of all usable cores
    ours: float  # of this process and all that it started


def look() -> Instant:
    """The clocks now."""
    return Instant(time.monotonic(), processes.busy_seconds(), processes.tree_seconds())


def foreign_share(before: Instant, after: Instant, cores: int) -> float:
    """What others used between two instants, as a share (0 to 1) of what the cores could give."""
    span = after.wall - before.wall
    if span < SHORTEST_SECONDS:
        return 0.0
    foreign = (after.busy - before.busy) - (after.ours - before.ours)
    return min(max(foreign / (span * cores), 0.0), 1.0)
