"""A machine that is made up: points have speeds, time passes when somebody works."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from hasten.measure.turns import Parts, Step
from hasten.measure.workers import WorkerError
from hasten.tune.space import Point, Space

TICK = 0.01  # seconds, within which a machine's speed stays


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
        slow: Callable[[float], float] | None = None,
        parts: bool = False,
    ) -> None:
        self.space, self.seconds, self.start_seconds = space, seconds, start
        self.noise, self.memory, self.limit, self.fails, self.finite = (
            *(noise, memory, limit, fails),
            loss,
        )
        self.content = content  # of a step's records: how long it takes for it
        self.slow, self.parts = slow, parts  # how many times slower at a time; by turns in parts
        self.clock, self.draw = Clock(), random.Random(0)
        self.started: list[Point] = []
        self.alive, self.done = 0, 0.0  # processes; seconds of work, of all of them

    def work(self, need: float, most: float) -> tuple[float, bool]:
        """Seconds that pass while somebody works, and whether that was all it had to do."""
        took = 0.0
        tick = need if self.slow is None else TICK
        while need > 1e-9 and took < most - 1e-9:
            factor = 1.0 if self.slow is None else self.slow(self.clock.now)
            passed = min(tick, need * factor, most - took)
            self.clock.now += passed
            took += passed
            need -= passed / factor
            self.done += passed / factor
        return took, need <= 1e-9

    def start(self, point: Point) -> Simulated:
        self.started.append(point)
        self.alive += 1
        return Simulated(self, self.space.settings(point))


class Simulated:
    def __init__(self, machine: Machine, settings: dict[str, Any]) -> None:
        self.machine, self.settings, self.ended = machine, settings, False
        self.cut_off = False
        self.step = 0  # in the data
        self.parts: Parts | None = InParts(self) if machine.parts else None

    def begin(self, patience: float) -> None:
        self._pass(self.machine.start_seconds, patience)
        if why := self.machine.fails(self.settings):
            raise WorkerError(why)
        if self.machine.memory(self.settings) > self.machine.limit:
            raise WorkerError("the process ended with code -9: killed for want of memory")

    def steps(self, count: int, patience: float) -> list[Step]:
        assert not self.cut_off, "its answer to an earlier order is still to come"
        return [self.step_of(self._pass(self.need(), patience)) for _ in range(count)]

    def need(self) -> float:
        """Seconds of the next step, on a machine that nothing slows."""
        seconds = self.machine.seconds(self.settings) * self.machine.content(self.step)
        self.step += 1
        return seconds * (1 + self.machine.noise * self.machine.draw.gauss(0, 1))

    def step_of(self, seconds: float) -> Step:
        machine, own = self.machine, self.settings
        return Step(100.0, seconds, machine.memory(own), machine.finite(own))

    def again(self) -> None:
        self.step = 0

    def end(self, at_once: bool = False) -> None:
        self.machine.alive -= not self.ended
        self.ended = True

    def _pass(self, seconds: float, patience: float) -> float:
        """The seconds that it took: as many if nothing slows the machine."""
        took, done = self.machine.work(seconds, patience)
        if not done:
            self.cut_off = True
            raise WorkerError("no answer in time: it hangs")
        return took


class InParts:
    """A turn that is stopped and goes on."""

    def __init__(self, runner: Simulated) -> None:
        self.runner, self.pace = runner, runner.machine.seconds(runner.settings)
        self.count, self.left, self.worked = 0, 0.0, 0.0

    def order(self, count: int) -> None:
        assert not self.count, "its answer to an earlier order is still to come"
        self.count, self.worked = count, 0.0
        self.left = sum(self.runner.need() for _ in range(count))

    def go_on(self, seconds: float) -> list[Step] | None:
        assert self.count
        before = self.runner.machine.done
        took, done = self.runner.machine.work(self.left, seconds)
        self.worked += took
        self.left -= self.runner.machine.done - before
        if not done:
            return None
        count, self.count = self.count, 0
        self.pace = self.worked / count
        return [self.runner.step_of(self.pace) for _ in range(count)]
