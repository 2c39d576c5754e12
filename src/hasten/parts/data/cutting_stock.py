"""Packing of lengths with few different values, by linear programming over row patterns.

With few values, what matters is which *patterns* (how many of each length lie in one row) are used
how often. Over fractions of rows that is a linear programme whose optimum is a lower bound on the
rows of any packing, and mostly less than one row below the best (Gilmore and Gomory, A Linear
Programming Approach to the Cutting-Stock Problem, 1961, 1963). There are too many patterns to list:

    (1) basis: one pattern per length, as many of it as fit
    (2) prices: what one more record of each length would cost with the basis
    (3) knapsack: the row worth most at these prices; worth no more than 1: (5)
    (4) it enters the basis for the pattern that is used up first; (2)
    (5) whole uses of each pattern, rounded down; the caller packs the few records that are left
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Pattern = tuple[int, ...]  # the lengths in one row
Classes = list[tuple[int, Pattern]]  # (rows, the lengths in each of them)

MOST_VALUES = 48  # different lengths up to which the programme is solved, in a fraction of a second
PIVOTS = 8  # times the number of values; far more than are ever needed
EXACT = 1e-7  # of a row: below, a better price is rounding


def whole_patterns(counts: NDArray[Any], row_tokens: int) -> tuple[int, Classes]:
    """A lower bound of rows, and rows by patterns for nearly all of ``counts[length]`` records.

    At most one row for each different length is missing. The bound holds however the programme
    ends: any prices at which no row is worth more than 1 bound the rows by what the records cost.
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
    for place, size in enumerate(sizes.tolist()):
        left, copies = int(min(room // size, need[place])), 1
        while left and prices[place] > 0:
            copies = min(copies, left)
            left -= copies
            moved = worth[: room + 1 - copies * size] + copies * prices[place]
            taken = np.zeros(room + 1, np.bool_)
            np.greater(moved, worth[copies * size :], out=taken[copies * size :])
            worth[copies * size :] = np.maximum(worth[copies * size :], moved)
            bundles.append((place, copies, taken))
            copies *= 2
    found = np.zeros(len(sizes))
    for place, copies, taken in reversed(bundles):
        if taken[room]:
            found[place] += copies
            room -= copies * int(sizes[place])
    return found, float(worth[-1])


def _rounded(
    sizes: NDArray[np.int64],
    need: NDArray[np.float64],
    basis: NDArray[np.float64],
    uses: NDArray[np.float64],
) -> Classes:
    """Whole uses of the basis' patterns that need no record twice."""
    left = need.astype(np.int64)
    classes: Classes = []
    for column in np.argsort(-uses, kind="stable").tolist():
        pattern = np.rint(basis[:, column]).astype(np.int64)
        within = left[pattern > 0] // pattern[pattern > 0]
        times = min(int(np.floor(uses[column] + EXACT)), int(within.min()))
        if times > 0:
            left -= times * pattern
            classes.append((times, tuple(np.repeat(sizes, pattern).tolist())))
    return classes
