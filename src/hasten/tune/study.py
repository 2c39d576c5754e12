"""What a study has found: trials in their order, the best few, and what none beats in both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from hasten.tune.final import ordered
from hasten.tune.proposers import Tried
from hasten.tune.space import Point, Space

Objective = Literal["tokens", "memory", "money", "pareto", "time-to-loss"]
OBJECTIVES: tuple[str, ...] = get_args(Objective)
LEADERS = 3  # that go into the duel


@dataclass
class Study:
    """What was found, in the order in which it was tried; ``rows`` are as the record has them."""

    space: Space
    objective: Objective
    noise: float
    rate: float
    memory: float | None
    tried: list[Tried] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    final: dict[Point, tuple[float, ...]] = field(default_factory=dict)
    step_seconds: float = 0.0  # of the start
    expected: Callable[[Point], float] = lambda point: 0.0  # of a point's value, beforehand
    ended: str = ""

    def leaders(self, count: int = LEADERS) -> list[Point]:
        """The best points that are better than the start by what was measured, best first.

        Those of the final come first, in its order.
        """
        places = ordered(self.final, self.expected)
        rest = [point for point in self._by_trials() if point not in places]
        return [*places, *rest][:count]

    def _by_trials(self) -> list[Point]:
        known = []
        for tried, row in zip(self.tried, self.rows, strict=True):
            value = row["log_rate"] if self.objective == "pareto" else tried.value
            if value is not None and value > 0 and tried.point != self.space.start:
                known.append((value, tried.point))
        return [point for _, point in sorted(known, key=lambda k: -k[0])]

    def front(self) -> list[int]:
        """Places of the trials that none beats in both speed and memory (Pareto)."""
        known = [
            (i, r["log_rate"], r["memory"])
            for i, r in enumerate(self.rows)
            if r["state"] == "ok" and r["memory"]
        ]
        return [
            i
            for i, rate, memory in known
            if not any(
                other >= rate and less <= memory and (other > rate or less < memory)
                for _, other, less in known
            )
        ]
