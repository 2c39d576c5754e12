"""Rows filled exactly, one at a time, from the longest record that is left.

A row without a gap costs nothing that could have been saved, so each row is searched for records
that fill it to the last token (after the minimum bin slack of Gupta and Ho, A New Heuristic
Algorithm for the One-Dimensional Bin-Packing Problem, 1999). Two ways to choose among such rows:

    longest first   the fullest row found, trying longer records first
    fewest first    a row of as few records as can fill it; short ones, which fit anywhere, are left
                    for the last rows, where little choice remains
"""

from __future__ import annotations

import bisect
import random
from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hasten.parts.data.cutting_stock import Classes, Pattern

LOOKS = 4000  # lengths that a search for an exact fit looks at before it takes the best so far
SKIPPED = 0.2  # chance that an attempt after the first passes over a length
MOST_RECORDS = 8  # of a row that is searched by the number of its records


def exact_fit(
    counts: NDArray[Any], row_tokens: int, attempt: int = 0, fewest: bool = False
) -> Classes:
    """Rows of all ``counts[length]`` records, one pattern after the other.

    Attempts after number 0 pass over some lengths at random, always the same for the same number.
    """
    draw = random.Random(attempt) if attempt else None
    left = {n: int(counts[n]) for n in np.flatnonzero(counts).tolist()}
    sizes = sorted(left)  # ascending; lengths that are used up leave
    classes: Classes = []
    while sizes:
        pattern = of_fewest(sizes, left, row_tokens, draw) if fewest else None
        pattern = pattern or _fullest(sizes, left, row_tokens, draw)
        need = Counter(pattern)
        times = min(left[n] // k for n, k in need.items())
        classes.append((times, pattern))
        for n, k in need.items():
            left[n] -= times * k
            if not left[n]:
                del left[n], sizes[bisect.bisect_left(sizes, n)]
    return classes


def _fullest(
    sizes: list[int], left: dict[int, int], row_tokens: int, draw: random.Random | None
) -> Pattern:
    """The fullest row that begins with the longest record; longer records are tried first."""
    taken = [sizes[-1]]
    best: tuple[int, Pattern] = (row_tokens - sizes[-1], (sizes[-1],))
    looks = LOOKS

    def search(room: int, top: int) -> None:
        nonlocal best, looks
        if room < best[0]:
            best = (room, tuple(taken))
        place = min(top, bisect.bisect_right(sizes, room) - 1)
        while place >= 0 and looks > 0 and best[0]:
            looks -= 1
            size = sizes[place]
            if taken.count(size) < left[size] and (draw is None or draw.random() > SKIPPED):
                taken.append(size)
                search(room - size, place)
                taken.pop()
            place -= 1

    search(row_tokens - sizes[-1], len(sizes) - 1)
    return best[1]


def of_fewest(
    sizes: list[int], left: dict[int, int], row_tokens: int, draw: random.Random | None
) -> Pattern | None:
    """A full row of as few records as possible with the longest among them, or None."""
    taken = [sizes[-1]]
    looks = LOOKS

    def search(room: int, top: int, more: int) -> bool:
        """Fill ``room`` with ``more`` records, none longer than ``top``; they stay in ``taken``."""
        nonlocal looks
        if more == 1:  # the last record's length is known
            if room > top or taken.count(room) >= left.get(room, 0):
                return False
            taken.append(room)
            return True
        place = bisect.bisect_right(sizes, min(top, room - (more - 1) * sizes[0])) - 1
        while place >= 0 and looks > 0 and sizes[place] * more >= room:
            looks -= 1
            size = sizes[place]
            if taken.count(size) < left[size] and (draw is None or draw.random() > SKIPPED):
                taken.append(size)
                if search(room - size, size, more - 1):
                    return True
                taken.pop()
            place -= 1
        return False

    room = row_tokens - sizes[-1]
    if not room:
        return tuple(taken)
    found = any(search(room, sizes[-1], more) for more in range(1, MOST_RECORDS))
    return tuple(taken) if found else None
