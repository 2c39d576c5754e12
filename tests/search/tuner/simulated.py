"""A machine that is made up: points have speeds, time passes when somebody works."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from hasten.search.tuner.space import Point, Space
from hasten.search.tuner.turns import RunnerFailedError, Step


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Machine:
    """Runners whose steps take what ``seconds`` of their settings says."""

    def __init__(
        self,
        space: Space,
        seconds: Callable[[dict[str, Any]], float],
        *,
        start: float = 5.0,
        noise: float = 0.0,
        memory: Callable[[dict[str, Any]], float] = lambda s: 1e9,
        limit: float = 1e12,
        fails: Callable[[dict[str, Any]], str | None] = lambda s: None,
        loss: Callable[[dict[str, Any]], bool] = lambda s: True,
        content: Callable[[int], float] = lambda step: 1.0,
    ) -> None:
        self.space, self.seconds, self.start_seconds = space, seconds, start
        self.noise, self.memory, self.limit, self.fails, self.finite = (
            *(noise, memory, limit, fails),
            loss,
        )
        self.content = content  # of a step's records: how long it takes for it
        self.clock, self.draw = Clock(), random.Random(0)
        self.started: list[Point] = []
        self.alive = 0

    def start(self, point: Point) -> Simulated:
        self.started.append(point)
        self.alive += 1
        return Simulated(self, self.space.settings(point))


class Simulated:
    def __init__(self, machine: Machine, settings: dict[str, Any]) -> None:
        self.machine, self.settings, self.ended = machine, settings, False
        self.cut_off = False
        self.step = 0  # in the data

    def begin(self, patience: float) -> None:
        self._pass(self.machine.start_seconds, patience)
        if why := self.machine.fails(self.settings):
            raise RunnerFailedError(why)
        if self.machine.memory(self.settings) > self.machine.limit:
            raise RunnerFailedError("the process ended with code -9: killed for want of memory")

    def steps(self, count: int, patience: float) -> list[Step]:
        assert not self.cut_off, "its answer to an earlier order is still to come"
        found = []
        for _ in range(count):
            seconds = self.machine.seconds(self.settings) * self.machine.content(self.step)
            self.step += 1
            seconds *= 1 + self.machine.noise * self.machine.draw.gauss(0, 1)
            self._pass(seconds, patience)
            finite = self.machine.finite(self.settings)
            found.append(Step(100.0, seconds, self.machine.memory(self.settings), finite))
        return found

    def again(self) -> None:
        self.step = 0

    def end(self, at_once: bool = False) -> None:
        self.machine.alive -= not self.ended
        self.ended = True

    def _pass(self, seconds: float, patience: float) -> None:
        self.machine.clock.now += min(seconds, patience)
        if seconds > patience:
            self.cut_off = True
            raise RunnerFailedError("no answer in time: it hangs")
