"""Packing over a full data set: which examples fill rows of a fixed number of tokens.

The method is best fit decreasing, on the histogram of lengths instead of on the
examples. A million examples have at most ``row_tokens`` different lengths. Rows of the
same content are one class with a count. Longest first, each example goes into the
fullest row that still has room for it.

(1) lengths -> how many examples of each length
(2) counts -> classes of rows: (number of rows, the lengths in each)
(3) classes -> rows of example indices; the caller draws among examples of one length

The histogram form is from Krell et al., Efficient Sequence Packing without
Cross-contamination (arXiv:2107.02027). Best fit decreasing over whole examples is from
Ding et al., Fewer Truncations Improve Language Modeling (arXiv:2404.10830).

If best fit stays above the lower bound, two other methods of
:mod:`hasten.parts.data.row_search` are tried, and the fewest rows are used:

- rows filled exactly, one at a time
- patterns, if lengths have few different values
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hasten.parts.data.row_search import (
    MOST_VALUES,
    Classes,
    Pattern,
    exact_fit,
    whole_patterns,
)

LengthCounts = Sequence[int] | NDArray[Any]

GOOD_ENOUGH = 1.001  # rows / lower bound up to which the best fit of many examples is used
MANY = 50_000  # number of examples above which that ratio holds, and one more attempt is made
FIT_ATTEMPTS, FEW = 60, 1_000  # most attempts, for up to so many examples; fewer for more examples
PATTERN_WORK = MOST_VALUES**2 * 4096  # most (different lengths)^2 x row_tokens for patterns
CLOSE = 0.005  # difference in fullness up to which packing and grouping count as equal


@dataclass(frozen=True)
class Efficiency:
    """Number and fullness of rows, and a lower bound of their number."""

    rows: int
    row_tokens: int
    tokens: int
    lower_bound: int

    @property
    def fullness(self) -> float:
        """Returns tokens / positions of all rows."""
        return self.tokens / (self.rows * self.row_tokens) if self.rows else 1.0


@dataclass(frozen=True)
class Rows:
    """A packing of lengths: the lengths in each row, before examples are chosen for them.

    ``positions`` (examples,) are the lengths, row after row. ``starts`` (rows + 1,) are the
    indices in it at which rows begin.
    """

    positions: NDArray[np.int64]
    starts: NDArray[np.int64]
    efficiency: Efficiency

    def fill(
        self, lengths: LengthCounts, order: NDArray[np.int64] | None = None
    ) -> list[list[int]]:
        """Returns example indices of each row; examples of equal length are taken in ``order``."""
        sizes = np.asarray(lengths, np.int64)
        order = np.arange(len(sizes)) if order is None else order
        chosen = np.empty(len(sizes), np.int64)
        chosen[_sorted_by(self.positions)] = order[_sorted_by(sizes[order])]
        flat, ends = chosen.tolist(), self.starts.tolist()
        return [flat[a:b] for a, b in itertools.pairwise(ends)]


def pack_lengths(lengths: LengthCounts, row_tokens: int) -> list[list[int]]:
    """Returns rows of example indices: every example once, at most ``row_tokens`` tokens in a row.

    Raises:
        ValueError: an example is longer than a row, or has no token.
    """
    return plan_rows(lengths, row_tokens).fill(lengths)


def plan_rows(lengths: LengthCounts, row_tokens: int) -> Rows:
    """Returns the packing without the choice of examples; see :func:`pack_lengths`."""
    sizes = np.asarray(lengths, np.int64)
    if sizes.ndim != 1 or (len(sizes) and sizes.min() < 1):
        raise ValueError("lengths must be one row of whole numbers, each at least 1")
    if row_tokens < 1:
        raise ValueError(f"row_tokens is {row_tokens}; a row has at least one token")
    if len(sizes) and sizes.max() > row_tokens:
        where = int(sizes.argmax())
        raise ValueError(
            f"example {where} has {sizes[where]} tokens, more than a row of {row_tokens}; raise "
            "row_tokens or cut the example"
        )
    counts = np.bincount(sizes, minlength=1)
    bound, classes = _fewest(counts, row_tokens, len(sizes))
    rows = [np.tile(np.array(pattern, np.int64), times) for times, pattern in classes]
    widths = [np.full(times, len(pattern), np.int64) for times, pattern in classes]
    empty = np.zeros(0, np.int64)
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate([empty, *widths]))])
    figures = Efficiency(_rows(classes), row_tokens, int(sizes.sum()), bound)
    return Rows(np.concatenate([empty, *rows]), starts, figures)


def _fewest(counts: NDArray[np.int64], row_tokens: int, examples: int) -> tuple[int, Classes]:
    """Returns a lower bound and the best attempt; more methods are tried for fewer examples."""
    bound = lower_bound(counts, row_tokens)
    classes = _best_fit(counts, row_tokens)
    slack = GOOD_ENOUGH if examples > MANY else 1
    values = np.count_nonzero(counts)
    if _rows(classes) > bound * slack and values**2 * row_tokens <= PATTERN_WORK:
        by_patterns, full_classes = whole_patterns(counts, row_tokens)
        remaining = counts.copy()
        for times, pattern in full_classes:
            np.subtract.at(remaining, list(pattern), times)
        bound = max(bound, by_patterns)
        last = min(_best_fit(remaining, row_tokens), exact_fit(remaining, row_tokens), key=_rows)
        classes = min(classes, full_classes + last, key=_rows)
    attempts = min(FIT_ATTEMPTS, max(2, FIT_ATTEMPTS * FEW // max(examples, 1)))
    for attempt in range(attempts if examples <= MANY else 1):
        if _rows(classes) <= bound * slack:
            break
        tried = exact_fit(counts, row_tokens, attempt // 2, fewest=attempt % 2 == 1)
        classes = min(classes, tried, key=_rows)
    return bound, classes


def lower_bound(counts: NDArray[Any], row_tokens: int) -> int:
    """Returns the minimum number of rows of any packing, from ``counts[length]``.

    Three bounds are used:

    - All tokens need a position.
    - No row has more examples than the number of shortest examples that fit into a row.
    - Two examples of more than half a row can't share a row. So examples between ``cut`` and
      half a row only fit next to the shorter of these (Martello and Toth's L2, for 32 values
      of ``cut``).
    """
    sizes = np.arange(len(counts))
    tokens, number = np.cumsum(counts * sizes), np.cumsum(counts)

    def upto(length: int, table: NDArray[Any]) -> int:
        return int(table[min(max(length, 0), len(table) - 1)])

    best = -(-int(tokens[-1]) // row_tokens)
    if best:
        short = int(np.searchsorted(tokens, row_tokens, side="right"))  # these overflow the row
        room = row_tokens - upto(short - 1, tokens)
        most = upto(short - 1, number) + (room // short if short < len(counts) else 0)
        best = max(best, -(-int(number[-1]) // most))
    half = row_tokens // 2
    for cut in np.linspace(0, half, 32, dtype=int).tolist():
        large = upto(row_tokens, number) - upto(row_tokens - cut, number)
        medium = upto(row_tokens - cut, number) - upto(half, number)
        middle = upto(row_tokens - cut, tokens) - (upto(cut - 1, tokens) if cut else 0)
        more = max(0, -(-(middle - medium * row_tokens) // row_tokens))
        best = max(best, large + medium + more)
    return best


def _best_fit(counts: NDArray[np.int64], row_tokens: int) -> Classes:
    """Packs by best fit decreasing.

    After a row gets an example, it is still the fullest one with room for another of the same
    length. So ``room // length`` examples of one length go into a row at once.
    """
    open_rows: dict[int, list[tuple[int, Pattern]]] = {}  # by free positions
    rooms: list[int] = []  # keys of open_rows, ascending
    closed: Classes = []

    def put(times: int, pattern: Pattern, room: int) -> None:
        if not room:
            closed.append((times, pattern))
        elif room in open_rows:
            open_rows[room].append((times, pattern))
        else:
            bisect.insort(rooms, room)
            open_rows[room] = [(times, pattern)]

    for length in np.flatnonzero(counts)[::-1].tolist():
        remaining = int(counts[length])
        while remaining:
            index = bisect.bisect_left(rooms, length)
            pattern: Pattern = ()
            if index == len(rooms):
                room, times = row_tokens, remaining
            else:
                room = rooms[index]
                times, pattern = open_rows[room].pop()
                if not open_rows[room]:
                    del open_rows[room], rooms[index]
            each = min(room // length, remaining)
            used = min(times, remaining // each)
            if used < times and pattern:
                put(times - used, pattern, room)
            put(used, pattern + (length,) * each, room - each * length)
            remaining -= used * each
    return closed + [c for room in rooms for c in open_rows[room]]


@dataclass(frozen=True)
class PackingMethod:
    """Recommended handling of padding for a distribution of lengths, with its figures."""

    method: Literal["pack", "group", "both"]
    packed: float  # fullness of packed rows
    grouped: float  # fullness of micro-batches padded to their longest, examples sorted by length
    reason: str


def choose_method(lengths: LengthCounts, row_tokens: int, together: int = 16) -> PackingMethod:
    """Chooses packed rows of fixed length, or groups of ``together`` similar lengths.

    Lengths that don't add up to a row leave packed rows partly empty. Grouped by length, the
    same examples need little padding. ``both``: the two methods fill rows about equally.
    """
    packed = plan_rows(lengths, row_tokens).efficiency.fullness
    sizes = np.sort(np.asarray(lengths, np.int64))
    starts = np.arange(0, len(sizes), together)
    ends = np.append(starts[1:], len(sizes))[: len(starts)]
    positions = int((sizes[ends - 1] * (ends - starts)).sum())
    grouped = int(sizes.sum()) / positions if positions else 1.0
    figures = f"packed rows of {row_tokens} are {packed:.1%} full, grouped examples {grouped:.1%}"
    if abs(packed - grouped) <= CLOSE:
        return PackingMethod("both", packed, grouped, f"{figures}: either will do")
    if packed > grouped:
        return PackingMethod("pack", packed, grouped, figures)
    return PackingMethod("group", packed, grouped, f"{figures}: the lengths don't add up to a row")


def _rows(classes: Classes) -> int:
    return sum(times for times, _ in classes)


def _sorted_by(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns a stable argsort; 16-bit keys are sorted by radix, several times as fast."""
    small = values.max(initial=0) < 2**16
    return np.argsort(values.astype(np.uint16) if small else values, kind="stable")
