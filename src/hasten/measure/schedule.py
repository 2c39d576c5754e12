"""How workers take turns within a round: in slices, so that all of them see the same machine.

A machine's speed changes within a second: others work on it, and its clock rate follows heat and
load. Workers that take whole turns one after the other see different machines. Where workers can be
stopped within a request, a round is therefore cut into slices: each worker runs for a quarter of a
second, then the next one goes on with its own steps. A slower worker has longer slices, so that all
come to the end of the round together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Generic, Protocol, TypeVar

from hasten.measure.workers import WorkerError

SLICE_SECONDS = 0.25  # of the fastest worker
Name = TypeVar("Name")
Result = TypeVar("Result", covariant=True)


class Sliced(Protocol, Generic[Result]):
    """Whoever does a turn in slices, stopped between them."""

    @property
    def pace(self) -> float:
        """Seconds that a step took lately."""

    def order(self, count: int) -> None:
        """Have so many steps ahead. Raises WorkerError."""

    def go_on(self, seconds: float) -> Result | None:
        """Work at them for so long at most; the result once all are done. Raises WorkerError."""


def run_in_slices(
    workers: Mapping[Name, Sliced[Result]],
    count: int,
    slice_seconds: float = SLICE_SECONDS,
    after: Callable[[Name], None] = lambda name: None,
) -> tuple[dict[Name, Result], dict[Name, WorkerError]]:
    """All do so many steps at the same time, in slices.

    Args:
        workers: in the order in which they begin.
        count: steps of each.
        slice_seconds: of the fastest.
        after: is told whose slice has just ended.

    Returns:
        The result of each that came to its end, and the failure of each that didn't.
    """
    share = slice_seconds / min((worker.pace for worker in workers.values()), default=1.0)
    left, begun = dict(workers), set[Name]()
    found: dict[Name, Result] = {}
    failed: dict[Name, WorkerError] = {}
    while left:
        for name, worker in tuple(left.items()):
            try:
                if name not in begun:
                    begun.add(name)
                    worker.order(count)
                result = worker.go_on(share * worker.pace)
            except WorkerError as error:
                failed[name] = error
                del left[name]
                continue
            finally:
                after(name)
            if result is not None:
                found[name] = result
                del left[name]
        left = dict(reversed(left.items()))
    return found, failed
