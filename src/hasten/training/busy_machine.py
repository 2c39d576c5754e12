"""One line when other processes slow down a step."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable

from hasten.core.timing import StepMetrics
from hasten.machine import host
from hasten.machine.processes import LoadMeter

FEWEST_STEPS, WATCHED_STEPS = 8, 50  # that a step is compared with
SLOWER = 3.0  # times the median seconds of a position
LEAST_SHARE = 0.1  # of the processor's time that others used
SPAN_SECONDS = 1.0  # reading the clocks takes a third of a millisecond: not in each step


class BusyMachine:
    """Prints once if a step is slow and other processes used the processor meanwhile.

    A step is slow if a position takes over three times the median of the steps before it.
    It is for a single process, because other ranks of a run would count as others.

    Args:
        ``tell``: prints the line.
        load: the meter of what other processes take of this machine.
    """

    def __init__(self, tell: Callable[[str], None], load: LoadMeter | None = None) -> None:
        self._tell = tell
        self._load = load or LoadMeter(host.usable_cores())
        self._load_since = time.monotonic()
        self._seconds: deque[float] = deque(maxlen=WATCHED_STEPS)  # of a position
        self._is_over = False

    def note(self, metrics: StepMetrics) -> None:
        """After each step."""
        if self._is_over or not metrics.positions:
            return
        seconds = metrics.step_seconds / metrics.positions
        before = statistics.median(self._seconds) if self._seconds else 0.0
        if len(self._seconds) >= FEWEST_STEPS and seconds > SLOWER * before:
            self._load.lap("steps")
            share = self._load.share("steps")
            if share >= LEAST_SHARE:
                self._is_over = True
                self._tell(
                    f"step {metrics.step} took {seconds / before:.1f} times as long as the median "
                    f"step: other processes used {share:.0%} of the processor meanwhile"
                )
        self._seconds.append(seconds)
        if time.monotonic() - self._load_since >= SPAN_SECONDS:
            self._load.begin()
            self._load_since = time.monotonic()
