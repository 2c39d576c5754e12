"""Speed-up of one variant of a computation over another, from alternating rounds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

FEWEST = 6  # rounds that the sign test's 95 % interval needs
DOUBT = 0.05  # probability that the true median is outside the interval


@dataclass(frozen=True)
class Gain:
    """The median speed-up over rounds, and its 95 % interval."""

    ratio: float
    low: float
    high: float
    rounds: int

    @classmethod
    def of(cls, base: Sequence[float], other: Sequence[float]) -> Gain:
        """Returns the speed-up of ``other`` over ``base``, from seconds of at least six rounds."""
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
    """Returns the 95 % interval of the median of at least six values, by the sign test.

    The number of values below the true median is binomial, as the heads of n coin throws. The
    bounds are two of the values.
    """
    count, cut, chance = len(values), 0, 0.5 ** len(values)
    while 2 * (chance + math.comb(count, cut + 1) * 0.5**count) <= DOUBT:
        cut += 1
        chance += math.comb(count, cut) * 0.5**count
    ordered = sorted(values)
    return ordered[cut], ordered[-1 - cut]
