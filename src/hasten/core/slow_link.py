"""Says, with its MB/s, that steps wait for the link between ranks; once, and again if it got worse.

Of a step that waits mostly for the exchange, the rate at which this rank's gradients left says
whether the link is to blame: a rank that is waited for makes it small too, so the sentence names
both. Where the layout can't tell what the exchange took (``core/traffic.py``), nothing is said.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Protocol

LOOK = 10  # steps that are looked at together
SHARE, LEAST = 0.5, 0.1  # of a step, and seconds of it, spent waiting: less isn't worth a word
SLOW = 125e6  # bytes per second: 1 Gbit/s


class Exchanged(Protocol):
    """What is read of a step's metrics."""

    @property
    def step_seconds(self) -> float: ...

    @property
    def exposed_communication_seconds(self) -> float | None: ...

    @property
    def hidden_communication_seconds(self) -> float | None: ...

    @property
    def wire_bytes(self) -> int | None: ...


class SlowLink:
    """Looks at the steps of a run on one rank.

    Args:
        tell: is given the sentence.
        rank: that looks.
    """

    def __init__(self, tell: Callable[[str], None], rank: int = 0) -> None:
        self._tell, self._rank = tell, rank
        self._seen: list[tuple[float, float, float, int]] = []
        self._said = math.inf  # bytes per second when it was last told

    def note(self, metrics: Exchanged) -> None:
        """A step is done."""
        exposed, sent = metrics.exposed_communication_seconds, metrics.wire_bytes
        if not exposed or not sent:
            return
        under_way = exposed + (metrics.hidden_communication_seconds or 0.0)
        self._seen.append((metrics.step_seconds, exposed, under_way, sent))
        if len(self._seen) == LOOK:
            self._look()
            self._seen.clear()

    def _look(self) -> None:
        step, exposed, under_way, sent = (
            statistics.median(column) for column in zip(*self._seen, strict=True)
        )
        rate = sent / under_way
        if exposed < LEAST or exposed < SHARE * step or rate > min(SLOW, self._said / 2):
            return
        self._said = rate
        self._tell(
            f"the exchange between ranks is slow: a step waits {exposed:.2f} s of {step:.2f} s for "
            f"it, and rank {self._rank} sends its {sent / 1e6:,.2f} MB at {rate / 1e6:,.2f} MB/s, "
            "because of its link or of a rank that is behind; see what may send less (docs/wire.md)"
        )
