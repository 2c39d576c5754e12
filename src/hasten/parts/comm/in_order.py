"""One thread that finishes DDP's buckets in the order in which they were full.

Two threads that issue collectives on the same process groups would mix up messages.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Job = tuple[Callable[[], Tensor], "torch.futures.Future[Tensor]", torch.device]


class InOrder:
    """One thread that does jobs in the order in which they came.

    It ends with the object that owns it, and keeps nothing of a job that is done: a process group
    that lives longer than the process's own would hold the process up at its end.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        threading.Thread(target=_work, args=(self._jobs,), daemon=True).start()
        weakref.finalize(self, self._jobs.put, None)

    def __call__(self, job: Callable[[], Tensor], device: torch.device) -> Any:
        """A future of the job's tensor, or of its error, in the form that DDP waits for."""
        devices = [] if device.type == "cpu" else [device]
        done: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
        # A bare exception would reach DDP as a result of a strange type; raised, it is an error.
        answer = done.then(lambda future: future.value())
        self._jobs.put((job, done, device))
        return answer


def _work(jobs: queue.SimpleQueue[Job | None]) -> None:
    while (entry := jobs.get()) is not None:
        job, done, device = entry
        try:
            if device.type != "cpu":  # a thread begins with device 0, another rank's
                torch.accelerator.set_device_index(device)
            done.set_result(job())
        except Exception as error:  # DDP raises it where it waits
            done.set_exception(error)
        del entry, job, done, device
