"""Timetable of a pipeline's ranks, measured or simulated: events and bubble.

An event is one pass of one stage over one micro-batch. It lasts from the arrival of its
inputs to its result. The bubble is the share of the ranks' time in which a rank runs
none, from the first event of a step to the last.
"""

from __future__ import annotations

import platform
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist

from hasten.parts.comm.groups import gathered_objects
from hasten.parts.distributed.pipeline.schedules import Op

Cell = tuple[Op, ...]  # what a rank does at a time: one pass, or two that overlap (DualPipeV)


@dataclass(frozen=True)
class StageEvent:
    """A pass (F, B, I or W) of a stage over a micro-batch, in seconds since the step began."""

    rank: int
    kind: str
    stage: int
    micro_batch: int
    start: float
    end: float


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of one micro-batch in each stage: forward, gradient of inputs, of weights."""

    forward: tuple[float, ...]
    inputs: tuple[float, ...]
    weights: tuple[float, ...]

    @classmethod
    def even(cls, stages: int, forward: float, inputs: float, weights: float) -> StageSeconds:
        return cls((forward,) * stages, (inputs,) * stages, (weights,) * stages)

    def __call__(self, op: Op) -> float:
        kind, stage, _ = op
        if kind == "F":
            return self.forward[stage]
        backward = 0.0 if kind == "W" else self.inputs[stage]
        return backward + (0.0 if kind == "I" else self.weights[stage])


def simulate(order: Sequence[Sequence[Cell]], seconds: Callable[[Op], float]) -> list[StageEvent]:
    """The timetable of an order of passes that take ``seconds``, all of the stages' first to last.

    A cell of two takes the sum of both; its passes have the same start and end.

    Raises:
        ValueError: ranks wait for each other for ever, so the order is none.
    """
    last = max(stage for cells in order for cell in cells for _, stage, _ in cell)
    ends: dict[Op, float] = {}
    waiting, clock = [deque(cells) for cells in order], [0.0] * len(order)
    events: list[StageEvent] = []
    while any(waiting):
        before = len(events)
        for rank, cells in enumerate(waiting):
            while cells and all(need in ends for op in cells[0] for need in _needs(op, last)):
                cell = cells.popleft()
                start = max([clock[rank], *(ends[n] for op in cell for n in _needs(op, last))])
                clock[rank] = start + sum(map(seconds, cell))
                for kind, stage, micro in cell:
                    # The halves of a backward pass end like the whole of one.
                    ends["B" if kind == "I" else kind, stage, micro] = clock[rank]
                    events.append(StageEvent(rank, kind, stage, micro, start, clock[rank]))
        if len(events) == before:
            raise ValueError("in this order ranks wait for each other for ever")
    return events


def _needs(op: Op, last: int) -> list[Op]:
    kind, stage, micro = op
    if kind == "F":
        return [("F", stage - 1, micro)] if stage else []
    if kind == "W":
        return [("B", stage, micro)]
    after: list[Op] = [("B", stage + 1, micro)] if stage < last else []
    return [("F", stage, micro), *after]


def bubble_share(events: Sequence[StageEvent]) -> float:
    """Returns the share of the ranks' time without a pass, from the first event to the last.

    Passes that overlap (DualPipeV) have the same start and end, and count once.
    """
    if not events:
        raise ValueError("there are no events: record a step first")
    ranks = {e.rank for e in events}
    span = max(e.end for e in events) - min(e.start for e in events)
    busy = sum(end - start for _, start, end in {(e.rank, e.start, e.end) for e in events})
    return 1 - busy / (len(ranks) * span)


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
        start = self._now() if self.on else 0.0
        yield
        if self.on:
            times = start - self._zero, self._now() - self._zero
            self.events.append(StageEvent(rank, kind, stage, micro_batch, *times))

    def _now(self) -> float:
        """Returns the time; while a step is recorded, it first waits for the device."""
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return time.perf_counter()
