"""Intervals for interleaved measurements: speed ratios and their uncertainty.

Speed varies by a factor, not by an amount: a busy neighbour or a warm processor slows
every variant by some per cent. So all arithmetic is done on logarithms. The variants of
a trial take turns, and an event that slows one round slows all variants of that round.
Dividing within a round (pairing) removes it.

1. The function `spread` returns one variant's tokens per second with its interval over
   rounds.
2. The function `paired_ratio` returns the ratio of two variants with its interval.
   `unpaired_ratio` returns that of two sets of rounds from different times.
3. The function `joint_ratio` returns the joint gain of techniques, divided by the
   product of their single gains.
4. The function `verdict` turns a ratio into one word, and `claim_verdict` does this for
   a claimed ratio. Significance of one ratio among several is in significance.py.

The interval is Student's (1908, "The probable error of a mean") for the mean of the
logarithms, transformed back by exp. Only few rounds (3 to 10) are affordable, and for
them a normal interval would be too narrow. The script benchmarks/bench_verdicts.py
simulates how often such intervals contain the true value.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from hasten.errors import InputError


@lru_cache(maxsize=4096)
def student_quantile(p: float, dof: float) -> float:
    """The quantile of Student's t with `dof` degrees of freedom at probability `p`.

    Raises InputError for `p` outside (0, 1) or `dof` below 1 or infinite.
    """
    if not 0 < p < 1:
        raise InputError(f"A probability must lie between 0 and 1, not be {p}.")
    if not 1 <= dof < math.inf:
        raise InputError(f"Degrees of freedom must be finite and at least 1, not {dof}.")
    from scipy.special import stdtrit

    return float(stdtrit(dof, p))


def student_tail(t: float, dof: float) -> float:
    """The probability that Student's t with `dof` degrees of freedom exceeds `t` >= 0."""
    from scipy.special import stdtr

    return float(stdtr(dof, -t))


Effect = Literal["helped", "no effect", "hurt", "undecided"]
ClaimWord = Literal["held", "fell short", "not comparable"]

CONFIDENCE = 0.95  # of an interval
LIKELY, LEAST_GAIN = 0.7, 1.03  # of a gain that is taken without proof
DOUBT = 0.05  # the chance of a false "helped" or "hurt" that an experiment may have


@dataclass(frozen=True)
class Interval:
    """A measured positive quantity, in the unit of its values (a ratio has none).

    `estimate` is the geometric mean over rounds and `low` <= `estimate` <= `high` its
    Student interval. `median` is the ordinary median over rounds. It is the number to
    print, because one stalled round doesn't change it. With such outliers it may be outside
    [low, high]. One round has no error estimate: then `low` is 0 and `high` is infinite.
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
    baseline: Sequence[float], other: Sequence[float], confidence: float = CONFIDENCE
) -> Interval:
    """The ratio other / baseline over rounds, element i of both from the same round.

    `estimate` is exp(mean of the log ratios), `low` and `high` its Student interval, `median` the
    median of the ratios. Raises InputError for unequal lengths, no rounds, or values that aren't
    positive and finite.
    """
    if len(baseline) != len(other):
        raise InputError(
            f"A paired ratio needs as many rounds of each variant, but the baseline has "
            f"{len(baseline)} and the other variant {len(other)}: give only complete rounds."
        )
    require_positive(baseline, "baseline")
    require_positive(other, "other variant")
    pairs = list(zip(baseline, other, strict=True))
    # Differences of logarithms, not logarithms of quotients: quotients can overflow.
    return _interval(
        [o / b for b, o in pairs], [math.log(o) - math.log(b) for b, o in pairs], confidence
    )


def spread(values: Sequence[float]) -> Interval:
    """One variant's value (for example tokens per second) over its rounds.

    The unit is that of `values`. `estimate` is the geometric mean, `low` and `high` its
    Student interval, `median` the median of `values`. Raises InputError for no rounds or
    values that aren't positive and finite.
    """
    require_positive(values, "variant")
    return _interval(values, [math.log(value) for value in values])


def unpaired_ratio(first: Sequence[float], second: Sequence[float]) -> Interval:
    """The ratio second / first of values from different times; the counts may differ.

    The field `estimate` is the ratio of geometric means, with the interval of Welch (1947).
    It doesn't assume equal variances. The field `median` is the ratio of medians and
    `rounds` counts the shorter side. A side of one value has no error estimate: then the
    interval is infinite.
    """
    require_positive(first, "first side")
    require_positive(second, "second side")
    rounds = min(len(first), len(second))
    median = statistics.median(second) / statistics.median(first)
    sides = [[math.log(value) for value in side] for side in (first, second)]
    (ours, our_error), (theirs, their_error) = map(mean_and_error, sides)
    if rounds == 1:
        return Interval(_exp(theirs - ours), median, 0.0, math.inf, 1)
    error, half = math.hypot(our_error, their_error), 0.0
    if error > 0:  # else every value repeats itself exactly
        shares = [(side_error / error) ** 2 for side_error in (our_error, their_error)]
        pieces = (w * w / (len(logs) - 1) for w, logs in zip(shares, sides, strict=True))
        freedom = 1 / math.fsum(pieces)
        half = student_quantile((1 + CONFIDENCE) / 2, max(freedom, 1.0)) * error
    low, middle, high = (_exp(theirs - ours + x) for x in (-half, 0.0, half))
    return Interval(middle, median, low, high, rounds)


def joint_ratio(
    baseline: Sequence[float], together: Sequence[float], singles: Sequence[Sequence[float]]
) -> Interval:
    """The joint gain of several techniques over the product of their single gains.

    Below 1 they reduce each other's gain, above 1 they increase it. Element i of every
    sequence is from the same round. A slow round therefore doesn't change the ratio.
    """
    for variant in (baseline, together, *singles):
        require_positive(variant, "variant")
        if len(variant) != len(baseline):
            raise InputError(
                "Variants can be multiplied only over the same rounds, but they have "
                f"{len(baseline)} and {len(variant)}: give only complete rounds."
            )
    logs = []
    for number, base in enumerate(baseline):
        alone = math.fsum(math.log(single[number]) - math.log(base) for single in singles)
        logs.append(math.log(together[number]) - math.log(base) - alone)
    return _interval([_exp(x) for x in logs], logs)


def verdict(
    ratio: Interval,
    noise_floor: float = 0.01,
    *,
    nothing: float | None = None,
    p_value: float | None = None,
) -> Effect:
    """One word for a measured ratio; above 1 is better.

    `noise_floor` f is the change below which a difference has no meaning. `nothing` g is
    the change that counts as none (default: f). If several ratios are judged at once,
    `p_value` is the value after the correction for their number (`significance.holm`). It
    can only turn a word into "undecided". The first rule that applies decides:

    - "hurt": high < 1 - f. Significantly worse.
    - "helped": low > 1 + f. Significantly better.
    - "no effect": 1 - g <= low and high <= 1 + g. Precise enough to exclude an effect.
      These are the two one-sided tests of Schuirmann (1987), each at half the interval's
      error probability.
    - "undecided": the rest, and all of the first two with a p-value above `DOUBT`. The
      interval crosses the edge of the noise floor: measure more rounds. A single round
      always ends here.

    g and f differ because a noisy machine has a wide f. It makes fewer effects usable, but
    it doesn't turn more of them into "no effect". Raises InputError for a floor outside [0,
    1).
    """
    nothing = noise_floor if nothing is None else nothing
    for share in (noise_floor, nothing):
        if not 0 <= share < 1:
            raise InputError(f"A noise floor is a share from 0 up to 1, not {share}.")
    if p_value is None or p_value <= DOUBT:
        if ratio.high < 1 - noise_floor:
            return "hurt"
        if ratio.low > 1 + noise_floor:
            return "helped"
    if ratio.low >= 1 - nothing and ratio.high <= 1 + nothing:
        return "no effect"
    return "undecided"


def is_likely(ratio: Interval) -> bool:
    """Returns True if a gain is likely: at least 3 %, and above 1 with 70 % confidence.

    It is for a decision that can't wait; the verdict stays "undecided" (`verdict`).
    """
    if ratio.rounds < 2 or ratio.estimate < LEAST_GAIN:
        return False
    wide, narrow = (student_quantile((1 + p) / 2, ratio.rounds - 1) for p in (CONFIDENCE, LIKELY))
    half = math.log(ratio.high / ratio.estimate) * narrow / wide
    return math.log(ratio.estimate) > half


def claim_verdict(ratio: Interval, claim: float, effect: Effect) -> ClaimWord:
    """One word for a claimed ratio, from the measured ratio and its `verdict`.

    - "fell short": the whole interval is below the claim.
    - "held": the effect is "helped" and the claim isn't above the interval. A gain above
      the claim counts as "held", too. A claimed small loss (a claim of 1 at most) needs an
      interval above it.
    - "not comparable": the interval leaves both open.

    Raises InputError for a claim that isn't positive and finite.
    """
    if not (math.isfinite(claim) and claim > 0):
        raise InputError(f"A claimed ratio must be positive and finite, not {claim}.")
    if ratio.high < claim:
        return "fell short"
    is_met = effect == "helped" if claim > 1 else ratio.low >= claim
    return "held" if is_met else "not comparable"


def mean_and_error(logs: Sequence[float]) -> tuple[float, float]:
    """The mean and its standard error, which is infinite for a single value."""
    rounds, mean = len(logs), math.fsum(logs) / len(logs)
    if rounds == 1:
        return mean, math.inf
    return mean, math.sqrt(math.fsum((x - mean) ** 2 for x in logs) / (rounds - 1) / rounds)


def _interval(
    values: Sequence[float], logs: Sequence[float], confidence: float = CONFIDENCE
) -> Interval:
    if not 0 < confidence < 1:
        raise InputError(f"A confidence must lie between 0 and 1, not be {confidence}.")
    rounds = len(logs)
    if rounds == 1:
        return Interval(values[0], values[0], 0.0, math.inf, 1)
    mean, error = mean_and_error(logs)
    half = student_quantile((1 + confidence) / 2, rounds - 1) * error
    low, estimate, high = (_exp(x) for x in (mean - half, mean, mean + half))
    return Interval(estimate, statistics.median(values), low, high, rounds)


def require_positive(values: Sequence[float], variant: str) -> None:
    if not values:
        raise InputError(f"The {variant} has no rounds: measure at least one, better five.")
    for turn, value in enumerate(values, start=1):
        if not (math.isfinite(value) and value > 0):
            raise InputError(
                f"Round {turn} of the {variant} is {value}, but a measured speed is positive and "
                "finite: leave the failed round out of both variants."
            )


def _exp(x: float) -> float:
    return math.exp(x) if x < 709 else math.inf  # math.exp raises just above


@dataclass(frozen=True)
class ProcessVariance:
    """The standard error that a variant's processes bring into its mean log speed.

    Args:
        error: of one variant, over all of its builds.
        freedom: degrees of freedom behind it.
        builds: fresh builds of each variant.
    """

    error: float
    freedom: float
    builds: int

    @property
    def spread(self) -> float:
        """Standard deviation of one process."""
        return self.error * math.sqrt(self.builds)

    def half(self, confidence: float = CONFIDENCE, variants: float = 2.0) -> float:
        """Half the width of an interval; ``variants``: the sum of their squared weights in it."""
        quantile = student_quantile((1 + confidence) / 2, self.freedom)
        return quantile * self.error * math.sqrt(variants)

    def chance(self, distance: float) -> float:
        """Probability that two variants differ this much by their processes alone.

        ``distance`` is the difference in log speed, in either direction.
        """
        return 2 * student_tail(abs(distance) / (self.error * math.sqrt(2)), self.freedom)

    def widened(
        self, interval: Interval, confidence: float = CONFIDENCE, variants: float = 2.0
    ) -> Interval:
        """The interval, at least as wide as processes make it."""
        if not (interval.low > 0 and math.isfinite(interval.high)):
            return interval
        factor = math.exp(self.half(confidence, variants))
        low = min(interval.low, interval.estimate / factor)
        high = max(interval.high, interval.estimate * factor)
        return Interval(interval.estimate, interval.median, low, high, interval.rounds)
