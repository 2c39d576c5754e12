"""Speed-up of one way to compute something over another, from alternating rounds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

FEWEST = 6  # rounds: the interval of the sign test needs six
DOUBT = 0.05


@dataclass(frozen=True)
class Gain:
    """The median ratio of rounds, and its 95 % interval."""

    ratio: float
    low: float
    high: float
    rounds: int

    @classmethod
    def of(cls, base: Sequence[float], other: Sequence[float]) -> Gain:
        """Compares the seconds of at least six rounds."""
        ratios = [one / two for one, two in zip(base, other, strict=False)]
        return cls(statistics.median(ratios), *median_interval(ratios), len(ratios))

    @property
    def sure(self) -> bool:
        """Returns True if it is significantly faster."""
        return self.low > 1

    @property
    def lost(self) -> bool:
        """Returns True if it is significantly no faster."""
        return self.high <= 1

    def __str__(self) -> str:
        return f"{self.ratio:.2f}× [{self.low:.2f}, {self.high:.2f}]"


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Returns two of at least six values with the median between them at 95 %, by the sign test.

    Of n values, k or fewer lie below the true median as often as a coin shows k heads in n throws.
    """
    count, cut, chance = len(values), 0, 0.5 ** len(values)
    while 2 * (chance + math.comb(count, cut + 1) * 0.5**count) <= DOUBT:
        cut += 1
        chance += math.comb(count, cut) * 0.5**count
    ordered = sorted(values)
    return ordered[cut], ordered[-1 - cut]
