"""Collectives that are begun now and waited for later, as torch.distributed's ``async_op``.

One thread runs them in the order of the calls, so that all ranks issue them in one order. A loop
that drops a work instead of waiting for it would read a tensor that is still on its way: so the
work is finished as it is dropped, and an error in it is raised by the next call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch
from torch import Tensor


class CollectiveWork:
    """A collective under way."""

    def __init__(self, future: Future[Tensor], seen: set[Future[Tensor]]) -> None:
        self._future, self._seen = future, seen

    def wait(self) -> bool:
        """Until the tensor is ready. Raises what the collective raised."""
        self.result()
        return True

    def is_completed(self) -> bool:
        return self._future.done()

    def result(self) -> Tensor:
        """The tensor, once it is ready."""
        self._seen.add(self._future)
        return self._future.result()

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # at the program's end nothing may be left
            wait([self._future])


class WorkQueue:
    """Runs collectives in one thread, which begins with the first."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._begun: list[Future[Tensor]] = []
        self._seen: set[Future[Tensor]] = set()  # somebody has waited, and had the error

    def put(self, run: Callable[[], Tensor]) -> CollectiveWork:
        """Begin one. An error of an earlier work that nobody waited for is raised first."""
        self._settle([future for future in self._begun if future.done()])
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "collectives", initializer=_same_device())
        future = self._pool.submit(run)
        self._begun.append(future)
        return CollectiveWork(future, self._seen)

    def wait_all(self) -> None:
        """Until all are done; an error that nobody has had is raised."""
        self._settle(list(self._begun))

    def _settle(self, futures: list[Future[Tensor]]) -> None:
        wait(futures)
        self._begun = [future for future in self._begun if future not in futures]
        unseen = [future for future in futures if future not in self._seen]
        self._seen.difference_update(futures)
        for future in unseen:
            future.result()


def _same_device() -> Callable[[], None]:
    """A thread has a current device of its own."""
    if not torch.accelerator.is_available():
        return lambda: None
    index = torch.accelerator.current_device_index()
    return lambda: torch.accelerator.set_device_index(index)
