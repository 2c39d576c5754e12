"""Numbers of millions of steps in bounded memory: buckets with mean, lowest, highest.

  1. A line is added to the last bucket. If that has ``stride`` lines, a new one begins.
  2. If there are 2 x ``MOST`` buckets, neighbours are joined in pairs, and the stride
     doubles.

So adding a line takes constant time on average. A spike of one step stays visible as the
highest value of its bucket.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from hasten.formatting import number, numbers_of

MOST = 1024  # buckets that a wide screen can show
DIGITS = 6  # significant digits of a number sent to the page


class Bucket:
    """Consecutive lines: the x of the first and the last, and a summary of each column."""

    __slots__ = ("cells", "count", "first", "last")

    def __init__(self, width: int, x: float) -> None:
        self.first = self.last = x
        self.count = 0
        self.cells: list[list[float] | None] = [None] * width  # [count, sum, lowest, highest]

    def add(self, x: float, values: Sequence[float | None]) -> None:
        self.last = x
        self.count += 1
        for index, value in enumerate(values):
            if value is None:
                continue
            cell = self.cells[index]
            if cell is None:
                self.cells[index] = [1, value, value, value]
                continue
            cell[0] += 1
            cell[1] += value
            if value < cell[2]:
                cell[2] = value
            elif value > cell[3]:
                cell[3] = value

    def join(self, other: Bucket) -> None:
        """Adds the next bucket to this one."""
        self.last = other.last
        self.count += other.count
        for index, more in enumerate(other.cells):
            cell = self.cells[index]
            if cell is None:
                self.cells[index] = more
            elif more is not None:
                cell[0] += more[0]
                cell[1] += more[1]
                cell[2], cell[3] = min(cell[2], more[2]), max(cell[3], more[3])


class Series:
    """Columns of numbers by x (the step). Joining or clearing buckets changes ``generation``."""

    def __init__(self, columns: Sequence[str], most: int = MOST) -> None:
        self.columns = tuple(columns)
        self.generation = 0
        self._most = most
        self.clear()

    def clear(self) -> None:
        """Removes everything."""
        self.generation += 1
        self.stride = 1
        self.lines = 0
        self._buckets: list[Bucket] = []

    def __len__(self) -> int:
        return len(self._buckets)

    def add(self, x: float, line: Mapping[str, Any]) -> None:
        """Adds a line; a missing or non-finite number leaves a gap."""
        values = [number(line.get(name)) for name in self.columns]
        self.lines += 1
        if not self._buckets or self._buckets[-1].count >= self.stride:
            if len(self._buckets) >= 2 * self._most:
                for one, other in zip(self._buckets[::2], self._buckets[1::2], strict=True):
                    one.join(other)
                self._buckets = self._buckets[::2]
                self.stride *= 2
                self.generation += 1
            self._buckets.append(Bucket(len(self.columns), x))
        self._buckets[-1].add(x, values)

    def means(self, name: str) -> list[float]:
        """Returns the means of a column's buckets, without buckets that have no number."""
        index = self.columns.index(name)
        cells = (bucket.cells[index] for bucket in self._buckets)
        return [cell[1] / cell[0] for cell in cells if cell]

    def since(self, generation: int, start: int) -> dict[str, Any]:
        """Returns the data for a reader that has the first ``start`` buckets of a generation.

        Returns:
            ``generation``, ``start`` (0: replace everything), ``stride``, ``x`` (the last step
            of each bucket) and ``columns``, from ``start`` on. Each column is a list of means,
            lowest, highest; if a bucket is one line, the means alone. Columns without any
            number are left out.
        """
        if generation != self.generation or start > len(self._buckets):
            start = 0
        rows = self._buckets[start:]
        columns = {}
        for index, name in enumerate(self.columns):
            cells = [bucket.cells[index] for bucket in rows]
            if all(bucket.cells[index] is None for bucket in self._buckets):
                continue
            column = [[_short(c[1] / c[0]) if c else None for c in cells]]
            if self.stride > 1:
                column += [[_short(c[k]) if c else None for c in cells] for k in (2, 3)]
            columns[name] = column
        return {
            "generation": self.generation,
            "start": start,
            "stride": self.stride,
            "x": [_short(bucket.last, 12) for bucket in rows],
            "columns": columns,
        }


def _short(value: float, digits: int = DIGITS) -> float | int:
    """Returns the number with few digits, because a page has up to 2,000 points per curve."""
    if value == 0 or not math.isfinite(value):
        return 0 if value == 0 else math.copysign(1.7e308, value)
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded


# Causes of a slowdown. The rate of the last steps is compared with the median of the run so far.
# Possible causes are in the run's files: waiting for data, other ranks or the disk, and processor
# time that other programs took.

LAST_STEPS = 20  # steps whose median rate is compared
FEWEST_STEPS = 60  # steps of a run before a slowdown is reported
SLOWER = 0.8  # rate / usual rate, below which a run is slower
MORE = 0.1  # rise of a share of the step's time, or share of the processor's, that is a cause
SLOW_RANK = 1.25  # ratio of a rank's time to the others' median, above which the rank is a cause
SHARES = {
    "data_stall_share": "waiting for data takes",
    "exposed_communication_share": "waiting for other ranks takes",
}
LOADS = {
    "foreign_load": "other programs use {:.0%} of the processor",
    "disk_wait_share": "the processor waits for the disk {:.0%} of the time",
}


def slowdown(
    steps: Series,
    recent: Sequence[Mapping[str, Any]],
    machine: Mapping[str, Any],
    slowest: Mapping[str, Any],
) -> str | None:
    """Returns a sentence with the causes in the run's files; None if it isn't slower than usual.

    Args:
        steps: the series of all steps.
        recent: lines of the last steps.
        machine: the newest line about the machine.
        slowest: ``slowest_rank`` and ``slowest_rank_ratio``.
    """
    last = recent[-LAST_STEPS:]
    usual = steps.means("tokens_per_second")
    if steps.lines < FEWEST_STEPS or not usual or not last:
        return None
    rates = numbers_of(last, "tokens_per_second")
    before = statistics.median(usual)
    if not rates or before <= 0:
        return None
    rate = statistics.median(rates) / before
    if rate >= SLOWER:
        return None
    causes = _causes(steps, last, machine, slowest) or ["the run's files show no cause"]
    return f"{1 - rate:.0%} fewer tokens/s than usual: {'; '.join(causes)}"


def _causes(
    steps: Series,
    last: Sequence[Mapping[str, Any]],
    machine: Mapping[str, Any],
    slowest: Mapping[str, Any],
) -> list[str]:
    causes = []
    for name, text in SHARES.items():
        shares = numbers_of(last, name)
        if not shares:
            continue
        now, usual = statistics.fmean(shares), statistics.median(steps.means(name) or [0.0])
        if now - usual > MORE:
            causes.append(f"{text} {now:.0%} of a step, {usual:.0%} before")
    for name, text in LOADS.items():
        load = number(machine.get(name))
        if load is not None and load > MORE:
            causes.append(text.format(load))
    ratio = number(slowest.get("slowest_rank_ratio"))
    if ratio is not None and ratio > SLOW_RANK:
        causes.append(f"rank {slowest['slowest_rank']} takes {ratio:.2f} times as long as others")
    return causes
