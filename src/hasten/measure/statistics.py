"""Intervals for interleaved measurements: how much faster, and how sure.

Speed varies by a factor, not by an amount: a busy neighbour or a warm processor slows every variant
by some per cent. So all arithmetic is done on logarithms. The variants of a trial take turns, and
what slows one round slows all variants of that round; dividing within a round (pairing) removes it.

1. `spread` gives one variant's tokens per second with its interval over rounds.
2. `paired_ratio` gives the ratio of two variants with its interval, `unpaired_ratio` that of two
   sets of rounds that ran at different times.
3. `joint_ratio` gives what techniques do together over what their single gains multiply to.
4. `verdict` turns a ratio into one word, `claim_verdict` what was promised of it; whether a ratio
   is beyond doubt among several is the business of significance.py.

The interval is Student's (1908, "The probable error of a mean") for the mean of the logarithms,
brought back by exp: with the few rounds anybody can afford (3 to 10) a normal interval would be
too narrow. How often such intervals hold the truth is simulated in benchmarks/bench_verdicts.py.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from hasten.errors import InputError


@lru_cache(maxsize=4096)
def student_quantile(p: float, dof: float) -> float:
    """The point below which Student's t with `dof` degrees of freedom lies with probability `p`.

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


# Intervals, ratios and verdicts.

Effect = Literal["helped", "no effect", "hurt", "undecided"]
ClaimWord = Literal["held", "fell short", "not comparable"]

LIKELY, LEAST_GAIN = 0.7, 1.03  # of a gain that is taken without proof
DOUBT = 0.05  # the chance of a false "helped" or "hurt" that an experiment may have


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


def spread(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """One variant's value (tokens per second, say) over its rounds, in the unit of `values`.

    `estimate` is the geometric mean, `low` and `high` its Student interval, `median` the median of
    `values`. Raises InputError for no rounds or values that aren't positive and finite.
    """
    require_positive(values, "variant")
    return _interval(values, [math.log(value) for value in values], confidence)


def unpaired_ratio(
    first: Sequence[float], second: Sequence[float], confidence: float = 0.95
) -> Interval:
    """The ratio second / first of values that were taken at different times, in any numbers.

    `estimate` is the ratio of geometric means, with the interval of Welch (1947), which doesn't
    take the two to vary alike; `median` is the ratio of medians and `rounds` counts the shorter
    side. A side of one value says nothing about its error: then the interval is infinite.
    """
    require_positive(first, "first side")
    require_positive(second, "second side")
    rounds = min(len(first), len(second))
    median = statistics.median(second) / statistics.median(first)
    sides = [[math.log(value) for value in side] for side in (first, second)]
    (ours, our_error), (theirs, their_error) = (mean_and_error(logs) for logs in sides)
    if rounds == 1:
        return Interval(_exp(theirs - ours), median, 0.0, math.inf, 1)
    error, half = math.hypot(our_error, their_error), 0.0
    if error > 0:  # else every value repeats itself exactly
        shares = [(side_error / error) ** 2 for side_error in (our_error, their_error)]
        pieces = (w * w / (len(logs) - 1) for w, logs in zip(shares, sides, strict=True))
        freedom = 1 / math.fsum(pieces)
        half = student_quantile((1 + confidence) / 2, max(freedom, 1.0)) * error
    low, middle, high = (_exp(theirs - ours + x) for x in (-half, 0.0, half))
    return Interval(middle, median, low, high, rounds)


def joint_ratio(
    baseline: Sequence[float],
    together: Sequence[float],
    singles: Sequence[Sequence[float]],
    confidence: float = 0.95,
) -> Interval:
    """What several techniques gain together over the product of what each gains alone.

    Below 1 they take from each other, above 1 they help each other. Element i of every sequence is
    from the same round, so what slows a round leaves the ratio alone.
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
    return _interval([_exp(x) for x in logs], logs, confidence)


def verdict(
    ratio: Interval,
    noise_floor: float = 0.01,
    *,
    nothing: float | None = None,
    p_value: float | None = None,
) -> Effect:
    """One word for a measured ratio, of which above 1 is better.

    `noise_floor` f is the change that nobody should act on, `nothing` g the change that counts as
    none (f if left out). Where several ratios are judged at once `p_value` is this one's after the
    correction for their number (`significance.holm`); it only ever withholds a word. The first
    rule that applies decides:

    - "hurt": high < 1 - f. Worse beyond doubt.
    - "helped": low > 1 + f. Better beyond doubt.
    - "no effect": 1 - g <= low and high <= 1 + g. Known well enough to say that nothing happened;
      these are the two one-sided tests of Schuirmann (1987), each at half the interval's doubt.
    - "undecided": the rest, and all of the first two with a p-value above `DOUBT`. The
      interval crosses the edge of the noise floor: measure more rounds. A single round always
      ends here.

    g is apart from f because a noisy machine has a wide f: there less can be acted on, but not
    more can be called nothing. Raises InputError for a floor outside [0, 1).
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
    """Whether a gain is worth acting on without proof: 3 % at least, and above 1 at 70 %.

    For a choice that has to be made now; the word for it stays "undecided" (`verdict`).
    """
    if ratio.rounds < 2 or ratio.estimate < LEAST_GAIN:
        return False
    wide, narrow = (student_quantile((1 + p) / 2, ratio.rounds - 1) for p in (0.95, LIKELY))
    half = math.log(ratio.high / ratio.estimate) * narrow / wide
    return math.log(ratio.estimate) > half


def claim_verdict(ratio: Interval, claim: float, effect: Effect) -> ClaimWord:
    """One word for the ratio that was promised, beside the measured one and its `verdict`.

    - "fell short": the whole interval lies below the claim.
    - "held": the effect is "helped" and the claim isn't above the interval; more than was promised
      is held, too. A promise of a small loss (a claim of 1 at most) needs an interval above it.
    - "not comparable": the interval leaves both open.

    Raises InputError for a claim that isn't positive and finite.
    """
    if not (math.isfinite(claim) and claim > 0):
        raise InputError(f"A claimed ratio must be positive and finite, not {claim}.")
    if ratio.high < claim:
        return "fell short"
    is_met = effect == "helped" if claim > 1 else ratio.low >= claim
    return "held" if is_met else "not comparable"


def hodges_lehmann(values: Sequence[float]) -> float:
    """The median of the means of all pairs, a value's with itself among them.

    Nearly as exact as the mean where values are normal (the median needs half as many again), and a
    few outliers don't move it (Hodges and Lehmann 1963).
    """
    pairs = itertools.combinations_with_replacement(values, 2)
    return statistics.median((a + b) / 2 for a, b in pairs)


def mean_and_error(logs: Sequence[float]) -> tuple[float, float]:
    """The mean and its standard error, which is infinite for a single value."""
    rounds, mean = len(logs), math.fsum(logs) / len(logs)
    if rounds == 1:
        return mean, math.inf
    return mean, math.sqrt(math.fsum((x - mean) ** 2 for x in logs) / (rounds - 1) / rounds)


def _interval(values: Sequence[float], logs: Sequence[float], confidence: float) -> Interval:
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
    """The standard error of a variant's mean log speed that its processes bring, and how well
    known.

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

    def half(self, confidence: float = 0.95, variants: float = 2.0) -> float:
        """Half the width of an interval of log speeds; ``variants``: squared weights of those in
        it.
        """
        quantile = student_quantile((1 + confidence) / 2, self.freedom)
        return quantile * self.error * math.sqrt(variants)

    def chance(self, distance: float) -> float:
        """Of two variants that far apart in log speed, either way, by their processes alone."""
        return 2 * student_tail(abs(distance) / (self.error * math.sqrt(2)), self.freedom)

    def widened(
        self, interval: Interval, confidence: float = 0.95, variants: float = 2.0
    ) -> Interval:
        """The interval, at least as wide as processes make it."""
        if not (interval.low > 0 and math.isfinite(interval.high)):
            return interval
        factor = math.exp(self.half(confidence, variants))
        low, high = (
            min(interval.low, interval.estimate / factor),
            max(interval.high, interval.estimate * factor),
        )
        return Interval(interval.estimate, interval.median, low, high, interval.rounds)
