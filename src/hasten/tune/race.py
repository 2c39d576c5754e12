"""A race: the best few and the start train from the beginning until a held-out loss is reached.

For techniques of other mathematics speed says little: what a step gains, more steps may cost. So
here the time is taken that a training needs to the same held-out loss, of its own steps alone, and
arms take turns from look to look. A race has one seed for all; several races, each with another
seed, make the interval. The target is given, or what the start has at its last look but one: of all
races the highest, so that it gets there in each.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hasten.core.plan import Plan
from hasten.errors import InputError
from hasten.measure.ablation import BASELINE, Arm
from hasten.measure.workers import WorkerError
from hasten.tune.learning import Training
from hasten.tune.report import duel_rows
from hasten.tune.space import Point

LOOKS = 10
FEWEST_RACES, MOST_RACES = 3, 8
SLACK = 1.1


@dataclass
class LossCurve:
    """Held-out losses of a training and the seconds its steps had taken by then."""

    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    failed: str | None = None

    def until(self, target: float) -> float | None:
        """Seconds to the target, between two looks in proportion; None if it wasn't reached.

        Before the first look nothing is known, so the first look counts as a whole.
        """
        for place, (seconds, loss) in enumerate(zip(self.seconds, self.losses, strict=True)):
            if loss <= target:
                if not place:
                    return seconds
                before, above = self.seconds[place - 1], self.losses[place - 1]
                return before + (seconds - before) * (above - target) / (above - loss)
        return None


def races(
    begin: Callable[[Point, int], Training],
    first: Point,
    leaders: Sequence[Point],
    deadline: float,
    target: float | None = None,
    seed: int = 0,
    looks: int = LOOKS,
    tell: Callable[[str], None] = lambda text: None,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Any]:
    """Race as often as there is time; rows as those of a duel, without a second start.

    Args:
        begin: begins the training of a point with a seed.
        first: the start.
        leaders: who races with it.
        deadline: by the clock; a race that wouldn't be over by then isn't begun.
        target: held-out loss; None: taken from the start's own.
        seed: of the first race and of the order of turns.
        looks: at a training.
        tell: is told what happens.
        clock: tells the time, in seconds.

    Raises:
        InputError: the start fails.
    """
    points, draw = [first, *leaders], random.Random(seed)
    found: list[list[LossCurve]] = []
    longest = 0.0
    while len(found) < MOST_RACES and clock() + SLACK * longest < deadline:
        began = clock()
        tell(f"race {len(found) + 1}")
        curves = _race(begin, points, seed + len(found), looks, deadline, draw, clock)
        if curves is None:
            break  # the time is up
        if curves[0].failed is not None:
            raise InputError(f"tune: the job as it is failed in the race: {curves[0].failed}")
        found.append(curves)
        longest = max(longest, clock() - began)
    if target is None and found:
        target = max(curves[0].losses[max(looks - 2, 0)] for curves in found)
    rows = _rows(found, len(points), target)
    return {**rows, "target_loss": target, "races": [_plain(curves) for curves in found]}


def _race(
    begin: Callable[[Point, int], Training],
    points: Sequence[Point],
    seed: int,
    looks: int,
    deadline: float,
    draw: random.Random,
    clock: Callable[[], float],
) -> list[LossCurve] | None:
    """A curve for each point; None where the deadline came first."""
    curves = [LossCurve() for _ in points]
    alive: dict[int, Training] = {}
    try:
        for place, point in enumerate(points):
            alive[place] = begin(point, seed)
        for look in range(1, looks + 1):
            for place in draw.sample(list(alive), len(alive)):
                left = deadline - clock()
                if left <= 0:
                    return None
                try:
                    curves[place].losses.append(alive[place].loss_at(look, left))
                    curves[place].seconds.append(alive[place].seconds)
                except WorkerError as error:
                    if clock() >= deadline:
                        return None
                    curves[place].failed = str(error)
                    alive.pop(place).end(at_once=True)
    finally:
        for training in alive.values():
            training.end()
    return curves


def _rows(found: Sequence[Sequence[LossCurve]], count: int, target: float | None) -> dict[str, Any]:
    """Arms whose rounds are races: how often a second their training would reach the target."""
    names = [BASELINE, *(f"choice {n}" for n in range(1, count))]
    arms = [Arm(n, Plan(), kind="other" if place else "baseline") for place, n in enumerate(names)]
    for curves in found:
        times = [c.until(target) if target is not None else None for c in curves]
        for arm, curve, seconds in zip(arms, curves, times, strict=True):
            if curve.failed is not None:
                arm.failed = curve.failed
            elif seconds is None:
                least = min(curve.losses)
                arm.failed = f"did not reach the loss of {target:.4f}; its lowest was {least:.4f}"
            else:
                arm.rounds.append(1 / seconds)
    for arm in arms:
        arm.beside = arms[0].rounds if len(arm.rounds) == len(arms[0].rounds) else []
    if arms[0].failed is not None:  # a target of the user's own
        raise InputError(f"target_loss: the recipe as it is {arms[0].failed}; give a higher one")
    rows = duel_rows(arms)
    for row in rows["arms"][1:]:
        if len(row["rounds"]) < FEWEST_RACES and row["failed"] is None:
            races = f"{len(row['rounds'])} of {FEWEST_RACES} races"
            row["verdict"] = f"undecided: {races} were over in time"
    return rows


def _plain(curves: Sequence[LossCurve]) -> list[Mapping[str, Any]]:
    return [{"seconds": [round(s, 3) for s in c.seconds], "losses": c.losses} for c in curves]
