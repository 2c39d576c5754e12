"""Searches for rows without a gap: single rows and length patterns.

For each row the search starts with the longest remaining example, and looks for others
that fill the row to the last token. This is the minimum bin slack method of Gupta and
Ho, A New Heuristic Algorithm for the One-Dimensional Bin-Packing Problem, 1999. There
are two orders:

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

# Packing of lengths with few different values, by linear programming over row patterns.
#
# With few values, the question is how often each *pattern* (the number of each length in a row) is
# used. Over fractions of rows this is a linear programme. Its optimum is a lower bound on the rows
# of any packing, and mostly less than one row below the best (Gilmore and Gomory, A Linear
# Programming Approach to the Cutting-Stock Problem, 1961, 1963). There are too many patterns to
# list:
#
# 1. Basis: one pattern per length, with as many examples as fit.
# 2. Prices: the cost of one more example of each length with the basis.
# 3. Knapsack: the row with the highest price; if it is at most 1, go to 5.
# 4. This row replaces the pattern that is used up first; go to 2.
# 5. Whole uses of each pattern, rounded down; the caller packs the few remaining examples.

Pattern = tuple[int, ...]  # lengths in one row
Classes = list[tuple[int, Pattern]]  # (number of rows, lengths in each)

MOST_VALUES = 48  # number of lengths up to which the programme is solved, in a fraction of a second
PIVOTS = 8  # most iterations / number of lengths; far more than are needed in practice
EXACT = 1e-7  # gain, as a share of a row, below which it counts as a rounding error


def whole_patterns(counts: NDArray[Any], row_tokens: int) -> tuple[int, Classes]:
    """Returns a lower bound of rows, and rows by patterns for nearly all examples.

    The remaining examples need at most one row for each different length. The bound holds even if
    the iteration stops early: if prices make no row worth more than 1, the number of rows is at
    least the price of all examples.
    """
    sizes = np.flatnonzero(counts)[::-1]
    need = np.asarray(counts)[sizes].astype(np.float64)
    if not len(sizes):
        return 0, []
    alone = np.minimum(row_tokens // sizes, need).astype(np.float64)  # count per length in a row
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
    """Returns the row with the highest price, as a count per size, and its price."""
    worth = np.zeros(room + 1)
    bundles: list[tuple[int, int, NDArray[np.bool_]]] = []  # (index of size, copies, taken at room)
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
    """Returns whole uses of the basis' patterns that use no example twice."""
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


# Rows filled exactly, one at a time

LOOKS = 4000  # lengths that a search for an exact fit tries before it takes the best so far
SKIPPED = 0.2  # chance that an attempt after the first skips a length
MOST_RECORDS = 8  # most examples of a row that is searched by their number


def exact_fit(
    counts: NDArray[Any], row_tokens: int, attempt: int = 0, fewest: bool = False
) -> Classes:
    """Returns rows of all ``counts[length]`` examples, one pattern after the other.

    Attempts after number 0 pass over some lengths at random, always the same for the same number.
    """
    draw = random.Random(attempt) if attempt else None
    remaining = {n: int(counts[n]) for n in np.flatnonzero(counts).tolist()}
    sizes = sorted(remaining)  # ascending; lengths that are used up are removed
    classes: Classes = []
    while sizes:
        pattern = _of_fewest(sizes, remaining, row_tokens, draw) if fewest else None
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
    """Returns the fullest row with the longest example; longer examples are tried first."""
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


def _of_fewest(
    sizes: list[int], remaining: dict[int, int], row_tokens: int, draw: random.Random | None
) -> Pattern | None:
    """Returns a full row of as few examples as possible with the longest one, or None."""
    taken = [sizes[-1]]
    looks = LOOKS

    def search(room: int, top: int, more: int) -> bool:
        """Fills ``room`` with ``more`` examples of at most length ``top``; sets ``taken``."""
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
