"""Held-out records that stand in the training data too: a held-out loss that flatters.

Records are compared by their tokens, all of them; near-duplicates aren't looked for. Only training
records that agree with a held-out one in length and in the number of trained tokens are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from hasten.recipe.material import Material


@dataclass(frozen=True)
class Overlap:
    """How many of the held-out records occur in the training data, word for word."""

    count: int
    held_out: int

    @property
    def advice(self) -> str:
        """One sentence for the user; empty where there is nothing to say."""
        if not self.count:
            return ""
        verb = "stands" if self.count == 1 else "stand"
        return (
            f"{self.count:,} of {self.held_out:,} held-out records {verb} in the training data "
            "too, token for token, so the held-out loss flatters: take duplicates out of the data, "
            "or give held_out a file of its own"
        )


def overlap(material: Material) -> Overlap:
    """Count the held-out records whose tokens are those of a training record."""
    held_out, train = material.held_out, material.train
    if isinstance(held_out, tuple) or not len(held_out):
        return Overlap(0, 0)
    wanted = [_digest(held_out[i]) for i in range(len(held_out))]
    alike = np.isin(_shapes(train), _shapes(held_out)).nonzero()[0]
    found = set(wanted) & set(_digests(train, alike.tolist()))
    return Overlap(sum(digest in found for digest in wanted), len(held_out))


def tell_overlap(material: Material, tell: Callable[[str], None]) -> None:
    """Say it once, before anything is trained."""
    advice = overlap(material).advice
    if advice:
        tell(advice)


def _shapes(records: Any) -> NDArray[np.int64]:
    """Length and trained tokens of each record as one number."""
    counts = records.trained_counts.astype(np.int64)
    found: NDArray[np.int64] = (records.lengths.astype(np.int64) << 32) + counts
    return found


def _digests(records: Any, indices: Iterable[int]) -> Iterable[int]:
    return (_digest(records[i]) for i in indices)


def _digest(record: Any) -> int:
    return int(xxhash.xxh3_128_intdigest(np.ascontiguousarray(record.input_ids).tobytes()))
