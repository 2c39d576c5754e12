"""Whether a held-out loss is not worse by more than a margin that was fixed before the runs.

Seeds are paired: with and without the technique start from the same weights and see the same
records as far as the technique leaves them. Of each pair the logarithm of the losses' ratio is
taken, and the one-sided upper end of its Student interval has to lie below log(1 + margin)
(Piaggio et al., JAMA 308:2594, 2012, on what non-inferiority has to report).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hasten.errors import InputError
from hasten.measure.students_t import student_quantile

Word = Literal["not worse", "worse", "inconclusive"]
CONFIDENCE = 0.95
MOST_SEEDS = 1000  # beyond which "more seeds" is no advice


@dataclass(frozen=True)
class NonInferiority:
    """``ratio`` is the geometric mean of with / without, ``upper`` its one-sided upper end.

    ``more`` is how many further pairs would tell if they scattered like these; None: no number
    would, or none is needed.
    """

    verdict: Word
    ratio: float
    upper: float
    pairs: int
    more: int | None = None


def non_inferiority(
    without: Sequence[float], with_: Sequence[float], margin: float
) -> NonInferiority:
    """Judge paired losses; element i of both is of the same seed.

    Raises:
        InputError: unequal or no losses, one that isn't positive and finite, or no margin.
    """
    if len(without) != len(with_) or not without:
        raise InputError(
            f"paired losses are needed: {len(without)} without and {len(with_)} with the technique"
        )
    bad = [v for v in (*without, *with_) if not (math.isfinite(v) and v > 0)]
    if bad or not 0 < margin < 1:
        raise InputError(
            f"losses must be positive and finite and the margin between 0 and 1, not "
            f"{bad[0] if bad else margin}"
        )
    logs = [math.log(b) - math.log(a) for a, b in zip(without, with_, strict=True)]
    mean, allowed, pairs = statistics.fmean(logs), math.log1p(margin), len(logs)
    if pairs == 1:
        return NonInferiority("inconclusive", math.exp(mean), math.inf, 1, 1)
    spread = statistics.stdev(logs)
    half = _half(spread, pairs)
    word: Word = "inconclusive"
    if mean + half < allowed:
        word = "not worse"
    elif mean - half > allowed:
        word = "worse"
    more = _more(mean, spread, allowed, pairs) if word == "inconclusive" else None
    return NonInferiority(word, math.exp(mean), math.exp(mean + half), pairs, more)


def _half(spread: float, pairs: int) -> float:
    return student_quantile(CONFIDENCE, pairs - 1) * spread / math.sqrt(pairs)


def _more(mean: float, spread: float, allowed: float, pairs: int) -> int | None:
    """Further pairs until the interval leaves the margin to one side, at today's scatter."""
    for wanted in range(pairs + 1, MOST_SEEDS):
        if _half(spread, wanted) < abs(allowed - mean):
            return wanted - pairs
    return None
