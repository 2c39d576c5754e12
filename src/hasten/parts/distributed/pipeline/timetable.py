"""Timetable of a pipeline's ranks, measured or simulated: events, bubble, drawing.

An event is one pass of one stage over one micro-batch. It lasts from the arrival of its
inputs to its result. The bubble is the share of the ranks' time in which a rank runs
none, from the first event of a step to the last.
"""

from __future__ import annotations

import itertools
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from html import escape
from typing import Any

import torch
from torch import distributed as dist

from hasten.parts.comm.groups import gathered_objects

Op = tuple[str, int, int]  # kind, stage, micro-batch
Cell = tuple[Op, ...]  # what a rank does at a time: one pass, or two that overlap (DualPipeV)
KINDS = {"F": "forward", "B": "backward", "I": "gradient of inputs", "W": "gradient of weights"}
COLOURS = {"F": "#2a6fb0", "B": "#3a7d44", "I": "#5a9a63", "W": "#b5651d"}


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
    ranks, last = len(order), max(op[1] for cells in order for cell in cells for op in cell)
    ends: dict[Op, float] = {}
    at, clock = [0] * ranks, [0.0] * ranks
    events: list[StageEvent] = []
    moved = True
    while moved:
        moved = False
        for rank, cells in enumerate(order):
            while at[rank] < len(cells):
                cell = cells[at[rank]]
                needed = [ends.get(need) for op in cell for need in _needs(op, last)]
                if None in needed:
                    break
                start = max([clock[rank], *(n for n in needed if n is not None)])
                clock[rank] = start + sum(map(seconds, cell))
                for op in cell:  # the halves of a backward pass end like the whole of one
                    ends[("B" if op[0] == "I" else op[0], op[1], op[2])] = clock[rank]
                    events.append(StageEvent(rank, *op, start, clock[rank]))
                at[rank] += 1
                moved = True
    if any(at[rank] < len(cells) for rank, cells in enumerate(order)):
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
        raise ValueError("there are no events: example a step first")
    ranks = {e.rank for e in events}
    span = max(e.end for e in events) - min(e.start for e in events)
    busy = sum(end - start for _, start, end in {(e.rank, e.start, e.end) for e in events})
    return 1 - busy / (len(ranks) * span)


def drawing(events: Sequence[StageEvent], title: str) -> str:
    """Returns the timetable as SVG: a row per rank, a box per pass, with its number if it fits."""
    if not events:
        raise ValueError("there are no events to draw: example a step first")
    ranks = sorted({e.rank for e in events})
    first, last = min(e.start for e in events), max(e.end for e in events)
    width, margin, row = 960, 64.0, 24.0
    scale = (width - margin - 8) / max(last - first, 1e-9)
    body = [_text(4, 8 + row * index + 14, f"rank {rank}") for index, rank in enumerate(ranks)]
    by_place = sorted(events, key=lambda e: (e.rank, e.start))
    for (rank, start), group in itertools.groupby(by_place, key=lambda e: (e.rank, e.start)):
        together = list(group)  # passes that overlap (DualPipeV) share the row's height
        x, y, tall = margin + (start - first) * scale, 8 + row * ranks.index(rank), row - 4
        for index, event in enumerate(together):
            wide = max((event.end - start) * scale - 0.5, 0.3)
            each = tall / len(together)
            body.append(_box(event, x, y + index * each, wide, each))
    below = 8 + row * len(ranks)
    summary = f"{last - first:.3g} s, {bubble_share(events):.1%} of the ranks' time idle"
    body.append(_text(margin, below + 12, summary))
    for index, kind in enumerate(k for k in KINDS if k in {e.kind for e in events}):
        x = margin + 170 * index
        body.append(_rect(x, below + 22, 12, 12, COLOURS[kind], KINDS[kind]))
        body.append(_text(x + 18, below + 32, KINDS[kind]))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {width} {below + 44:g}">'
        f"<title>{escape(title)}</title><desc>{len(ranks)} ranks, {escape(summary)}.</desc>"
        f"<style>text{{font:11px system-ui,sans-serif;fill:#555}}"
        f".n{{fill:#fff;text-anchor:middle}}</style>{''.join(body)}</svg>\n"
    )


def _box(event: StageEvent, x: float, y: float, wide: float, tall: float) -> str:
    number = str(event.micro_batch)
    title = f"{KINDS[event.kind]} of micro-batch {number}, stage {event.stage}"
    svg = _rect(x, y, wide, tall, COLOURS[event.kind], title)
    if wide > 7 * len(number) and tall > 11:
        svg += f'<text class="n" x="{x + wide / 2:.1f}" y="{y + 14:.1f}">{number}</text>'
    return svg


def _rect(x: float, y: float, wide: float, tall: float, colour: str, title: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{tall:.1f}" fill="{colour}">'
        f"<title>{escape(title)}</title></rect>"
    )


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


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
