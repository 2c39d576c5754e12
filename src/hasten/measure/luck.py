"""How far processes of one program lie apart, and what that leaves of an interval over rounds.

All rounds of a process share its luck: where its memory lies, what was loaded before it. Copies of
one program differ by a per cent or two for as long as they live, so an interval over the rounds of
two processes, however many, is one about these two and not about their programs. What tells the
difference are fresh builds, and since an experiment has few of each arm, all arms say it together:
each build's log ratio, less what its arm has in all builds and what its sitting has in all arms
(the baseline's own luck), varies as processes do (a two-way layout: Scheffé, The Analysis of
Variance, 1959, chapter 4). Where there are few builds, `USUAL` counts like `BELIEF` degrees of
freedom (the conjugate prior of a variance: Gelman et al., Bayesian Data Analysis, section 2.6).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

from hasten.measure.ablation import Arm
from hasten.measure.statistics import Luck

USUAL = 0.01  # standard deviation of a process's speed, before anything is seen
BELIEF = 4.0  # degrees of freedom that this counts for
Row = list[float]  # an arm's mean log ratio in each build


def luck_of(arms: Sequence[Arm]) -> Luck | None:
    """Of all arms of an experiment together; None where no arm has rounds beside the baseline's.

    Arms of one group had the same processes of the baseline beside them, those of another others.
    """
    groups: dict[tuple[float, ...], list[Row]] = {}
    for arm in arms[1:]:
        row = [] if arm.failed is not None else _by_build(arm, arms[0])
        if row:
            groups.setdefault(tuple(arm.beside), []).append(row)
    if not groups:
        return None
    builds = min(len(row) for rows in groups.values() for row in rows)
    squares, freedom = BELIEF * USUAL**2, BELIEF
    for rows in groups.values():
        found, degrees = _residual([row[:builds] for row in rows])
        squares, freedom = squares + found, freedom + degrees
    copies = (arm for arm in arms[1:] if arm.kind == "again" and arm.failed is None)
    if builds == 1 and (pair := [_by_build(arm, arms[0]) for arm in copies]) and pair[0]:
        squares, freedom = squares + pair[0][0] ** 2 / 2, freedom + 1
    return Luck(math.sqrt(squares / freedom / builds), freedom, builds)


def with_luck(arms: Sequence[Arm]) -> list[Arm]:
    """The same arms, each knowing how far apart processes of this experiment were."""
    found = luck_of(arms)
    for arm in arms:
        arm.luck = found
    return list(arms)


def _by_build(arm: Arm, base: Arm) -> Row:
    """The arm's mean log ratio to the baseline in each of its builds."""
    beside = arm.beside or base.rounds
    pairs = list(zip(arm.rounds, beside, strict=False))
    builds = arm.builds or [0] * len(pairs)
    logs: dict[int, list[float]] = {}
    for (ours, theirs), build in zip(pairs, builds, strict=False):
        logs.setdefault(build, []).append(math.log(ours) - math.log(theirs))
    return [statistics.fmean(logs[build]) for build in sorted(logs)]


def _residual(rows: Sequence[Row]) -> tuple[float, float]:
    """Sum of squares of what neither arm nor build explains, and its degrees of freedom.

    A single arm is set against nothing: then both processes of a ratio are in it, half for each.
    """
    builds = len(rows[0])
    if builds < 2:
        return 0.0, 0.0
    if len(rows) == 1:
        middle = statistics.fmean(rows[0])
        return sum((value - middle) ** 2 for value in rows[0]) / 2, builds - 1.0
    of_arm = [statistics.fmean(row) for row in rows]
    of_build = [statistics.fmean(column) for column in zip(*rows, strict=True)]
    whole = statistics.fmean(of_arm)
    left: Iterable[float] = (
        value - of_arm[i] - of_build[k] + whole
        for i, row in enumerate(rows)
        for k, value in enumerate(row)
    )
    return sum(x * x for x in left), float((len(rows) - 1) * (builds - 1))
