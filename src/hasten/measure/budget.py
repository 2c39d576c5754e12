"""A budget of time: what an experiment will take, how many rounds fit, and what is left out first.

Nothing is known before the baseline has started and warmed up; then its own start and its own steps
say what the rest will cost. Of what doesn't fit, this is left out first:

1. arms that leave one technique out
2. second builds
3. arms of one technique alone, and rungs of the ladder, those with the smallest forecast first
4. the second process of the baseline

The baseline and the whole plan stay. Where not even two of their rounds fit, the experiment is
refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hasten.core.facts import Facts
from hasten.core.plan import Plan
from hasten.errors import InputError
from hasten.measure.ablation import Kind

FEWEST_ROUNDS = 2  # one says nothing of its own error
WORTH_ROUNDS = 5  # fewer leave an interval too wide for most effects: rather fewer arms
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class Costs:
    """Seconds that one arm takes: to start and warm up, for a turn, for a look, at the end."""

    start: float
    turn: float
    look: float
    finish: float

    def of(self, arms: int, rounds: int, looks: int, to_start: int, builds: int = 1) -> float:
        """What the rest of an experiment takes; every build but the first starts all arms anew."""
        again = (builds - 1) * arms * self.start
        work = arms * (rounds * self.turn + builds * looks * self.look + self.finish)
        return to_start * self.start + again + work


@dataclass(frozen=True)
class BudgetPlan:
    """What a budget allows."""

    names: tuple[str, ...]
    rounds: int
    builds: int
    dropped: tuple[tuple[str, tuple[str, ...]], ...]  # a sentence, and the arms that it is about


def seconds_of(text: str) -> float:
    """``90s``, ``20m``, ``1.5h``, ``1h30m`` or a number of seconds.

    Raises:
        InputError: it says something else.
    """
    pieces = re.findall(r"([0-9.]+)\s*([a-z]*)\s*", text.strip().lower())
    whole = "".join(text.lower().split())
    try:
        if not pieces or "".join(number + unit for number, unit in pieces) != whole:
            raise ValueError
        found = sum(float(number) * _UNITS[unit] for number, unit in pieces)
    except (ValueError, KeyError) as error:
        raise InputError(f"budget: can't read {text!r}; write 90s, 20m or 1h30m") from error
    if not (math.isfinite(found) and found > 0):
        raise InputError(f"budget: {text!r} is no time; write 90s, 20m or 1h30m")
    return found


def words(seconds: float) -> str:
    """``42 s``, ``4 min``, ``2 h 10 min``: rounded up, since it is what somebody must have."""
    if seconds <= 90:
        return f"{math.ceil(seconds)} s"
    minutes = math.ceil(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def require(seconds: float, spent: float, rest: float) -> None:
    """Refuse a budget in which the least there is doesn't fit.

    Raises:
        InputError: two rounds of baseline and plan take longer, and how long.
    """
    if spent + rest > seconds:
        raise InputError(
            f"budget: {words(seconds)} is too short: two rounds of the baseline and the plan take "
            f"about {words(spent + rest)} on this job and machine"
        )


def expected_gain(plan: Plan, known: Facts) -> float:
    """How much less a plan is forecast to compute and move, as a logarithm; larger is better.

    Only for the order in which a budget drops arms: a forecast says nothing of speed.
    """
    total = 0.0
    for technique in plan:
        cast = technique.forecast(known)
        total -= math.log(max(cast.slots * cast.flops * cast.bytes * cast.wire_bytes, 1e-9))
    return total


def choose(
    names: Sequence[str],
    kinds: Mapping[str, Kind],
    expected: Mapping[str, float],
    builds: int,
    most_rounds: int,
    rest_of: Callable[[Sequence[str], int, int], float],
    left: float,
    worth: int = WORTH_ROUNDS,
) -> BudgetPlan:
    """The arms, builds and rounds that fit into the seconds that are left.

    Args:
        names: all arms.
        kinds: what each is.
        expected: the gain that is forecast for an arm; a missing one counts as none.
        builds: as the user wished.
        most_rounds: as the user wished.
        rest_of: seconds for (arms, builds, rounds).
        left: seconds there are.
        worth: with fewer rounds than these, rather fewer arms.
    """
    enough = min(worth, most_rounds)
    kept = list(names)
    dropped: list[tuple[str, tuple[str, ...]]] = []
    for what in _in_order(names, kinds, expected):
        if rest_of(kept, builds, max(enough, builds)) <= left:
            break
        if what is None:
            if builds > 1:
                builds = 1
                dropped.append(("second builds: no time for them", ()))
            continue
        kept.remove(what)
        dropped.append((f"{what}: no time for it", (what,)))
    rounds = most_rounds
    while rounds > FEWEST_ROUNDS and rest_of(kept, builds, rounds) > left:
        rounds -= 1
    return BudgetPlan(tuple(kept), rounds, builds, tuple(dropped))


def _in_order(
    names: Sequence[str], kinds: Mapping[str, Kind], expected: Mapping[str, float]
) -> list[str | None]:
    """What is left out, first to last; None stands for the second builds."""
    left_out = [name for name in names if kinds.get(name) == "left out"]
    single = [name for name in names if kinds.get(name) in ("alone", "ladder", "other")]
    again = [name for name in names if kinds.get(name) == "again"]
    single = [name for name in single if name not in (names[0], names[-1])]
    return [*left_out, None, *sorted(single, key=lambda n: expected.get(n, 0.0)), *again]
