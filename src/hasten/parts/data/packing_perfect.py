"""Perfect packings: where every row has to be full, records are covered by rows that are.

Where the tokens are a whole number of rows and not one row more will do, each row is full to the
last token. Long rows of few records leave so little choice that filling one row after the other
ends badly however often it is tried; but then there are few full rows at all, and they are listed:

    (1) pairs: two records that fill a row share one in some best packing, since whatever else lies
        beside the one fits into the room of the other (Martello and Toth, Knapsack Problems, 1990)
    (2) beginning: where many rows are left, the longest record is put with the fewest that fill its
        row, until twenty rows are left; in some order drawn anew for each attempt
    (3) cover: of all full rows of what is left, some that hold every record once; the length that
        the fewest rows could still hold comes first, and of these first the row that takes the
        least from the others (:mod:`hasten.parts.data.row_cover`)

The search ends after a fixed amount of work, counted and not clocked: its result is the same on any
machine.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hasten.parts.data.cutting_stock import Classes, Pattern
from hasten.parts.data.row_cover import MOST_IN_A_ROW, Cover, full_rows
from hasten.parts.data.row_search import of_fewest

MOST_RECORDS = 700  # that no pair takes; many more leave so much choice that filling in turn works
WORK = 200_000_000  # some 2 ns each
WORK_OF_A_ROW = 20_000  # to begin one
LAST_ROWS, LAST_RECORDS = 20, 5  # that are covered after a beginning, and in a row at most
FEW_RECORDS = 60  # of which rows of more are listed too
ATTEMPTS = (8, 4000)  # beginnings before and after all rows are covered at once
# Rows that are chosen before a search begins anew: in many short searches, then some longer ones.
DIVES = ((300,) * 50, tuple(300 << n for n in range(1, 10)))
LAST_DIVES = (300,) * 4

Lengths = NDArray[np.int64]  # how many records there are of each length


def perfect_rows(counts: NDArray[np.int64], row_tokens: int) -> Classes | None:
    """Full rows of all ``counts[length]`` records; None where none are found within the work."""
    left = np.zeros(row_tokens + 1, np.int64)
    left[: len(counts)] = counts
    if int(left @ np.arange(row_tokens + 1)) % row_tokens:
        return None
    done = _pairs(left)
    if left.sum() > MOST_RECORDS:
        return None
    found = _Search(row_tokens).rows(left) if left.any() else []
    return None if found is None else done + [(1, pattern) for pattern in found]


def _pairs(left: Lengths) -> Classes:
    """Takes rows of one and of two records out of ``left``."""
    row = len(left) - 1
    done: Classes = [(int(left[row]), (row,))] if left[row] else []
    left[row] = 0
    for size in np.flatnonzero(left).tolist():
        other = row - size
        if size > other:
            break
        times = int(left[size] // 2 if size == other else min(left[size], left[other]))
        if times:
            left[size] -= times
            left[other] -= times
            done.append((times, (other, size)))
    return done


class _Search:
    """One search for full rows, and the work that is left for it."""

    def __init__(self, row_tokens: int) -> None:
        self.row_tokens, self.work = row_tokens, WORK

    def rows(self, left: Lengths) -> list[Pattern] | None:
        number = int(left @ np.arange(len(left))) // self.row_tokens
        attempts = itertools.count()
        if number > LAST_ROWS and (found := self._begun(left, number, attempts, ATTEMPTS[0])):
            return found
        if number <= 3 * LAST_ROWS:
            most = MOST_IN_A_ROW if left.sum() <= FEW_RECORDS else LAST_RECORDS
            for dives, records in itertools.product(DIVES, range(4, most + 1)):
                if (found := self._covered(left, records, dives)) is not None:
                    return found
        if number > LAST_ROWS:
            return self._begun(left, number, attempts, ATTEMPTS[1])
        return None

    def _begun(
        self, left: Lengths, number: int, attempts: itertools.count[int], most: int
    ) -> list[Pattern] | None:
        """Rows begun one by one and covered at the end."""
        for attempt in itertools.islice(attempts, most):
            rest = left.copy()
            begun = self._beginning(rest, number - LAST_ROWS, attempt)
            last = begun and self._covered(rest, LAST_RECORDS, LAST_DIVES)
            if begun and last:
                return begun + last
            if self.work <= 0:
                return None
        return None

    def _beginning(self, left: Lengths, number: int, attempt: int) -> list[Pattern] | None:
        """So many rows, taken out of ``left``; None where a record fills none."""
        draw = random.Random(attempt) if attempt else None
        sizes = np.flatnonzero(left).tolist()
        counts = {size: int(left[size]) for size in sizes}
        rows: list[Pattern] = []
        while len(rows) < number:
            self.work -= WORK_OF_A_ROW
            row = of_fewest(sizes, counts, self.row_tokens, draw)
            if row is None:
                return None
            for size in row:
                left[size] -= 1
                counts[size] -= 1
                if not counts[size]:
                    del counts[size]
                    sizes.remove(size)
            rows.append(row)
        return rows

    def _covered(self, left: Lengths, records: int, dives: Sequence[int]) -> list[Pattern] | None:
        """All that is left in rows of at most so many records."""
        sizes = np.flatnonzero(left)[::-1]
        listed, work = full_rows(sizes, left[sizes], self.row_tokens, records)
        self.work -= work
        cover = Cover(listed, left[sizes])
        for number, looks in enumerate(dives):
            if self.work <= 0:
                return None
            before = cover.work
            found = cover.found(looks, random.Random(number))
            self.work -= cover.work - before
            if found is not None:
                return [tuple(sizes[row].tolist()) for row in found]
            if cover.exhausted:
                return None
        return None
