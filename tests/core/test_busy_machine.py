"""Other processes: one line, once, where they are the cause; and idle threads sleep sooner."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from hasten.core import health
from hasten.core.health import CALM_LOOKS, FEWEST_STEPS, BusyMachine
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


def test_idle_threads_sleep_sooner_as_long_as_others_are_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(health.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(health.host, "usable_cores", lambda: 4)
    shares = [0.0, 0.05, 0.07, *[0.05] * (CALM_LOOKS - 1), 0.5, *[0.0] * (CALM_LOOKS + 1)]
    load: Any = FakeLoad(shares)
    machine = BusyMachine(print, load)
    monkeypatch.setattr(machine, "idle_threads", SimpleNamespace(sleep_sooner=False))
    found = []
    for second in range(1, len(shares) + 1):
        for now[0] in (second - 0.5, second):  # one look a second
            machine.look()
        found.append(machine.idle_threads.sleep_sooner)
    busy = 1 + CALM_LOOKS + CALM_LOOKS - 1  # 0.07 of four cores are more than a quarter of one
    assert found == [False, False, *[True] * busy, False, False]
