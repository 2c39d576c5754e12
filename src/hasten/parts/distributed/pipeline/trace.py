"""What a pipeline did when: events of stages, the bubble they leave, and their drawing.

An event is one pass of one stage over one micro-batch, from when its inputs are there to when its
result is. The bubble is the share of the ranks' time, from the first event of a step to the last,
in which a rank runs none. Where all stages are alike, closed forms say what it should be
(:func:`bubble`); the rest is stages that differ, messages that weren't hidden, and other people's
work on the machine.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from html import escape
from typing import Any

import torch
from torch import distributed as dist

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


class TraceRecorder:
    """Notes what this process does while it is on; off it costs a look at one flag."""

    def __init__(self, device: torch.device) -> None:
        self.events: list[StageEvent] = []
        self.on = False
        self._device = device
        self._zero = 0.0

    def begin(self, group: Any = None) -> None:
        """A step begins now, on every rank of the group at once.

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
            told: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(told, (platform.node(), self._zero), group=group)
            if len({machine for machine, _ in told}) == 1:
                self._zero = told[0][1]
            dist.barrier(group)

    @contextmanager
    def noting(self, rank: int, kind: str, stage: int, micro_batch: int) -> Iterator[None]:
        """The block is one pass."""
        if not self.on:
            yield
            return
        start = self._now() - self._zero
        yield
        end = self._now() - self._zero
        self.events.append(StageEvent(rank, kind, stage, micro_batch, start, end))

    def _now(self) -> float:
        """While a step is recorded, a pass ends when the device has done it."""
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return time.perf_counter()


def gathered(events: Sequence[StageEvent], group: Any = None) -> list[StageEvent]:
    """The events of all ranks of a group, on each of them."""
    if group is None:
        return list(events)
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, [astuple(e) for e in events], group=group)
    return [StageEvent(*values) for of_rank in found for values in of_rank]


def bubble_share(events: Sequence[StageEvent]) -> float:
    """The share of the ranks' time without a pass, from the first event to the last."""
    if not events:
        raise ValueError("there are no events: record a step first")
    ranks = {e.rank for e in events}
    span = max(e.end for e in events) - min(e.start for e in events)
    busy = sum(e.end - e.start for e in events)
    return 1 - busy / (len(ranks) * span)


def without_waiting(events: Sequence[StageEvent]) -> float:
    """The bubble that passes of these lengths leave in these orders if messages take no time.

    Of a measured step the rest is messages, and a machine that let ranks wait for its processors
    between two passes; what lies between this and the closed form is passes of unequal lengths.

    Raises:
        ValueError: there are no events, or a pass is missing that another needs.
    """
    by_rank: dict[int, list[StageEvent]] = {}
    for event in sorted(events, key=lambda e: e.start):
        by_rank.setdefault(event.rank, []).append(event)
    if not by_rank:
        raise ValueError("there are no events: record a step first")
    last = max(e.stage for e in events)
    ended: dict[tuple[str, int, int], float] = {}
    clock, at = dict.fromkeys(by_rank, 0.0), dict.fromkeys(by_rank, 0)
    moved = True
    while moved:
        moved = False
        for rank, own in by_rank.items():
            while at[rank] < len(own) and all(n in ended for n in _needed(own[at[rank]], last)):
                event = own[at[rank]]
                start = max([clock[rank], *(ended[n] for n in _needed(event, last))])
                clock[rank] = start + event.end - event.start
                kind = "B" if event.kind == "I" else event.kind
                ended[kind, event.stage, event.micro_batch] = clock[rank]
                at[rank], moved = at[rank] + 1, True
    if any(at[rank] < len(own) for rank, own in by_rank.items()):
        raise ValueError("a pass is missing that another needs: record all ranks of a whole step")
    busy = sum(e.end - e.start for e in events)
    return 1 - busy / (len(by_rank) * max(clock.values()))


def _needed(event: StageEvent, last: int) -> list[tuple[str, int, int]]:
    """What has to be done before a pass; a backward pass in halves goes on after the first."""
    stage, number = event.stage, event.micro_batch
    if event.kind == "F":
        return [("F", stage - 1, number)] if stage else []
    if event.kind == "W":
        return [("B", stage, number)]
    return [("F", stage, number), *([("B", stage + 1, number)] if stage < last else [])]


def bubble(
    schedule: str, ranks: int, micro_batches: int, forward: float, inputs: float, weights: float
) -> float:
    """The closed form of the bubble's share, for stages that are alike and messages of no length.

    With F, I and W seconds of a whole rank for a micro-batch: GPipe and 1F1B idle for
    (P-1)(F+I+W), interleaved with two stages a rank for half of it (arXiv 2104.04473), ZB1P for
    (P-1)(F+I-W) (arXiv 2401.10241, with as many micro-batches as ranks at least).
    """
    whole = forward + inputs + weights
    idle = {
        "gpipe": whole,
        "1f1b": whole,
        "interleaved": whole / 2,
        "zero_bubble": max(forward + inputs - weights, 0.0),
    }
    if schedule not in idle:
        raise ValueError(f"no closed form is known of {schedule!r}: take {', '.join(idle)}")
    lost = (ranks - 1) * idle[schedule]
    return lost / (lost + micro_batches * whole)


def drawing(events: Sequence[StageEvent], title: str, width: int = 960) -> str:
    """The timetable as one SVG: a row per rank, a box per pass, its number inside if it fits."""
    if not events:
        raise ValueError("there are no events to draw: record a step first")
    ranks = sorted({e.rank for e in events})
    first, last = min(e.start for e in events), max(e.end for e in events)
    left, row = 64.0, 24.0
    scale = (width - left - 8) / max(last - first, 1e-9)
    body = [_text(4, 8 + row * place + 14, f"rank {rank}") for place, rank in enumerate(ranks)]
    for event in events:
        x, y = left + (event.start - first) * scale, 8 + row * ranks.index(event.rank)
        body.append(_box(event, x, y, max((event.end - event.start) * scale - 0.5, 0.3), row - 4))
    below = 8 + row * len(ranks)
    said = f"{last - first:.3g} s, {bubble_share(events):.1%} of the ranks' time idle"
    body.append(_text(left, below + 12, said))
    for place, kind in enumerate(k for k in KINDS if k in {e.kind for e in events}):
        x = left + 170 * place
        body.append(_rect(x, below + 22, 12, 12, COLOURS[kind], KINDS[kind]))
        body.append(_text(x + 18, below + 32, KINDS[kind]))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {width} {below + 44:g}">'
        f"<title>{escape(title)}</title><style>text{{font:11px system-ui,sans-serif;fill:#555}}"
        f".n{{fill:#fff;text-anchor:middle}}</style>{''.join(body)}</svg>\n"
    )


def _box(event: StageEvent, x: float, y: float, wide: float, tall: float) -> str:
    number = str(event.micro_batch)
    said = f"{KINDS[event.kind]} of micro-batch {number}, stage {event.stage}"
    found = _rect(x, y, wide, tall, COLOURS[event.kind], said)
    if wide > 7 * len(number):
        found += f'<text class="n" x="{x + wide / 2:.1f}" y="{y + 14:.1f}">{number}</text>'
    return found


def _rect(x: float, y: float, wide: float, tall: float, colour: str, said: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{tall:.1f}" fill="{colour}">'
        f"<title>{escape(said)}</title></rect>"
    )


def _text(x: float, y: float, words: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}">{escape(words)}</text>'


def timed(
    recorder: TraceRecorder, run: Callable[..., Any], rank: int, kind: str, stage: int
) -> Any:
    """``run(micro_batch, ...)`` with each call noted."""

    def noted(micro_batch: int, *args: Any, **kwargs: Any) -> Any:
        with recorder.noting(rank, kind, stage, micro_batch):
            return run(micro_batch, *args, **kwargs)

    return noted
