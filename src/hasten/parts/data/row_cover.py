"""A cover: full rows, out of a list of all there are, that hold every record exactly once.

Knuth's Algorithm X (Dancing Links, arXiv:cs/0011047) with bits in the place of links: the rows that
can still be taken are the ones of one long integer, and taking a row strikes out, by one ``&`` for
each of its lengths, all rows that need more records of that length than are left.
"""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
from numpy.typing import NDArray

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
    """Full rows of three to ``most`` records, as places in ``sizes``, (rows, 7); and the work.

    ``sizes`` descend; places in a row ascend, and ``len(sizes)`` stands where there is no record.
    Lists that would become too long end with rows of fewer records.
    """
    place = np.full(row_tokens + 1, -1, np.int64)
    place[sizes] = np.arange(len(sizes))
    listed = [np.zeros((0, MOST_IN_A_ROW), np.int64)]
    work = 0
    for records in range(3, most + 1):
        begun = _beginnings(sizes, row_tokens, records)
        work += WORK_TO_LIST * (MOST_BEGINNINGS if begun is None else len(begun) + 500)
        if begun is None:
            break
        last = place[row_tokens - sizes[begun].sum(axis=1)]
        kept = last >= begun[:, -1]
        rows = np.full((int(kept.sum()), MOST_IN_A_ROW), len(sizes), np.int64)
        rows[:, : records - 1], rows[:, records - 1] = begun[kept], last[kept]
        rows = rows[(np.append(counts, 1)[rows] >= _copies(rows, len(sizes))).all(axis=1)]
        if sum(map(len, listed)) + len(rows) > LONGEST_LIST:
            break
        listed.append(rows)
    return np.concatenate(listed), work


def _beginnings(sizes: Table, row_tokens: int, records: int) -> Table | None:
    """All but the last record of rows that could be full, (beginnings, records - 1); None: many."""
    falling = -sizes
    begun = np.zeros((1, 0), np.int64)
    room = np.array([row_tokens])
    for more in range(records, 1, -1):  # records that the row still lacks
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
    """How many records of its length the row has up to each place; 0 where there is no record."""
    copies = np.ones_like(rows)
    for at in range(1, rows.shape[1]):
        same = rows[:, at] == rows[:, at - 1]
        copies[:, at] = np.where(same, copies[:, at - 1] + 1, 1)
    copies[rows == none] = 0
    return copies


class Cover:
    """Searches in one list of rows.

    Args:
        rows: as of :func:`full_rows`.
        counts: how many records of each length the rows together must hold.
    """

    def __init__(self, rows: Table, counts: Table) -> None:
        self.rows = [[place for place in row if place < len(counts)] for row in rows.tolist()]
        self.counts: list[int] = counts.tolist()
        self.needing = _needing(rows, len(counts))
        self.work, self.exhausted = 0, False

    def found(self, looks: int, draw: random.Random) -> list[list[int]] | None:
        """Chosen rows, as places of lengths; None after so many looks, or where there are none.

        ``exhausted`` tells that there are none.
        """
        self._draw, self._looks = draw, looks
        chosen = self._search((1 << len(self.rows)) - 1, self.counts)
        self.exhausted = chosen is None and self._looks > 0
        return None if chosen is None else [self.rows[at] for at in chosen]

    def _search(self, alive: int, left: list[int]) -> list[int] | None:
        """Rows of ``alive`` that hold all that is ``left``."""
        hardest, fewest = -1, len(self.rows) + 1
        for place, count in enumerate(left):
            if count and (ways := (alive & self.needing[place][0]).bit_count()) < fewest:
                hardest, fewest = place, ways
                if ways < 2:
                    break
        if hardest < 0:
            return []
        if not fewest:
            return None
        for _, at, rest, then in self._choices(alive, left, hardest):
            self._looks -= 1
            if self._looks <= 0:
                return None
            chosen = self._search(rest, then)
            if chosen is not None:
                return [at, *chosen]
        return None

    def _choices(
        self, alive: int, left: list[int], place: int
    ) -> list[tuple[float, int, int, list[int]]]:
        """The rows that hold a length, with what stays of rows and records; most rows first."""
        found = []
        mine = alive & self.needing[place][0]
        while mine:
            lowest = mine & -mine
            mine ^= lowest
            at, rest, then = lowest.bit_length() - 1, alive, left.copy()
            for each, copies in Counter(self.rows[at]).items():
                then[each] -= copies
                if then[each] < len(self.needing[each]):
                    rest &= ~self.needing[each][then[each]]
            lost = -(rest.bit_count() + 1) * (1 + NOISE * self._draw.random())
            found.append((lost, at, rest, then))
        self.work += len(left) * (WORK_TO_LOOK + len(self.rows) // 200)
        self.work += len(found) * (WORK_TO_CHOOSE + len(self.rows) // 8)
        return sorted(found)


def _needing(rows: Table, lengths: int) -> list[list[int]]:
    """For each length the rows, as bits, that need more than 0, 1, 2... records of it."""
    copies = _copies(rows, lengths)
    needing: list[list[int]] = [[] for _ in range(lengths)]
    for number in range(1, max(int(copies.max(initial=0)), 1) + 1):
        at, column = np.nonzero(copies == number)
        places = rows[at, column]
        order = np.argsort(places, kind="stable")
        at, ends = at[order], np.searchsorted(places[order], np.arange(lengths + 1))
        for place in range(lengths):
            bits = np.zeros(len(rows), np.uint8)
            bits[at[ends[place] : ends[place + 1]]] = 1
            packed = np.packbits(bits, bitorder="little").tobytes()
            needing[place].append(int.from_bytes(packed, "little"))
    return needing
