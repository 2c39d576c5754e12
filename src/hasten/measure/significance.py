"""Tests measured ratios: p-values, process variance, non-inferiority of losses.

An interval judges one ratio. An experiment has many variants, and of twenty without an
effect, one has a 95 % interval that excludes 1. Each variant's ratio is therefore
tested against the noise floor. Holm's correction is applied to the p-values of all
variants (1979, "A simple sequentially rejective multiple test procedure"). It bounds
the chance of even one false verdict. It requires no independence, which the variants
don't have because they share their baseline.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hasten.errors import InputError
from hasten.measure.ablation import Variant
from hasten.measure.statistics import (
    CONFIDENCE,
    DOUBT,
    Effect,
    Interval,
    ProcessVariance,
    mean_and_error,
    paired_ratio,
    require_positive,
    student_quantile,
    student_tail,
    verdict,
)

LEAST_FLOOR = 0.01  # a change of one per cent is nothing that anybody should act on
MOST_ROUNDS = 200  # beyond these the answer to "how many more?" is "too many"
EARLY = 0.6  # of the rounds after which the expected interval decides: tests draw such rounds
HALF = 0.975  # the upper end of a 95 % interval


def p_beyond(
    ratios: Sequence[float], floor: float, process_variance: ProcessVariance | None = None
) -> float:
    """The p-value of a change beyond the noise floor: against its nearer edge, 1 within it.

    It is Student's test of the mean logarithm, below 0.05 exactly where the 95 % interval leaves
    the edge out; a single ratio has 1. Neither rounds nor, where ``process_variance`` is known,
    processes alone may explain it.
    """
    mean, error = _mean_and_error(ratios)
    for edge in (math.log1p(floor), math.log1p(-floor)):
        if abs(mean) > abs(edge) and mean * edge >= 0:
            by_rounds = _chance(mean, error, edge, len(ratios))
            by_processes = 0.0 if process_variance is None else process_variance.chance(mean - edge)
            return max(by_rounds, by_processes)
    return 1.0


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values after Holm's step-down correction, in their own order.

    The smallest of m is multiplied by m, the next by m - 1 and so on. No result is below
    that of a smaller p-value, or above 1. Each result may be compared with the error
    probability of the whole experiment.
    """
    corrected, least, remaining = [1.0] * len(p_values), 0.0, len(p_values)
    for number in sorted(range(len(p_values)), key=p_values.__getitem__):
        least = max(least, min(1.0, remaining * p_values[number]))
        corrected[number] = least
        remaining -= 1
    return corrected


def noise_floor(again: Sequence[float], process_variance: ProcessVariance | None = None) -> float:
    """The share below which a change has no meaning, from ratios of two equal baselines.

    It is twice the error of their mean, at least `LEAST_FLOOR`. If two copies differ
    significantly, this is a bias instead of noise. The floor then includes that difference,
    because a variant can be favoured as the copy was. The normal difference between
    processes of one program is already in every interval.
    """
    mean, error = _mean_and_error(again)
    if len(again) < 2:
        return LEAST_FLOOR  # one round has no error; nothing is concluded from it anyway
    floors = [LEAST_FLOOR, math.expm1(min(2 * error, 1.0))]
    by_processes = 0.0 if process_variance is None else process_variance.chance(mean)
    if max(_chance(mean, error, 0.0, len(again)), by_processes) <= DOUBT:
        floors.append(math.expm1(min(abs(mean), 1.0)))
    return min(max(floors), 0.99)


@dataclass(frozen=True)
class EffectVerdict:
    """The verdict on one ratio among those that were measured together.

    Args:
        word: helped, no effect, hurt or undecided.
        text: the word. If the interval alone suggests another word, the reason follows
            after a colon.
        p_value: the value after the correction for their number; None for a ratio without
            common rounds.
        rivals: number of p-values that the correction counts at the position of this one.
    """

    word: Effect
    text: str
    p_value: float | None
    rivals: int


def ratio_of_rounds(
    ratios: Sequence[float],
    process_variance: ProcessVariance | None = None,
    confidence: float = CONFIDENCE,
) -> Interval:
    """The interval of ratios, one for each round; at least as wide as processes make it."""
    interval = paired_ratio([1.0] * len(ratios), ratios, confidence)
    return interval if process_variance is None else process_variance.widened(interval, confidence)


def judge_effects(
    effects: Mapping[str, tuple[Interval, Sequence[float]]],
    floor: float = LEAST_FLOOR,
    process_variance: ProcessVariance | None = None,
) -> dict[str, EffectVerdict]:
    """Verdicts for ratios that were measured together, for reports and ``plan: auto``.

    Args:
        effects: by name, the interval (`ratio_of_rounds`) and the ratio of each round. The
            rounds are missing if two variants never ran side by side; then the interval
            decides alone.
        floor: the change below which a difference has no meaning.
        process_variance: variance between processes of the experiment.
    """
    rounds = {name: ratios for name, (_, ratios) in effects.items() if ratios}
    raw = {name: p_beyond(ratios, floor, process_variance) for name, ratios in rounds.items()}
    p_values = dict(zip(raw, holm(list(raw.values())), strict=True))
    verdicts = {}
    for name, (ratio, _) in effects.items():
        p = p_values.get(name)
        rivals = 1 if p is None else sum(other >= raw[name] for other in raw.values())
        word = verdict(ratio, floor, nothing=LEAST_FLOOR, p_value=p)
        text: str = word
        if word == "undecided" and (ratio.high < 1 - LEAST_FLOOR or ratio.low > 1 + LEAST_FLOOR):
            text += f": not certain among several variants (p = {p:.3g}, at most {DOUBT:g} wanted)"
            if ratio.low <= 1 + floor and ratio.high >= 1 - floor:
                text = f"{word}: within the noise of {100 * floor:.1f} %"
        verdicts[name] = EffectVerdict(word, text, p, rivals)
    return verdicts


def rounds_needed(
    ratio: Interval,
    floor: float = LEAST_FLOOR,
    variants: int = 1,
    process_variance: ProcessVariance | None = None,
) -> int | str | None:
    """Median number of further rounds that turn "undecided" into a verdict.

    The assumption is that the true ratio is the measured one, and that rounds continue to
    vary equally. The verdict comes in the first round with an interval that excludes the
    edges. Because rounds scatter, this is earlier by `EARLY` than for the expected
    interval.

    Args:
        ratio: from rounds alone, without the process variance.
        floor: the noise floor. A floor above `LEAST_FLOOR` came from noise and shrinks with
            the square root of the rounds.
        variants: number of p-values that Holm's correction counts at the position of this
            one.
        process_variance: variance between processes, which no further round reduces.

    Returns:
        None for a single round, because it has no measure of its variation. Beyond
        `MOST_ROUNDS`, the text "more than 200": a true ratio at the edge of the floor is
        never distinguished from it.
    """
    if ratio.rounds < 2 or not (ratio.low > 0 and math.isfinite(ratio.high)):
        return None
    mean = math.log(ratio.estimate)
    half = (math.log(ratio.high) - math.log(ratio.low)) / 2
    deviation = half / student_quantile(HALF, ratio.rounds - 1) * math.sqrt(ratio.rounds)
    strict = 1 - DOUBT / 2 / max(variants, 1)
    within = math.log1p(LEAST_FLOOR) - abs(mean)

    def tells(rounds: int) -> bool:
        wide = max(LEAST_FLOOR, floor * math.sqrt(ratio.rounds / rounds))
        beyond = abs(mean) - abs(math.log1p(math.copysign(wide, mean)))
        error = deviation / math.sqrt(rounds)

        def clears(gap: float, p: float) -> bool:
            by_processes = 0.0 if process_variance is None else process_variance.half(2 * p - 1)
            return gap >= max(student_quantile(p, rounds - 1) * error, by_processes)

        return clears(beyond, strict) or clears(within, HALF)

    low, high = ratio.rounds, ratio.rounds + math.ceil(MOST_ROUNDS / EARLY)
    if not tells(high):
        return f"more than {MOST_ROUNDS}"
    while high - low > 1:  # more rounds tell whatever fewer tell
        middle = (low + high) // 2
        low, high = (low, middle) if tells(middle) else (middle, high)
    return max(1, min(MOST_ROUNDS, round(EARLY * (high - ratio.rounds))))


def _mean_and_error(ratios: Sequence[float]) -> tuple[float, float]:
    require_positive(ratios, "ratio")
    return mean_and_error([math.log(ratio) for ratio in ratios])


def _chance(mean: float, error: float, edge: float, rounds: int) -> float:
    if rounds < 2:
        return 1.0
    if error == 0:
        return 1.0 if mean == edge else 0.0
    return 2 * student_tail(abs(mean - edge) / error, rounds - 1)


# How far processes of one program lie apart, and what that leaves of an interval over rounds.
#
# All rounds of a process share its process_variance: where its memory lies, what was loaded before
# it. Copies of one program differ by a per cent or two for as long as they live, so an interval
# over the rounds of two processes, however many, is one about these two and not about their
# programs. What tells the difference are fresh builds, and since an experiment has few of each
# variant, all variants say it together: each build's log ratio, less what its variant has in all
# builds and what its cohort has in all variants (the baseline's own process variance), varies as
# processes do (a two-way layout: Scheffé, The Analysis of Variance, 1959, chapter 4). Where there
# are few builds, `USUAL` counts like `BELIEF` degrees of freedom (the conjugate prior of a
# variance: Gelman et al., Bayesian Data Analysis, section 2.6).

USUAL = 0.01  # standard deviation of a process's speed, before anything is seen
BELIEF = 4.0  # degrees of freedom that this counts for
Row = list[float]  # a variant's mean log ratio in each build


def process_variance_of(variants: Sequence[Variant]) -> ProcessVariance | None:
    """Returns the process variance of all variants; None if none shares rounds with the baseline.

    Variants with the same baseline rounds form a group: they are compared with the same processes
    of the baseline.
    """
    groups: dict[tuple[float, ...], list[Row]] = {}
    for variant in variants[1:]:
        row = [] if variant.failed is not None else _by_build(variant, variants[0])
        if row:
            groups.setdefault(tuple(variant.baseline_rounds), []).append(row)
    if not groups:
        return None
    builds = min(len(row) for rows in groups.values() for row in rows)
    squares, freedom = BELIEF * USUAL**2, BELIEF
    for rows in groups.values():
        residual, degrees = _residual([row[:builds] for row in rows])
        squares, freedom = squares + residual, freedom + degrees
    again = next((v for v in variants[1:] if v.kind == "again" and v.failed is None), None)
    row = [] if again is None else _by_build(again, variants[0])
    if builds == 1 and row:
        squares, freedom = squares + row[0] ** 2 / 2, freedom + 1
    return ProcessVariance(math.sqrt(squares / freedom / builds), freedom, builds)


def with_process_variance(variants: Sequence[Variant]) -> list[Variant]:
    """The same variants, each knowing how far apart processes of this experiment were."""
    variance = process_variance_of(variants)
    for variant in variants:
        variant.process_variance = variance
    return list(variants)


def _by_build(variant: Variant, base: Variant) -> Row:
    baseline_rates = variant.baseline_rounds or base.rounds
    pairs = list(zip(variant.rounds, baseline_rates, strict=False))
    builds = variant.builds or [0] * len(pairs)
    logs: dict[int, list[float]] = {}
    for (ours, theirs), build in zip(pairs, builds, strict=False):
        logs.setdefault(build, []).append(math.log(ours) - math.log(theirs))
    return [statistics.fmean(logs[build]) for build in sorted(logs)]


def _residual(rows: Sequence[Row]) -> tuple[float, float]:
    """Sum of squares of what neither variant nor build explains, and its degrees of freedom.

    A single variant is set against nothing: then both processes of a ratio are in it, half for
    each.
    """
    builds = len(rows[0])
    if builds < 2:
        return 0.0, 0.0
    if len(rows) == 1:
        middle = statistics.fmean(rows[0])
        return sum((value - middle) ** 2 for value in rows[0]) / 2, builds - 1.0
    of_variant = [statistics.fmean(row) for row in rows]
    of_build = [statistics.fmean(column) for column in zip(*rows, strict=True)]
    grand_mean = statistics.fmean(of_variant)
    squares = sum(
        (value - of_variant[i] - of_build[k] + grand_mean) ** 2
        for i, row in enumerate(rows)
        for k, value in enumerate(row)
    )
    return squares, float((len(rows) - 1) * (builds - 1))


# Whether an eval loss is not worse by more than a margin that was fixed before the runs.
#
# Seeds are paired: with and without the technique start from the same weights and see the same
# examples as far as the technique leaves them. Of each pair the logarithm of the losses' ratio is
# taken, and the one-sided upper end of its Student interval has to lie below log(1 + margin)
# (Piaggio et al., JAMA 308:2594, 2012, on what non-inferiority has to report).

Word = Literal["not worse", "worse", "undecided"]
MOST_SEEDS = 1000  # beyond which "more seeds" is no advice


@dataclass(frozen=True)
class NonInferiority:
    """The result of a test that a loss isn't worse.

    The field ``ratio`` is the geometric mean of with / without, ``upper`` its one-sided
    upper end. The field ``more`` is the number of further pairs for a decision, if they
    scatter like these. It is None if no number decides, or none is needed.
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
        return NonInferiority("undecided", math.exp(mean), math.inf, 1, 1)
    spread = statistics.stdev(logs)
    half = _half(spread, pairs)
    word: Word = "undecided"
    if mean + half < allowed:
        word = "not worse"
    elif mean - half > allowed:
        word = "worse"
    # Further pairs until the interval leaves the margin to one side, at today's scatter.
    decisive = (n for n in range(pairs + 1, MOST_SEEDS) if _half(spread, n) < abs(allowed - mean))
    wanted = next(decisive, None) if word == "undecided" else None
    more = None if wanted is None else wanted - pairs
    return NonInferiority(word, math.exp(mean), math.exp(mean + half), pairs, more)


def _half(spread: float, pairs: int) -> float:
    return student_quantile(CONFIDENCE, pairs - 1) * spread / math.sqrt(pairs)
