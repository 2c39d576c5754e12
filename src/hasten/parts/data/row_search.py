"""Searches for rows without a gap: single rows, covers by full rows, length patterns.

A row without a gap wastes nothing. So for each row the search looks for examples that
fill it to the last token, from the longest remaining example. This follows the minimum
bin slack of Gupta and Ho, A New Heuristic Algorithm for the One-Dimensional Bin-Packing
Problem, 1999. There are two orders:

- longest first: the fullest row, trying longer examples first
- fewest first: a row with the fewest examples that can fill it. Short ones, which fit
  anywhere, remain for the last rows, where little choice remains.
"""

from __future__ import annotations

import bisect
import random
from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

# A cover: full rows, out of a list of all there are, that hold every example exactly once.
#
# Knuth's Algorithm X (Dancing Links, arXiv:cs/0011047) with bits in the place of links: the rows
# that can still be taken are the ones of one long integer, and taking a row strikes out, by one
# ``&`` for each of its lengths, all rows that need more examples of that length than are left.

MOST_IN_A_ROW = 7
LONGEST_LIST = 100_000  # full rows
MOST_BEGINNINGS = 500_000  # of rows that may become full ones
NOISE = 0.1  # by which the measure of a row varies from one search to the next
# Work, in units of some 2 ns: of a row that may be full, a length that is looked at, a row chosen.
WORK_TO_LIST, WORK_TO_LOOK, WORK_TO_CHOOSE = 60, 40, 1_500

Table = NDArray[np.int64]


def full_rows(
    sizes: Table, counts: Table, row_tokens: int, most: int = MOST_IN_A_ROW
) -> tuple[Table, int]:
    """Full rows of three to ``most`` examples, as positions in ``sizes``, (rows, 7).

    The second value is the work of the search.

    ``sizes`` descend and positions in a row ascend. ``len(sizes)`` marks an empty position.
    Lists that would become too long end with rows of fewer examples.
    """
    size_index = np.full(row_tokens + 1, -1, np.int64)
    size_index[sizes] = np.arange(len(sizes))
    listed = [np.zeros((0, MOST_IN_A_ROW), np.int64)]
    work = 0
    for examples in range(3, most + 1):
        begun = _beginnings(sizes, row_tokens, examples)
        work += WORK_TO_LIST * (MOST_BEGINNINGS if begun is None else len(begun) + 500)
        if begun is None:
            break
        last = size_index[row_tokens - sizes[begun].sum(axis=1)]
        valid = last >= begun[:, -1]
        rows = np.full((int(valid.sum()), MOST_IN_A_ROW), len(sizes), np.int64)
        rows[:, : examples - 1], rows[:, examples - 1] = begun[valid], last[valid]
        rows = rows[(np.append(counts, 1)[rows] >= _copies(rows, len(sizes))).all(axis=1)]
        if sum(map(len, listed)) + len(rows) > LONGEST_LIST:
            break
        listed.append(rows)
    return np.concatenate(listed), work


def _beginnings(sizes: Table, row_tokens: int, examples: int) -> Table | None:
    """All but the last example of rows that could be full, (beginnings, examples - 1); None:
    many.
    """
    falling = -sizes
    begun = np.zeros((1, 0), np.int64)
    room = np.array([row_tokens])
    for more in range(examples, 1, -1):  # examples that the row still lacks
        low = np.searchsorted(falling, (more - 1) * sizes[-1] - room, "left")
        if begun.shape[1]:
            low = np.maximum(low, begun[:, -1])
        high = np.searchsorted(falling, -room // more, "right")
        ways = np.maximum(high - low, 0)
        if ways.sum() > MOST_BEGINNINGS:
            return None
        origin = np.repeat(np.arange(len(begun)), ways)
        first = np.cumsum(ways) - ways
        added = low[origin] + np.arange(len(origin)) - first[origin]
        begun = np.column_stack([begun[origin], added])
        room = room[origin] - sizes[added]
    return begun


def _copies(rows: Table, none: int) -> Table:
    """How many examples of its length the row has up to each place; 0 where there is no example."""
    copies = np.ones_like(rows)
    for at in range(1, rows.shape[1]):
        same = rows[:, at] == rows[:, at - 1]
        copies[:, at] = np.where(same, copies[:, at - 1] + 1, 1)
    copies[rows == none] = 0
    return copies


class RowSearch:
    """Searches in one list of rows.

    Args:
        rows: as of :func:`full_rows`.
        counts: how many examples of each length the rows together must hold.
    """

    def __init__(self, rows: Table, counts: Table) -> None:
        self.rows = [[index for index in row if index < len(counts)] for row in rows.tolist()]
        self.counts: list[int] = counts.tolist()
        self.needing = _needing(rows, len(counts))
        self.work, self.exhausted = 0, False

    def choose_rows(self, looks: int, draw: random.Random) -> list[list[int]] | None:
        """Chosen rows, as positions of lengths; None after ``looks`` tries or if none exist.

        ``exhausted`` is True if there are none.
        """
        self._draw, self._looks = draw, looks
        chosen = self._search((1 << len(self.rows)) - 1, self.counts)
        self.exhausted = chosen is None and self._looks > 0
        return None if chosen is None else [self.rows[at] for at in chosen]

    def _search(self, alive: int, remaining: list[int]) -> list[int] | None:
        """Rows of ``alive`` that hold all that is ``remaining``."""
        hardest, fewest = -1, len(self.rows) + 1
        for index, count in enumerate(remaining):
            if count and (ways := (alive & self.needing[index][0]).bit_count()) < fewest:
                hardest, fewest = index, ways
                if ways < 2:
                    break
        if hardest < 0:
            return []
        if not fewest:
            return None
        for _, at, compatible, then in self._choices(alive, remaining, hardest):
            self._looks -= 1
            if self._looks <= 0:
                return None
            chosen = self._search(compatible, then)
            if chosen is not None:
                return [at, *chosen]
        return None

    def _choices(
        self, alive: int, remaining: list[int], index: int
    ) -> list[tuple[float, int, int, list[int]]]:
        """The rows that hold a length, with what stays of rows and examples; most rows first."""
        choices = []
        candidates = alive & self.needing[index][0]
        while candidates:
            lowest = candidates & -candidates
            candidates ^= lowest
            at, compatible, then = lowest.bit_length() - 1, alive, remaining.copy()
            for each, copies in Counter(self.rows[at]).items():
                then[each] -= copies
                if then[each] < len(self.needing[each]):
                    compatible &= ~self.needing[each][then[each]]
            lost = -(compatible.bit_count() + 1) * (1 + NOISE * self._draw.random())
            choices.append((lost, at, compatible, then))
        self.work += len(remaining) * (WORK_TO_LOOK + len(self.rows) // 200)
        self.work += len(choices) * (WORK_TO_CHOOSE + len(self.rows) // 8)
        return sorted(choices)


def _needing(rows: Table, lengths: int) -> list[list[int]]:
    """For each length the rows, as bits, that need more than 0, 1, 2... examples of it."""
    copies = _copies(rows, lengths)
    needing: list[list[int]] = [[] for _ in range(lengths)]
    for number in range(1, max(int(copies.max(initial=0)), 1) + 1):
        at, column = np.nonzero(copies == number)
        places = rows[at, column]
        order = np.argsort(places, kind="stable")
        at, ends = at[order], np.searchsorted(places[order], np.arange(lengths + 1))
        for index in range(lengths):
            bits = np.zeros(len(rows), np.uint8)
            bits[at[ends[index] : ends[index + 1]]] = 1
            packed = np.packbits(bits, bitorder="little").tobytes()
            needing[index].append(int.from_bytes(packed, "little"))
    return needing


# Packing of lengths with few different values, by linear programming over row patterns.
#
# With few values, what matters is which *patterns* (how many of each length lie in one row) are
# used how often. Over fractions of rows that is a linear programme whose optimum is a lower bound
# on the rows of any packing, and mostly less than one row below the best (Gilmore and Gomory, A
# Linear Programming Approach to the Cutting-Stock Problem, 1961, 1963). There are too many patterns
# to list:
#
#     (1) basis: one pattern per length, as many of it as fit
#     (2) prices: what one more example of each length would cost with the basis
#     (3) knapsack: the row worth most at these prices; worth no more than 1: (5)
#     (4) it enters the basis for the pattern that is used up first; (2)
#     (5) whole uses of each pattern, rounded down; the caller packs the few examples that are left

Pattern = tuple[int, ...]  # the lengths in one row
Classes = list[tuple[int, Pattern]]  # (rows, the lengths in each of them)

MOST_VALUES = 48  # different lengths up to which the programme is solved, in a fraction of a second
PIVOTS = 8  # times the number of values; far more than are ever needed
EXACT = 1e-7  # of a row: below, a better price is rounding


def whole_patterns(counts: NDArray[Any], row_tokens: int) -> tuple[int, Classes]:
    """A lower bound of rows, and rows by patterns for nearly all of ``counts[length]`` examples.

    At most one row for each different length is missing. The bound holds however the programme
    ends: any prices at which no row is worth more than 1 bound the rows by what the examples cost.
    """
    sizes = np.flatnonzero(counts)[::-1]
    need = np.asarray(counts)[sizes].astype(np.float64)
    if not len(sizes):
        return 0, []
    alone = np.minimum(row_tokens // sizes, need).astype(np.float64)  # of each length in a row
    basis: NDArray[Any] = np.diag(alone)  # (sizes, patterns)
    bound = 0.0
    for _ in range(PIVOTS * len(sizes)):
        inverse = np.linalg.inv(basis)
        prices = inverse.sum(axis=0)  # (sizes,)
        pattern, worth = _knapsack(sizes, need, prices, row_tokens)
        bound = max(bound, float(np.maximum(prices, 0) @ need) / max(worth, 1.0))
        if worth <= 1 + EXACT:
            break
        uses, entering = inverse @ need, inverse @ pattern
        ratios = np.full(len(sizes), np.inf)
        enters = entering > EXACT
        ratios[enters] = uses[enters] / entering[enters]
        basis[:, int(ratios.argmin())] = pattern
    uses = np.linalg.solve(basis, need)
    return int(np.ceil(bound - EXACT * max(bound, 1))), _rounded(sizes, need, basis, uses)


def _knapsack(
    sizes: NDArray[np.int64], need: NDArray[np.float64], prices: NDArray[np.float64], room: int
) -> tuple[NDArray[np.float64], float]:
    """The row worth most, as a count per size, and its worth; copies come in powers of two."""
    worth = np.zeros(room + 1)
    bundles: list[tuple[int, int, NDArray[np.bool_]]] = []  # (place of size, copies, taken at room)
    for index, size in enumerate(sizes.tolist()):
        remaining, copies = int(min(room // size, need[index])), 1
        while remaining and prices[index] > 0:
            copies = min(copies, remaining)
            remaining -= copies
            moved = worth[: room + 1 - copies * size] + copies * prices[index]
            taken = np.zeros(room + 1, np.bool_)
            np.greater(moved, worth[copies * size :], out=taken[copies * size :])
            worth[copies * size :] = np.maximum(worth[copies * size :], moved)
            bundles.append((index, copies, taken))
            copies *= 2
    copy_counts = np.zeros(len(sizes))
    for index, copies, taken in reversed(bundles):
        if taken[room]:
            copy_counts[index] += copies
            room -= copies * int(sizes[index])
    return copy_counts, float(worth[-1])


def _rounded(
    sizes: NDArray[np.int64],
    need: NDArray[np.float64],
    basis: NDArray[np.float64],
    uses: NDArray[np.float64],
) -> Classes:
    """Whole uses of the basis' patterns that need no example twice."""
    remaining = need.astype(np.int64)
    classes: Classes = []
    for column in np.argsort(-uses, kind="stable").tolist():
        pattern = np.rint(basis[:, column]).astype(np.int64)
        within = remaining[pattern > 0] // pattern[pattern > 0]
        times = min(int(np.floor(uses[column] + EXACT)), int(within.min()))
        if times > 0:
            remaining -= times * pattern
            classes.append((times, tuple(np.repeat(sizes, pattern).tolist())))
    return classes


# Rows filled exactly, one at a time.

LOOKS = 4000  # lengths that a search for an exact fit looks at before it takes the best so far
SKIPPED = 0.2  # chance that an attempt after the first passes over a length
MOST_RECORDS = 8  # of a row that is searched by the number of its examples


def exact_fit(
    counts: NDArray[Any], row_tokens: int, attempt: int = 0, fewest: bool = False
) -> Classes:
    """Rows of all ``counts[length]`` examples, one pattern after the other.

    Attempts after number 0 pass over some lengths at random, always the same for the same number.
    """
    draw = random.Random(attempt) if attempt else None
    remaining = {n: int(counts[n]) for n in np.flatnonzero(counts).tolist()}
    sizes = sorted(remaining)  # ascending; lengths that are used up leave
    classes: Classes = []
    while sizes:
        pattern = of_fewest(sizes, remaining, row_tokens, draw) if fewest else None
        pattern = pattern or _fullest(sizes, remaining, row_tokens, draw)
        need = Counter(pattern)
        times = min(remaining[n] // k for n, k in need.items())
        classes.append((times, pattern))
        for n, k in need.items():
            remaining[n] -= times * k
            if not remaining[n]:
                del remaining[n], sizes[bisect.bisect_left(sizes, n)]
    return classes


def _fullest(
    sizes: list[int], remaining: dict[int, int], row_tokens: int, draw: random.Random | None
) -> Pattern:
    """The fullest row that begins with the longest example; longer examples are tried first."""
    taken = [sizes[-1]]
    best: tuple[int, Pattern] = (row_tokens - sizes[-1], (sizes[-1],))
    looks = LOOKS

    def search(room: int, top: int) -> None:
        nonlocal best, looks
        if room < best[0]:
            best = (room, tuple(taken))
        index = min(top, bisect.bisect_right(sizes, room) - 1)
        while index >= 0 and looks > 0 and best[0]:
            looks -= 1
            size = sizes[index]
            if taken.count(size) < remaining[size] and (draw is None or draw.random() > SKIPPED):
                taken.append(size)
                search(room - size, index)
                taken.pop()
            index -= 1

    search(row_tokens - sizes[-1], len(sizes) - 1)
    return best[1]


def of_fewest(
    sizes: list[int], remaining: dict[int, int], row_tokens: int, draw: random.Random | None
) -> Pattern | None:
    """A full row of as few examples as possible with the longest among them, or None."""
    taken = [sizes[-1]]
    looks = LOOKS

    def search(room: int, top: int, more: int) -> bool:
        """Fill ``room`` with ``more`` examples, none longer than ``top``; they stay in
        ``taken``.
        """
        nonlocal looks
        if more == 1:  # the last example's length is known
            if room > top or taken.count(room) >= remaining.get(room, 0):
                return False
            taken.append(room)
            return True
        index = bisect.bisect_right(sizes, min(top, room - (more - 1) * sizes[0])) - 1
        while index >= 0 and looks > 0 and sizes[index] * more >= room:
            looks -= 1
            size = sizes[index]
            if taken.count(size) < remaining[size] and (draw is None or draw.random() > SKIPPED):
                taken.append(size)
                if search(room - size, size, more - 1):
                    return True
                taken.pop()
            index -= 1
        return False

    room = row_tokens - sizes[-1]
    if not room:
        return tuple(taken)
    success = any(search(room, sizes[-1], more) for more in range(1, MOST_RECORDS))
    return tuple(taken) if success else None
