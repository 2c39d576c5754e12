"""When to save: often enough to lose little, seldom enough to cost little.

    T = C + sqrt(2 (M + R) C + C^2)

is the time from one save to the next, of which C is spent on saving; M is the mean time between
failures, R the time to be running again (Young, CACM 17, 1974; Daly, FGCS 22, 2006). C is measured,
M is a prior corrected by what was seen, so the interval follows the job and the machine.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

DAY = 86400.0
DYNAMIC = "dynamic"
LARGEST_SHARE = 0.01  # of the wall time that saving may block
LONGEST_BLINK = 10  # steps from one look to the next, or those of a second
FIRST_LOOK = 3  # steps after which the time of a step is known well enough


def best_interval(cost: float, between_failures: float, recovery: float) -> float:
    """Seconds from save to save, all three in seconds."""
    return cost + math.sqrt(2 * (between_failures + recovery) * cost + cost * cost)


@dataclass
class SaveInterval:
    """The time between two saves, from what saving and failing were seen to cost.

    Args:
        between_failures: the prior mean time between failures, weighed like one failure seen.
        longest_loss: seconds of work that may be lost at most; it goes before the cost.
        recovery: seconds from a failure to the next step, until it was seen.
    """

    between_failures: float = DAY
    longest_loss: float = 1800.0
    recovery: float = 30.0
    failures: int = 0
    seen: float = 0.0  # seconds of running before this process
    writing: float = 0.0  # seconds from the copy to the committed checkpoint, the last time
    blocked: deque[float] = field(default_factory=lambda: deque(maxlen=5))
    _began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        if self.between_failures <= 0 or self.longest_loss <= 0:
            raise ValueError("between_failures and longest_loss must be above 0 seconds")

    @property
    def mean_between_failures(self) -> float:
        """The prior and what was seen, in seconds."""
        running = self.seen + time.monotonic() - self._began
        return (self.between_failures + running) / (1 + self.failures)

    def seconds(self) -> float:
        """From one save to the next; never so little that the writer can't follow."""
        cost = statistics.median(self.blocked) if self.blocked else 0.0
        best = best_interval(cost, self.mean_between_failures, self.recovery)
        return max(min(max(best, cost / LARGEST_SHARE), self.longest_loss), 2 * self.writing)

    def restarted(self, recovery: float) -> None:
        """The run goes on after an end: a failure more, and what coming back took."""
        self.failures += 1
        self.recovery = max(recovery, 1.0)

    def state_dict(self) -> dict[str, Any]:
        running = self.seen + time.monotonic() - self._began
        return {"failures": self.failures, "seen": running, "recovery": self.recovery}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with what an earlier process saw.

        Raises:
            ValueError: it isn't such a state.
        """
        try:
            failures, seen = int(state["failures"]), float(state["seen"])
            recovery = float(state["recovery"])
        except (KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"the history of failures can't be read: {error!r}") from error
        if failures < 0 or not (0 <= seen < math.inf and 0 <= recovery < math.inf):
            raise ValueError(f"{state} can't be a history of failures")
        self.failures, self.seen, self.recovery = failures, seen, recovery


class Rhythm:
    """Which steps are saved. All ranks look at the same steps; the first rank decides there.

    Args:
        every: a number of steps, or ``dynamic`` for ``interval``'s seconds.
    """

    def __init__(self, every: int | str, interval: SaveInterval) -> None:
        if not (every == DYNAMIC or (type(every) is int and every >= 1)):
            raise ValueError(
                f"interval is {every!r}; give 'dynamic' or a number of steps from 1 on"
            )
        self.every, self.interval = every, interval
        self._first: tuple[int, float] | None = None  # a step, and when it was done
        self._last_save = time.monotonic()
        self.next_look = 0

    def looks(self, step: int) -> bool:
        """Whether something is decided after ``step``; the same on every rank."""
        if isinstance(self.every, int):
            return step % self.every == 0
        if self._first is None:
            self._first = step, time.monotonic()
            self.next_look = step + FIRST_LOOK
        return step >= self.next_look

    def decide(self, step: int, busy: bool) -> tuple[bool, int]:
        """Whether to save now, and the step to look at next. ``busy``: a save is under way."""
        if isinstance(self.every, int) or self._first is None:
            return True, step + 1
        now = time.monotonic()
        first, then = self._first
        step_seconds = max((now - then) / max(step - first, 1), 1e-6)
        wanted = self.interval.seconds()
        left = wanted - (now - self._last_save)
        due = left <= step_seconds / 2 and not busy
        ahead = wanted if due else max(left, 0.0)
        # A look is a word between ranks. Steps may become slower, so none lies far ahead.
        far = max(LONGEST_BLINK, 1 / step_seconds)
        return due, step + max(1, int(min(ahead / step_seconds / 2, far)))

    def saved(self) -> None:
        """A save has begun."""
        self._last_save = time.monotonic()
