"""Cut a step's records into micro-batches of at most so many records, or so many slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

Record = TypeVar("Record")


def by_count(records: Sequence[Record], size: int) -> list[list[Record]]:
    """Pieces of ``size`` records in the order given; the last may be smaller.

    Raises:
        ValueError: ``size`` is below 1.
    """
    if size < 1:
        raise ValueError(f"size is {size}; a piece has at least one record")
    return [list(records[i : i + size]) for i in range(0, len(records), size)]


def by_tokens(records: Sequence[Record], lengths: Sequence[int], limit: int) -> list[list[Record]]:
    """Pieces whose tokens add up to at most ``limit``, longest records first.

    Each record goes into the fullest piece that still holds it (best fit decreasing), so that few
    pieces are needed; a record longer than the limit is a piece of its own.
    """
    pieces: list[list[Record]] = []
    room: list[int] = []
    for index in sorted(range(len(records)), key=lambda i: -lengths[i]):
        fits = [p for p in range(len(pieces)) if room[p] >= lengths[index]]
        if fits:
            best = min(fits, key=lambda p: room[p])
            pieces[best].append(records[index])
            room[best] -= lengths[index]
        else:
            pieces.append([records[index]])
            room.append(limit - lengths[index])
    return pieces


def by_slots(records: Sequence[Record], lengths: Sequence[int], limit: int) -> list[list[Record]]:
    """Pieces in the order given whose padded slots, longest x count, stay within ``limit``.

    A record longer than the limit is a piece of its own.
    """
    pieces: list[list[Record]] = []
    longest = 0
    for record, length in zip(records, lengths, strict=True):
        longest = max(longest, length)
        if pieces and longest * (len(pieces[-1]) + 1) <= limit:
            pieces[-1].append(record)
        else:
            pieces.append([record])
            longest = length
    return pieces
