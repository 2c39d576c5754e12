"""One arm's process in a cohort: it is asked for work, and its answers go into the record.

A process may take twenty times as long for a turn as its warm-up's steps took, and a minute at
least, before it counts as hanging. Of a start nothing is known beforehand; there a long timeout
holds. With a budget nobody waits beyond its end.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from hasten.machine.processes import foreign_share, look
from hasten.measure.ablation import Design
from hasten.measure.record import ExperimentRecord
from hasten.measure.workers import BUILD_SECONDS, Worker, WorkerError

TIMEOUT_FACTOR = 20.0  # a busy machine makes single steps several times slower
LEAST_TIMEOUT = 60.0  # seconds
STATIONARY = 1.25  # of the last two steps the slower takes at most so much longer


class ArmProcess:
    """The process of an arm.

    Args:
        name: of the arm.
        worker: just started.
        cohort: number of the cohort.
        record: where everything goes.
        design: of the experiment.
        left: seconds until nobody waits any longer.
    """

    def __init__(
        self,
        name: str,
        worker: Worker,
        cohort: int,
        record: ExperimentRecord,
        design: Design,
        left: Callable[[], float],
    ) -> None:
        self.name, self.worker, self.cohort = name, worker, cohort
        self._record, self._design, self._left = record, design, left
        self._began = time.monotonic()
        self.warm: list[dict[str, Any]] = []  # steps so far, before the first round
        self._graphs: list[int] = []  # compiled, after each of the last orders
        self.start_seconds = 0.0
        self.evaluation_seconds = 0.0
        self._count, self._worked = 0, 0.0  # steps ahead, seconds worked at them

    def begin(self, evaluate_first: bool = True) -> None:
        """Wait until it is built; its held-out loss before training; its warm-up."""
        answer = self.worker.ready(self._within(BUILD_SECONDS))
        seconds = time.monotonic() - self._began
        self._note("start", startup_seconds=answer["startup_seconds"], seconds=seconds)
        if evaluate_first:
            self.evaluate()
        self.warm_up(self._design.warmup, self._design.longest_warmup)
        self.start_seconds = time.monotonic() - self._began

    def warm_up(self, least: int, most: int = 0) -> None:
        """Go on to ``least`` steps, and up to ``most`` while it isn't stationary."""
        began, before = time.monotonic(), len(self.warm)
        seconds = 0.0
        while len(self.warm) < least or (len(self.warm) < most and not self.stationary):
            count = max(least - len(self.warm), 1)
            answer = self._ask("steps", BUILD_SECONDS, count=count)
            self.warm += answer["steps"]
            compiled = answer.get("compiled") or {"graphs": 0, "seconds": 0.0}
            self._graphs.append(compiled["graphs"])
            seconds += compiled["seconds"]
        new = self.warm[before:]
        if new:
            took = time.monotonic() - began
            self._note("warmup", steps=new, seconds=took, compile_seconds=seconds)

    @property
    def stationary(self) -> bool:
        """Whether the last two steps took alike, and nothing was compiled during the last order."""
        return stationary(self.warm) and (len(self._graphs) < 2 or not self._compiles())

    @property
    def step_seconds(self) -> float:
        """Of a step of the warm-up: the median of its latter half."""
        seconds = [step["step_seconds"] for step in self.warm]
        return statistics.median(seconds[len(seconds) // 2 :]) if seconds else 0.0

    @property
    def peak(self) -> int | None:
        """The most memory it has used."""
        return max((step["peak_memory_bytes"] for step in self.warm), default=None)

    @property
    def pace(self) -> float:
        """Seconds of a step, for its slices."""
        return self.step_seconds or 1.0

    def order(self, count: int) -> None:
        """Have so many steps ahead (`go_on`)."""
        self._count, self._worked = count, 0.0
        self.worker.submit("steps", count=count)

    def go_on(self, seconds: float) -> dict[str, Any] | None:
        """Work at them for so long at most; the reply once all are done."""
        began, timeout = time.monotonic(), self._timeout(self._count)
        reply = self.worker.run_for(self._within(seconds))
        self._worked += time.monotonic() - began
        if reply is None and self._worked > timeout:
            raise WorkerError(f"no answer within {timeout:.0f} s: it hangs")
        return reply

    def turn(self, number: int, count: int, cores: int, joules: Callable[[], float | None]) -> None:
        """Its steps of a round, alone; `cores` of the machine, a counter of the energy used."""
        joules()  # a gap since the last turn, in which others started, ends here
        before, energy = look(), joules()
        reply = self._ask("steps", self._timeout(count), count=count)
        after, load = joules(), foreign_share(before, look(), cores)
        used = None if energy is None or after is None else after - energy
        self.note_turn(number, reply, load, used)

    def note_turn(
        self, number: int, reply: dict[str, Any], load: float, joules: float | None = None
    ) -> None:
        """The steps of a round; ``load``: the share of the machine that others took meanwhile."""
        whole = {"seconds": reply["turn_seconds"]} if "turn_seconds" in reply else {}
        steps, share = reply["steps"], round(load, 4)
        self._note("turn", round=number, steps=steps, background_load=share, joules=joules, **whole)

    def _timeout(self, count: int) -> float:
        """How long so many steps may take before the worker counts as hanging."""
        slowest = max((step["step_seconds"] for step in self.warm), default=0.0)
        timeout = TIMEOUT_FACTOR * (count * self.step_seconds + slowest)
        return max(timeout, LEAST_TIMEOUT)

    def evaluate(self) -> None:
        """Its held-out loss as it is now."""
        began = time.monotonic()
        timeout = BUILD_SECONDS
        if self.evaluation_seconds:
            timeout = max(TIMEOUT_FACTOR * self.evaluation_seconds, LEAST_TIMEOUT)
        found = self._ask("evaluate", timeout)
        self.evaluation_seconds = max(self.evaluation_seconds, time.monotonic() - began)
        self._note("evaluate", tokens=found["tokens"], held_out_loss=found["held_out_loss"])

    def finish(self) -> None:
        """What its techniques did, and what its model writes; it trains no more."""
        last = self._ask("finish", BUILD_SECONDS)
        known = {key: last.get(key) for key in ("acted", "samples", "ledger")}
        self._note("finish", **known)

    def _ask(self, what: str, timeout: float, **details: Any) -> dict[str, Any]:
        return self.worker.request(what, self._within(timeout), **details)

    def _within(self, seconds: float) -> float:
        """So many seconds, or those that are left, if they are fewer.

        Raises:
            WorkerError: none are left.
        """
        left = self._left()
        if left <= 0:
            raise WorkerError("the budget is used up")
        return min(seconds, left)

    def _compiles(self) -> bool:
        return self._graphs[-1] != self._graphs[-2]

    def _note(self, event: str, **details: Any) -> None:
        self._record.append(event, cohort=self.cohort, arm=self.name, **details)


def stationary(steps: Sequence[dict[str, Any]]) -> bool:
    """Whether the last two steps took alike for each slot; the first step never counts.

    By slot, since padded batches differ in size. The first step pays for memory, kernels and the
    optimizer's state.
    """
    last = [step["step_seconds"] / max(step["slots"], 1) for step in steps[1:]][-2:]
    return len(last) == 2 and max(last) <= STATIONARY * min(last)
