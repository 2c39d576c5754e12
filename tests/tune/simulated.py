"""A machine that is made up: points have speeds, time passes when somebody works."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from typing import Any, cast

from hasten.core.plan import Plan
from hasten.measure.ablation import AGAIN, BASELINE, Kind, Variant
from hasten.measure.experiment import ExperimentContext, measure_variants
from hasten.measure.record import ExperimentRecord
from hasten.measure.search import Proposal
from hasten.measure.workers import WorkerError, WorkerSpec
from hasten.tune.space import Dimension, Point, Space

TICK = 0.01  # seconds, within which a machine's speed stays


def of_values(knobs: Mapping[str, list[Any]]) -> Space:
    """A space of plain lists, which starts at the first values; numbers count as ordered."""
    ordered = {n: len(v) > 2 and isinstance(v[0], int) for n, v in knobs.items()}
    dimensions = tuple(Dimension(n, tuple(v), ordered[n]) for n, v in knobs.items())
    return Space(dimensions, (0,) * len(dimensions))


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
        effects: Callable[[dict[str, Any]], list[dict[str, Any]]] = lambda s: [],
    ) -> None:
        self.space, self.seconds, self.start_seconds = space, seconds, start
        self.noise, self.memory, self.limit, self.fails, self.finite = (
            *(noise, memory, limit, fails),
            loss,
        )
        self.content = content  # of a step's records: how long it takes for it
        self.effects = effects  # what a process reports of its techniques at its end
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

    def compare(self, proposal: Proposal[Point]) -> list[Variant]:
        """Measures a comparison of points with the experiments' own code."""

        class Pool:
            start = staticmethod(lambda spec, log: self.start(spec.arguments["point"]))

        points = proposal.variants
        context = ExperimentContext(
            cast(Any, Pool),
            lambda name: WorkerSpec("simulated", {"point": points[name]}),
            memory=10**15,
            cores=2,
            clock=self.clock,
        )
        record = ExperimentRecord(clock=self.clock)
        plans = dict.fromkeys(points, Plan())
        kinds: dict[str, Kind] = {BASELINE: "baseline", AGAIN: "again"}
        kinds = {name: kinds.get(name, "other") for name in points}
        return measure_variants(
            context, plans, proposal.design, kinds=kinds, record=record
        ).variants


class Simulated:
    """A worker (`hasten.measure.workers.Worker`)."""

    def __init__(self, machine: Machine, settings: dict[str, Any]) -> None:
        self.machine, self.settings, self.ended = machine, settings, False
        self.can_slice = machine.parts
        self.step = 0  # in the data
        self.count, self.left, self.worked = 0, 0.0, 0.0  # of a turn in slices

    def ready(self, timeout: float) -> dict[str, Any]:
        self._pass(self.machine.start_seconds, timeout)
        if why := self.machine.fails(self.settings):
            raise WorkerError(why)
        if self.machine.memory(self.settings) > self.machine.limit:
            raise WorkerError("the process ended with code -9: killed for want of memory")
        return {}

    def request(self, op: str, timeout: float, **arguments: Any) -> dict[str, Any]:
        if op == "evaluate":
            return {"tokens": self.step, "eval_loss": 1.0}
        if op == "finish":
            return {"effective": self.machine.effects(self.settings), "samples": []}
        assert op == "steps"
        return {"steps": self.steps(arguments["count"], timeout)}

    def steps(self, count: int, timeout: float) -> list[dict[str, Any]]:
        return [self.step_of(self._pass(self.need(), timeout)) for _ in range(count)]

    def submit(self, op: str, **arguments: Any) -> None:
        assert not self.count, "its answer to an earlier request is still to come"
        self.count, self.worked = arguments["count"], 0.0
        self.left = sum(self.need() for _ in range(self.count))

    def run_for(self, seconds: float) -> dict[str, Any] | None:
        assert self.count
        before = self.machine.done
        took, done = self.machine.work(self.left, seconds)
        self.worked += took
        self.left -= self.machine.done - before
        if not done:
            return None
        count, self.count = self.count, 0
        return {"steps": [self.step_of(self.worked / count) for _ in range(count)]}

    def need(self) -> float:
        """Seconds of the next step, on a machine that nothing slows."""
        seconds = self.machine.seconds(self.settings) * self.machine.content(self.step)
        self.step += 1
        return seconds * (1 + self.machine.noise * self.machine.draw.gauss(0, 1))

    def step_of(self, seconds: float) -> dict[str, Any]:
        machine, own = self.machine, self.settings
        loss = 1.0 if machine.finite(own) else math.nan
        return step(100.0, seconds, loss=loss, peak_memory_bytes=machine.memory(own))

    def close(self, kill: bool = False) -> None:
        self.machine.alive -= not self.ended
        self.ended = True

    def _pass(self, seconds: float, timeout: float) -> float:
        """The seconds that it took: as many if nothing slows the machine."""
        took, done = self.machine.work(seconds, timeout)
        if not done:
            raise WorkerError("no answer in time: it hangs")
        return took


def step(items: float, seconds: float, **more: Any) -> dict[str, Any]:
    """A step as a worker tells of it."""
    rate = items / seconds
    return {"tokens": items, "step_seconds": seconds, "tokens_per_second": rate, **more}
