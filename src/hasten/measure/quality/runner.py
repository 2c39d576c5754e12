"""Runs checks in workers: requests go out, replies come back, one by one.

Threads, allocators and the variables that a process starts with can't be undone.
Requests that differ in them therefore go to different workers. Requests that need ranks
go to workers of all the job's ranks. When a worker fails, its current request is
answered with the reason. The remaining requests continue in a new worker.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hasten.core.plan import Plan
from hasten.core.slot import Slot
from hasten.formatting import duration
from hasten.measure.workers import Reply, Worker, WorkerError, WorkerPool, WorkerSpec

PROCESS_WIDE = (Slot.ALLOCATOR,)


@dataclass(frozen=True)
class CheckRequest:
    """One check to be made of a plan.

    Args:
        do: which.
        plan: of what.
        start: the plan that its worker is started for.
        details: more arguments.
        alone: a worker of one rank makes it, however many ranks the job has.
    """

    do: str
    plan: Plan
    start: Plan
    details: Mapping[str, Any] = field(default_factory=dict)
    alone: bool = False

    def arguments(self) -> dict[str, Any]:
        return {"plan": self.plan.to_list(), **self.details}


Perform = Callable[[Sequence[CheckRequest]], list[Reply]]


class QualityRunner:
    """Runs checks on a recipe's job.

    Args:
        recipe: a resolved recipe with prepared data.
        folder: folder for logs and output of checks.
        environ: variables that a plan requires before its process starts.
        timeout: seconds to wait for one reply.
        ranks: ranks of the job.
        job: the workers' job, see `WorkerSpec`.
        budget_seconds: time from now on; checks that aren't complete by then fail for lack
            of time.
    """

    def __init__(
        self,
        recipe: Path,
        folder: Path,
        environ: Callable[[Plan], Mapping[str, str]],
        timeout: float = 1800.0,
        ranks: int = 1,
        job: str = "quality",
        budget_seconds: float = math.inf,
    ) -> None:
        self._folder, self._environ, self._timeout = folder, environ, timeout
        self._budget, self._end = budget_seconds, time.monotonic() + budget_seconds
        self._ranks, self._job = ranks, job
        self._arguments = {"recipe": str(recipe), "folder": str(folder)}
        self._pool = WorkerPool(folder)
        self._count = 0  # of workers
        self.broken = False  # a process died or hung: another attempt may find more

    def __call__(self, requests: Sequence[CheckRequest]) -> list[Reply]:
        """The replies, in the order of the requests."""
        groups: dict[tuple[Any, ...], list[int]] = {}
        for index, request in enumerate(requests):  # those that agree in this share a worker
            wide = tuple(str(t) for t in request.start if t.slot in PROCESS_WIDE)
            kind = (request.alone, *sorted(self._environ(request.start).items()), *wide)
            groups.setdefault(kind, []).append(index)
        ordered_replies: list[Reply] = [{} for _ in requests]
        for members in groups.values():
            replies = self._made([requests[i] for i in members])
            for index, reply in zip(members, replies, strict=True):
                ordered_replies[index] = reply
        return ordered_replies

    @property
    def seconds_left(self) -> float:
        """Seconds of the budget that are left."""
        return self._end - time.monotonic()

    def _made(self, requests: Sequence[CheckRequest]) -> list[Reply]:
        first = requests[0]
        ranks = 1 if first.alone else self._ranks
        spec = WorkerSpec(self._job, self._arguments, self._environ(first.start), ranks)
        replies: list[Reply] = []
        while len(replies) < len(requests):
            if self.seconds_left <= 0:
                self.broken = True
                return replies + [self._no_time()] * (len(requests) - len(replies))
            self._count += 1
            with self._pool.start(spec, f"checks-{self._count}") as worker:
                replies += self._replies_of(worker, requests[len(replies) :])
        return replies

    def _replies_of(self, worker: Worker, requests: Sequence[CheckRequest]) -> list[Reply]:
        replies: list[Reply] = []
        try:
            worker.ready(self._patience())
        except WorkerError as error:
            return [self._failed(worker, error) for _ in requests]  # so would the next one
        try:
            for request in requests:
                replies.append(worker.request(request.do, self._patience(), **request.arguments()))
        except WorkerError as error:
            replies.append(self._failed(worker, error))
        return replies

    def _patience(self) -> float:
        return min(self._timeout, max(self.seconds_left, 0.0))

    def _failed(self, worker: Worker, error: WorkerError) -> Reply:
        self.broken = True
        worker.close(kill=True)
        return {"failed": str(error)} if self.seconds_left > 0 else self._no_time()

    def _no_time(self) -> Reply:
        return {"failed": f"no time: the budget of {duration(self._budget)} is used up"}
