"""Machines that are made up: workers that take as long as they say, by a clock of their own.

Nothing waits: a request moves the clock on. So an experiment of minutes takes milliseconds, and how
slow a machine is, and when it becomes slower, is known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hasten.core.plan import Plan
from hasten.machine.processes import LoadMeter
from hasten.measure.ablation import Design, Kind
from hasten.measure.experiment import ExperimentContext, Measured, measure_variants
from hasten.measure.record import ExperimentRecord
from hasten.measure.workers import WorkerError, WorkerSpec

TOKENS = 1000


@dataclass
class Machine:
    """How slow a made-up machine is.

    Args:
        step_seconds: of each plan's step, by the number of its techniques.
        start_seconds: of a process, before it is warmed up.
        import_seconds: that the first one takes longer.
        look_steps: of a look at the eval loss, in steps of the plan.
        first_step: by what factor the first step is slower.
        slows: a factor on all times from then on, by the clock.
        cuts: whether workers can be stopped within a request.
        peak: bytes that a variant uses.
        load: the share of the processor that others take.
    """

    step_seconds: Callable[[int], float]
    start_seconds: float = 1.0
    import_seconds: float = 0.0
    look_steps: float = 1.0
    first_step: float = 1.0
    slows: Callable[[float], float] = lambda now: 1.0
    cuts: bool = True
    peak: int = 100
    load: float = 0.0
    now: float = 0.0
    alive: int = 0
    most_alive: int = 0
    fails: Mapping[int, str] = field(default_factory=dict)  # by the number of techniques

    def clock(self) -> float:
        return self.now

    def start(self, spec: WorkerSpec, log: str) -> MadeUpWorker:
        self.alive += 1
        self.most_alive = max(self.most_alive, self.alive)
        return MadeUpWorker(self, spec.arguments["plan"])


class MadeUpWorker:
    """What the schedule needs of a worker, on a made-up machine."""

    def __init__(self, machine: Machine, techniques: int) -> None:
        self.machine, self.techniques, self.steps = machine, techniques, 0
        self._left, self._reply = 0.0, dict[str, Any]()
        self._is_alive = True

    @property
    def can_slice(self) -> bool:
        return self.machine.cuts

    def ready(self, timeout: float) -> dict[str, Any]:
        imports, self.machine.import_seconds = self.machine.import_seconds, 0.0
        self._spend(imports + self.machine.start_seconds, timeout)
        return {"startup_seconds": {}}

    def request(self, op: str, timeout: float, **arguments: Any) -> dict[str, Any]:
        if self.techniques in self.machine.fails:
            raise WorkerError(self.machine.fails[self.techniques])
        if op == "steps":
            reply = self._stepping(arguments["count"])
            self._spend(sum(s["step_seconds"] for s in reply["steps"]), timeout)
            return reply
        self._spend(self.machine.look_steps * self._step_seconds(), timeout)
        if op == "evaluate":
            return {"tokens": TOKENS * self.steps, "eval_loss": 2.0}
        return {"effective": [], "samples": [], "ledger": None}

    def submit(self, op: str, **arguments: Any) -> None:
        self._reply = self._stepping(arguments["count"])
        self._left = sum(step["step_seconds"] for step in self._reply["steps"])

    def run_for(self, seconds: float) -> dict[str, Any] | None:
        took = min(seconds, self._left)
        self.machine.now += took
        self._left -= took
        return self._reply if self._left <= 1e-9 else None

    def close(self, kill: bool = False) -> None:
        self.machine.alive -= self._is_alive
        self._is_alive = False

    def _stepping(self, count: int) -> dict[str, Any]:
        found = []
        for _ in range(count):
            seconds = self._step_seconds()
            self.steps += 1
            rate = TOKENS / seconds
            done = {"step": self.steps, "tokens": TOKENS, "positions": TOKENS, "loss": 2.0}
            peak = self.machine.peak
            done |= {"step_seconds": seconds, "tokens_per_second": rate}
            found.append({**done, "peak_memory_bytes": peak})
        return {"steps": found}

    def _step_seconds(self) -> float:
        first = self.machine.first_step if self.steps == 0 else 1.0
        wobble = 1 + 0.01 * ((7 * self.steps + 3 * self.techniques) % 5)
        usual = self.machine.step_seconds(self.techniques)
        return usual * first * wobble * self.machine.slows(self.machine.now)

    def _spend(self, seconds: float, timeout: float) -> None:
        self.machine.now += min(seconds, timeout)
        if seconds > timeout:
            raise WorkerError("no answer in time")


class MadeUpLoad(LoadMeter):
    """Says of every turn that others took the machine's ``load``."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def begin(self) -> None: ...

    def lap(self, name: object) -> None: ...

    def share(self, name: object) -> float:
        return self._machine.load


def measured_on(
    machine: Machine,
    plans: Mapping[str, Plan],
    kinds: Mapping[str, Kind],
    design: Design,
    memory: int = 10_000,
) -> tuple[Measured, list[dict[str, Any]]]:
    """An experiment on a made-up machine: what it found, and its record."""

    def spec(name: str) -> WorkerSpec:
        return WorkerSpec("made up", {"plan": len(plans[name])})

    context = ExperimentContext(
        machine,  # type: ignore[arg-type]  # stands for the pool of workers
        spec,
        memory,
        2,
        clock=machine.clock,
        load=lambda cores: MadeUpLoad(machine),
    )
    record = ExperimentRecord(clock=machine.clock)
    return measure_variants(context, plans, design, kinds=kinds, record=record), record.events
