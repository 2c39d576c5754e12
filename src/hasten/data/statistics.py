"""What a data set is like: lengths, trained share, duplicates, and what padding would cost."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from hasten.data.store import Records

QUANTILES = (1, 10, 50, 90, 99)


@dataclass(frozen=True)
class Bin:
    """Records with ``low`` <= tokens < ``high``."""

    low: int
    high: int
    records: int
    tokens: int


@dataclass(frozen=True)
class Statistics:
    """A data set in numbers; a duplicate is a record whose tokens came before."""

    records: int
    tokens: int
    trained_tokens: int
    shortest: int
    longest: int
    quantiles: dict[int, int]
    duplicates: int
    bins: tuple[Bin, ...]


def statistics_of(records: Records) -> Statistics:
    """Count a data set's records, tokens and duplicates; every record is read once."""
    lengths = np.asarray(records.lengths, np.int64)
    seen = Counter(_digests(records))
    return Statistics(
        records=len(lengths),
        tokens=int(lengths.sum()),
        trained_tokens=int(np.asarray(records.trained_counts, np.int64).sum()),
        shortest=int(lengths.min()),
        longest=int(lengths.max()),
        quantiles={q: int(np.percentile(lengths, q)) for q in QUANTILES},
        duplicates=sum(seen.values()) - len(seen),
        bins=tuple(_bins(lengths)),
    )


def padding_share(lengths: NDArray[np.int32], batch: int, seed: int = 0) -> float:
    """Share of filler when random batches are padded to their longest record."""
    order = np.random.default_rng(seed).permutation(len(lengths))
    batches = [lengths[order[i : i + batch]] for i in range(0, len(order), batch)]
    slots = sum(len(b) * int(b.max()) for b in batches)
    return 1 - float(lengths.sum(dtype=np.int64)) / slots if slots else 0.0


def _digests(records: Records) -> Iterator[int]:
    for index in range(len(records)):
        yield xxhash.xxh3_64_intdigest(records[index].input_ids.tobytes())


def _bins(lengths: NDArray[np.int64]) -> Iterator[Bin]:
    """Two bins per doubling, from the shortest record to the longest."""
    low, high = int(lengths.min()), int(lengths.max())
    edges = [1]
    while edges[-1] <= high:
        edges.append(max(edges[-1] + 1, round(edges[-1] * 2**0.5)))
    for start, end in itertools.pairwise(edges):
        inside = lengths[(lengths >= start) & (lengths < end)]
        if end > low:
            yield Bin(start, end, len(inside), int(inside.sum()))
