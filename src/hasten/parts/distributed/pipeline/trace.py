"""Times the passes of a pipeline: a step's events of all ranks."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from typing import Any

import torch
from torch import distributed as dist

from hasten.parts.comm.groups import gathered_objects
from hasten.parts.distributed.pipeline.timetable import StageEvent


class TraceRecorder:
    """Records this process's passes while it is on; when off, it only checks a flag."""

    def __init__(self, device: torch.device) -> None:
        self.events: list[StageEvent] = []
        self.on = False
        self._device = device
        self._zero = 0.0

    def begin(self, group: Any = None) -> None:
        """Starts a step on every rank of the group at the same time.

        Ranks of one machine read the same clock. Over machines each counts from its own end of a
        barrier, so that their events may be shifted against each other by a message's way.
        """
        if not self.on:
            return
        self.events.clear()
        if group is not None:
            dist.barrier(group)
        self._zero = self._now()
        if group is not None:
            clocks = gathered_objects((platform.node(), self._zero), group)
            if len({machine for machine, _ in clocks}) == 1:
                self._zero = clocks[0][1]
            dist.barrier(group)

    @contextmanager
    def noting(self, rank: int, kind: str, stage: int, micro_batch: int) -> Iterator[None]:
        """Records the block as one pass."""
        if not self.on:
            yield
            return
        start = self._now() - self._zero
        yield
        end = self._now() - self._zero
        self.events.append(StageEvent(rank, kind, stage, micro_batch, start, end))

    def _now(self) -> float:
        """Returns the time; while a step is recorded, it first waits for the device."""
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return time.perf_counter()


def gather_events(events: Sequence[StageEvent], group: Any = None) -> list[StageEvent]:
    """Returns the events of all ranks of a group, on each of them."""
    if group is None:
        return list(events)
    gathered = gathered_objects([astuple(e) for e in events], group)
    return [StageEvent(*values) for of_rank in gathered for values in of_rank]


def timed_calls(
    recorder: TraceRecorder, run: Callable[..., Any], rank: int, kind: str, stage: int
) -> Any:
    """Wraps ``run(micro_batch, ...)`` so that each call is recorded."""

    def noted(micro_batch: int, *args: Any, **kwargs: Any) -> Any:
        with recorder.noting(rank, kind, stage, micro_batch):
            return run(micro_batch, *args, **kwargs)

    return noted
