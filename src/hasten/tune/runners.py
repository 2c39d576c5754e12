"""Runners: processes in which points are measured, of a recipe's plan or a loop of anybody's."""

from __future__ import annotations

import contextlib
import math
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hasten.core.plan import Plan
from hasten.launch.ranks import places
from hasten.machine import host
from hasten.measure.loops import LoopFailedError, LoopProcess
from hasten.measure.nursery import Nursery
from hasten.measure.trial import Trial, TrialFailedError
from hasten.measure.turns import RunnerFailedError, Step


class PlanRunner:
    """A recipe under one plan, as `hasten.measure.trial_process` trains it.

    Args:
        recipe: a resolved recipe whose data is ready and which has steps enough.
        plan: the techniques.
        environ: variables that the process needs.
        log: where its own words go.
        ranks: of the job, each a process; they meet in a new folder beside the log.
        nursery: forks the process of a job of one rank.
        stoppable: whether nothing works for it that goes on while its process is stopped, as an
            accelerator or a link does.
    """

    def __init__(
        self,
        recipe: Path,
        plan: Plan,
        environ: Mapping[str, str],
        log: Path,
        ranks: int = 1,
        nursery: Nursery | None = None,
        stoppable: bool = False,
    ) -> None:
        alone = stoppable and ranks == 1 and hasattr(signal, "SIGSTOP")
        self.parts = self if alone else None
        self.pace, self._worked = 1.0, 0.0
        self._meeting = tempfile.TemporaryDirectory(dir=log.parent, prefix=".ranks-")
        own = places(ranks, host.usable_cores(), Path(self._meeting.name))
        self._trial = Trial(recipe, plan, environ, log, ranks=own, nursery=nursery)
        self._again = False

    def begin(self, patience: float) -> None:
        with _told():
            self._trial.answer(patience)

    def again(self) -> None:
        self._again = True

    def steps(self, count: int, patience: float) -> list[Step]:
        with _told():
            answer = self._trial.ask("steps", patience=patience, **self._wanted(count))
        steps = [_step(entry) for entry in answer["steps"]]
        whole = answer.get("turn_seconds")
        if whole is not None:
            # Ranks that train apart meet in some steps alone: what counts is the turn as a whole.
            steps = [replace(step, seconds=whole / len(steps)) for step in steps]
        self.pace = math.fsum(step.seconds for step in steps) / len(steps)
        return steps

    def order(self, count: int) -> None:
        self._worked = 0.0
        with _told():
            self._trial.give("steps", **self._wanted(count))

    def go_on(self, seconds: float) -> list[Step] | None:
        began = time.perf_counter()
        with _told():
            answer = self._trial.go_on(seconds)
        self._worked += time.perf_counter() - began
        if answer is None:
            return None
        steps = [_step(entry) for entry in answer["steps"]]
        self.pace = self._worked / len(steps)
        # By the process's own clock they have lasted as long as it was stopped, too.
        one = self._worked / (math.fsum(step.items for step in steps) or 1.0)
        return [replace(step, seconds=one * step.items) for step in steps]

    def _wanted(self, count: int) -> dict[str, Any]:
        more = {"again": True} if self._again else {}
        self._again = False
        return {"count": count, **more}

    def end(self, at_once: bool = False) -> None:
        self._trial.end(at_once)
        self._meeting.cleanup()


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """What a trial says of its failure, as that of the runner."""
    try:
        yield
    except TrialFailedError as error:
        raise RunnerFailedError(str(error)) from error


def _step(entry: Mapping[str, Any]) -> Step:
    loss = entry.get("loss")
    sound = loss is None or math.isfinite(loss)
    return Step(entry["tokens"], entry["step_seconds"], entry.get("peak_memory_bytes"), sound)


class LoopRunner:
    """A training loop of anybody's under one setting of its factory's arguments.

    Args:
        target: ``module:function`` or ``script.py:function``.
        settings: the arguments.
    """

    parts = None  # it may wait for what goes on while it is stopped

    def __init__(self, target: str, settings: Mapping[str, Any]) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # closed in `end`
        self._loop = LoopProcess(target.rpartition(":")[2], target, self._log, 600.0, settings)
        self._loop.__enter__()
        self._ended = False

    def begin(self, patience: float) -> None:
        self._loop.patience = patience
        try:
            self._loop.begin(warmup=0)
        except LoopFailedError as error:
            raise RunnerFailedError(str(error)) from error

    def again(self) -> None:
        """A loop brings its own data, and goes on."""

    def steps(self, count: int, patience: float) -> list[Step]:
        self._loop.patience = patience
        try:
            found = self._loop.steps(count)
        except LoopFailedError as error:
            raise RunnerFailedError(str(error)) from error
        return [Step(items, seconds) for items, seconds, _ in found]

    def end(self, at_once: bool = False) -> None:
        if not self._ended:
            self._ended = True
            kind = RunnerFailedError if at_once else None
            self._loop.__exit__(kind, None, None)
            self._log.close()
