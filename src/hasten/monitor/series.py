"""Numbers of millions of steps in bounded memory: buckets with mean, lowest, highest.

  1. Each line is added to the last bucket, until that has as many lines as a bucket
     holds.
  2. When there are twice as many buckets as wanted, each two become one that holds
     twice as many.

So one pass costs a constant time per line on average. Outliers aren't lost: a spike of
one step stays the highest of its bucket. A chart of any width has enough points.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hasten.formatting import number

MOST = 1024  # buckets that a wide screen can show; twice as many are joined
DIGITS = 6


class Bucket:
    """Some consecutive lines: first and last x, and a summary of each column."""

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
    """Columns over one axis. ``generation`` changes when buckets are joined or cleared."""

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
        """Returns a column's means, without the buckets that have no number."""
        index = self.columns.index(name)
        cells = (bucket.cells[index] for bucket in self._buckets)
        return [cell[1] / cell[0] for cell in cells if cell]

    def since(self, generation: int, start: int) -> dict[str, Any]:
        """Returns what a reader lacks that has the first ``start`` buckets of a generation.

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
    """Returns the number with few digits, because a page may have 2,000 points."""
    if value == 0 or not math.isfinite(value):
        return 0 if value == 0 else math.copysign(1.7e308, value)
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded
