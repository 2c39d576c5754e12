"""Intervals and verdicts for interleaved measurements: how much faster, and how sure.

Speed varies by a factor, not by an amount: a busy neighbour or a warm processor slows every arm by
some per cent. So all arithmetic is done on logarithms. The arms of a trial take turns, and what
slows one round slows all arms of that round; dividing within a round (pairing) removes it.

1. `spread` gives one arm's tokens per second with its interval over rounds.
2. `paired_ratio` gives the ratio of two arms with its interval.
3. `verdict` turns a ratio and what was promised into one word.

The interval is Student's (1908, "The probable error of a mean") for the mean of the logarithms,
brought back by exp: with the few rounds anybody can afford (3 to 10) a normal interval would be
too narrow.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import Literal

from hasten.errors import InputError

Verdict = Literal["held", "fell short", "harmed", "inconclusive", "no effect"]


@dataclass(frozen=True)
class Interval:
    """A measured positive quantity, in the unit of its values (a ratio has none).

    `estimate` is the geometric mean over rounds and `low` <= `estimate` <= `high` its Student
    interval. `median` is the ordinary median over rounds: the number to print, since one stalled
    round does not move it; under such outliers it may lie outside [low, high]. One round says
    nothing about its own error: then `low` is 0 and `high` is infinite.
    """

    estimate: float
    median: float
    low: float
    high: float
    rounds: int

    def summary(self) -> dict[str, float | None]:
        """Median, low and high as the report wants them; an infinite interval is None, None."""
        bounded = self.low > 0 and math.isfinite(self.high)
        low, high = (self.low, self.high) if bounded else (None, None)
        return {"median": self.median, "low": low, "high": high}


def paired_ratio(
    baseline: Sequence[float], other: Sequence[float], confidence: float = 0.95
) -> Interval:
    """The ratio other / baseline over rounds, element i of both from the same round.

    `estimate` is exp(mean of the log ratios), `low` and `high` its Student interval, `median` the
    median of the ratios. Raises InputError for unequal lengths, no rounds, or values that aren't
    positive and finite.
    """
    if len(baseline) != len(other):
        raise InputError(
            f"A paired ratio needs as many rounds of each arm, but the baseline has "
            f"{len(baseline)} and the other arm {len(other)}: give only complete rounds."
        )
    _require_positive(baseline, "baseline")
    _require_positive(other, "other arm")
    pairs = list(zip(baseline, other, strict=True))
    # Differences of logarithms, not logarithms of quotients: quotients can overflow.
    return _interval(
        [o / b for b, o in pairs], [math.log(o) - math.log(b) for b, o in pairs], confidence
    )


def spread(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """One arm's value (tokens per second, say) over its rounds, in the unit of `values`.

    `estimate` is the geometric mean, `low` and `high` its Student interval, `median` the median of
    `values`. Raises InputError for no rounds or values that aren't positive and finite.
    """
    _require_positive(values, "arm")
    return _interval(values, [math.log(value) for value in values], confidence)


def verdict(ratio: Interval, claim: float | None = None, noise_floor: float = 0.01) -> Verdict:
    """One word for a measured ratio (above 1 is better) and the ratio that was promised, if any.

    `noise_floor` f is the change that nobody should act on. The first rule that applies decides:

    - "harmed": high < 1 - f. Worse beyond doubt, whatever was claimed.
    - "held": low > 1 + f, and there is no claim or claim <= high. A result better than the claim
      is held too.
    - "fell short": low > 1 + f, but claim > high. Better, by less than was promised.
    - "no effect": 1 - f <= low and high <= 1 + f. Known well enough to say that nothing happened.
    - "inconclusive": the rest. The interval crosses the edge of the noise floor: measure more
      rounds. A single round always ends here.

    Raises InputError for a claim that isn't positive and finite or a noise floor outside [0, 1).
    """
    if claim is not None and not (math.isfinite(claim) and claim > 0):
        raise InputError(f"A claimed ratio must be positive and finite, not {claim}.")
    if not 0 <= noise_floor < 1:
        raise InputError(f"A noise floor is a share from 0 up to 1, not {noise_floor}.")
    if ratio.high < 1 - noise_floor:
        return "harmed"
    if ratio.low > 1 + noise_floor:
        return "held" if claim is None or claim <= ratio.high else "fell short"
    if ratio.low >= 1 - noise_floor and ratio.high <= 1 + noise_floor:
        return "no effect"
    return "inconclusive"


@lru_cache(maxsize=256)
def student_quantile(p: float, dof: float) -> float:
    """The point below which Student's t with `dof` degrees of freedom lies with probability `p`.

    Bisects the tail area, which is half the regularised incomplete beta function
    I_x(dof/2, 1/2) at x = dof / (dof + t^2) (Abramowitz and Stegun 26.7.1). Agrees with other
    implementations to a relative 1e-8 for `dof` from 1 to 100,000. Raises InputError for `p`
    outside (0, 1) or `dof` below 1 or infinite.
    """
    if not 0 < p < 1:
        raise InputError(f"A probability must lie between 0 and 1, not be {p}.")
    if not 1 <= dof < math.inf:
        raise InputError(f"Degrees of freedom must be finite and at least 1, not {dof}.")
    if p >= 0.5:
        return 0.0 if p == 0.5 else -student_quantile(1 - p, dof)
    low, high = 0.0, 1.0
    while _student_tail(high, dof) > p:
        low, high = high, 2 * high
    middle = (low + high) / 2
    while low < middle < high:  # until no number lies between the ends
        low, high = (middle, high) if _student_tail(middle, dof) > p else (low, middle)
        middle = (low + high) / 2
    return -middle


def _interval(values: Sequence[float], logs: Sequence[float], confidence: float) -> Interval:
    if not 0 < confidence < 1:
        raise InputError(f"A confidence must lie between 0 and 1, not be {confidence}.")
    rounds, mean = len(logs), math.fsum(logs) / len(logs)
    if rounds == 1:
        return Interval(values[0], values[0], 0.0, math.inf, 1)
    error = math.sqrt(math.fsum((x - mean) ** 2 for x in logs) / (rounds - 1) / rounds)
    half = student_quantile((1 + confidence) / 2, rounds - 1) * error
    low, estimate, high = (_exp(x) for x in (mean - half, mean, mean + half))
    return Interval(estimate, statistics.median(values), low, high, rounds)


def _require_positive(values: Sequence[float], arm: str) -> None:
    if not values:
        raise InputError(f"The {arm} has no rounds: measure at least one, better five.")
    for turn, value in enumerate(values, start=1):
        if not (math.isfinite(value) and value > 0):
            raise InputError(
                f"Round {turn} of the {arm} is {value}, but a measured speed is positive and "
                "finite: leave the failed round out of both arms."
            )


def _exp(x: float) -> float:
    return math.exp(x) if x < 709 else math.inf  # math.exp raises just above


def _student_tail(t: float, dof: float) -> float:
    """The probability that Student's t exceeds `t` >= 0."""
    q = t * t / dof
    if math.isinf(q):
        return 0.0
    x, rest = 1 / (1 + q), q / (1 + q)  # rest is 1 - x without its rounding
    a, b = dof / 2, 0.5
    if x < (a + 1) / (a + b + 2):  # where the fraction converges fast; else by symmetry
        return 0.5 * _beta_share(a, b, x, rest)
    return 0.5 * (1 - _beta_share(b, a, rest, x))


def _beta_share(a: float, b: float, x: float, rest: float) -> float:
    """The regularised incomplete beta function I_x(a, b), with rest = 1 - x.

    Evaluates the continued fraction 1 + d1 / (1 + d2 / (1 + ...)) of Abramowitz and Stegun 26.5.8
    from its head by Lentz's method (1976): c and d are ratios of successive numerators and
    denominators, and their product is each convergent's correction.
    """
    if x == 0:
        return 0.0
    log_beta = math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
    front = math.exp(a * math.log(x) + b * math.log(rest) - log_beta) / a
    fraction, c, d = 1.0, 1.0, 0.0
    for j in count(1):
        m = j // 2
        term = -(a + m) * (a + b + m) if j % 2 else m * (b - m)
        term *= x / ((a + j - 1) * (a + j))
        d = 1 / (1 + term * d)
        c = 1 + term / c
        fraction *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return front / fraction
