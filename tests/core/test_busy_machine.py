"""One line about other processes, once, and only where they are the cause."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from hasten.core.health import FEWEST_STEPS, BusyMachine
from hasten.core.timing import StepMetrics


class FakeLoad:
    """A load meter whose shares were decided before."""

    def __init__(self, shares: Sequence[float]) -> None:
        self._shares = list(shares)

    def begin(self) -> None: ...

    def lap(self, name: str) -> None: ...

    def share(self, name: str) -> float:
        return self._shares.pop(0)


def step(number: int, seconds: float, positions: int = 100) -> StepMetrics:
    numbers = dict.fromkeys(StepMetrics.__dataclass_fields__, 0)
    known = {"step": number, "step_seconds": seconds, "positions": positions}
    return StepMetrics(**{**numbers, **known})


def lines_of(steps: Sequence[StepMetrics], shares: Sequence[float]) -> list[str]:
    lines: list[str] = []
    load: Any = FakeLoad(shares)
    machine = BusyMachine(lines.append, load)
    for metrics in steps:
        machine.note(metrics)
    return lines


def usual() -> list[StepMetrics]:
    """Steps of other sizes, each as fast as the others."""
    return [step(i, 0.01 * (i + 1), 100 * (i + 1)) for i in range(FEWEST_STEPS)]


def test_a_slow_step_beside_busy_processes_is_told_once() -> None:
    steps = [*usual(), step(8, 0.05), step(9, 0.05)]
    assert lines_of(steps, [0.6]) == [
        "step 8 took 5.0 times as long as the median step: other processes used 60% of the "
        "processor meanwhile"
    ]


@pytest.mark.parametrize(
    ("seconds", "share"), [(0.029, 0.9), (0.05, 0.09)], ids=["not slow enough", "nobody else"]
)
def test_nothing_is_told_without_both_causes(seconds: float, share: float) -> None:
    assert lines_of([*usual(), step(8, seconds)], [share]) == []


def test_the_first_steps_are_not_judged() -> None:
    steps = [step(0, 0.01), *(step(i, 0.9) for i in range(1, FEWEST_STEPS))]
    assert lines_of(steps, []) == []
