"""Checks made by workers: requests go out, replies come back, one by one.

Threads, allocators and the variables that a process starts with can't be taken back, so requests
that differ in them go to different workers. Requests that need ranks go to workers of all the job's
ranks. When a worker fails, the request that it failed at is answered with the reason, and the rest
goes on in a fresh one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hasten.core.plan import Plan
from hasten.core.slot import Slot
from hasten.measure.workers import Reply, Worker, WorkerError, WorkerPool, WorkerSpec

PROCESS_WIDE = (Slot.THREADS, Slot.ALLOCATOR)


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
    """Makes checks on a recipe's job.

    Args:
        recipe: a resolved recipe whose data lies ready.
        folder: for logs, and what checks write.
        environ: variables that a plan wants before its process starts.
        timeout: seconds to wait for one reply.
        ranks: of the job.
        job: what workers do, see `WorkerSpec`.
    """

    def __init__(
        self,
        recipe: Path,
        folder: Path,
        environ: Callable[[Plan], Mapping[str, str]],
        timeout: float = 1800.0,
        ranks: int = 1,
        job: str = "quality",
    ) -> None:
        self._folder, self._environ, self._timeout = folder, environ, timeout
        self._ranks, self._job = ranks, job
        self._given = {"recipe": str(recipe), "folder": str(folder)}
        self._pool = WorkerPool(folder)
        self._count = 0  # of workers
        self.broken = False  # a process died or hung: another attempt may find more

    def __call__(self, requests: Sequence[CheckRequest]) -> list[Reply]:
        """The replies, in the order of the requests."""
        groups: dict[tuple[Any, ...], list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(self._kind(request), []).append(index)
        found: list[Reply] = [{} for _ in requests]
        for members in groups.values():
            replies = self._made([requests[i] for i in members])
            for index, reply in zip(members, replies, strict=True):
                found[index] = reply
        return found

    def _kind(self, request: CheckRequest) -> tuple[Any, ...]:
        """What decides whether two requests may share a worker."""
        wide = tuple(str(t) for t in request.start if t.slot in PROCESS_WIDE)
        return (request.alone, *sorted(self._environ(request.start).items()), *wide)

    def _made(self, requests: Sequence[CheckRequest]) -> list[Reply]:
        first = requests[0]
        ranks = 1 if first.alone else self._ranks
        spec = WorkerSpec(self._job, self._given, self._environ(first.start), ranks)
        found: list[Reply] = []
        while len(found) < len(requests):
            self._count += 1
            with self._pool.start(spec, f"checks-{self._count}") as worker:
                found += self._asked(worker, requests[len(found) :])
        return found

    def _asked(self, worker: Worker, requests: Sequence[CheckRequest]) -> list[Reply]:
        """The replies of one worker; where it failed, the last of them says how."""
        found: list[Reply] = []
        try:
            worker.ready(self._timeout)
        except WorkerError as error:
            self.broken = True
            worker.close(kill=True)
            return [{"failed": str(error)} for _ in requests]  # so would the next one
        try:
            for request in requests:
                found.append(worker.request(request.do, self._timeout, **request.arguments()))
        except WorkerError as error:
            self.broken = True
            worker.close(kill=True)
            found.append({"failed": str(error)})
        return found
