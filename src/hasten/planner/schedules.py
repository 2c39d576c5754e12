"""Pipeline schedules as explicit orders, and a simulator that makes a timetable of an order.

A schedule says in which order each rank works: F forward, B the whole backward pass of a
micro-batch through a stage, I its half that makes the gradient of the input (the only half that
the stage before waits for), W the half that makes the gradient of the weights. The simulator knows
nothing of schedules: it starts each piece of work as soon as its rank is free and what it needs is
there. So stages may differ in length, which closed forms don't allow (``idle_seconds``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from hasten.errors import InputError
from hasten.parts.distributed.pipeline.schedules import orders as trained
from hasten.parts.distributed.pipeline.timetable import StageEvent

Op = tuple[str, int, int]  # kind, stage, micro-batch
Cell = tuple[Op, ...]  # what a rank does at a time: one piece, or two that overlap (DualPipe)
Orders = list[list[Cell]]  # by rank
SIMULATED = ("gpipe", "1f1b", "interleaved", "zb1p", "dualpipe")


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


@dataclass(frozen=True)
class PipelineEvent:
    """A cell in time."""

    rank: int
    cell: Cell
    start: float
    end: float


@dataclass(frozen=True)
class Timetable:
    """When each rank does what; ``peaks`` counts micro-batches of one stage that a rank keeps."""

    events: tuple[PipelineEvent, ...]
    ranks: int
    seconds: float
    busy: tuple[float, ...]
    peaks: tuple[int, ...]

    def passes(self) -> list[StageEvent]:
        """One event for each piece of work, to be drawn."""
        return [StageEvent(e.rank, *op, e.start, e.end) for e in self.events for op in e.cell]

    @property
    def idle_share(self) -> float:
        """Share of the ranks' time in which they wait: the bubble, uneven stages included."""
        return 1 - sum(self.busy) / (self.ranks * self.seconds)


def orders(schedule: str, stages: int, micro_batches: int, virtual: int = 1) -> Orders:
    """The order of work on each of ``stages`` ranks.

    Raises:
        InputError: a schedule that has no such order, and for which numbers it has one.
    """
    problem = why_impossible(schedule, stages, micro_batches, virtual)
    if problem:
        raise InputError(problem)
    if schedule == "interleaved":
        return _interleaved(stages, micro_batches, virtual)
    if schedule == "zb1p":
        return _zb1p(stages, micro_batches)
    if schedule == "dualpipe":
        return [_dualpipe(rank, stages, micro_batches) for rank in range(stages)]
    return [[(op,) for op in of_rank] for of_rank in trained(schedule, stages, micro_batches)]


def why_impossible(schedule: str, stages: int, micro_batches: int, virtual: int = 1) -> str:
    """Why there is no such schedule, in one sentence; empty where there is one."""
    P, M = stages, micro_batches
    if schedule not in SIMULATED:
        return f"no order is known of the schedule {schedule!r}: take one of {', '.join(SIMULATED)}"
    if P < 1 or M < 1 or virtual < 1:
        return f"a pipeline of {P} stages and {M} micro-batches: give 1 of each at least"
    if schedule == "interleaved" and M % P:
        return f"interleaved stages need micro-batches in multiples of {P} (stages), not {M}"
    if schedule != "interleaved" and virtual > 1:
        return f"{virtual} virtual stages need the schedule 'interleaved', not {schedule!r}"
    if schedule == "dualpipe" and (P % 2 or M % 2 or M < 2 * P):
        return (
            f"DualPipe needs an even number of stages and an even number of micro-batches, twice "
            f"as many as stages at least; there are {P} stages and {M} micro-batches"
        )
    return ""


def simulate(order: Orders, seconds: Callable[[Op], float], overlap: float = 1.0) -> Timetable:
    """The timetable of an order of passes that take ``seconds``, all of the stages' first to last.

    A cell of two takes ``overlap`` times the sum of both.

    Raises:
        ValueError: ranks wait for each other for ever, so the order is none.
    """
    ranks, last = len(order), max(op[1] for cells in order for cell in cells for op in cell)
    ends: dict[Op, float] = {}
    at, clock, busy = [0] * ranks, [0.0] * ranks, [0.0] * ranks
    kept, peaks = [0] * ranks, [0] * ranks
    events: list[PipelineEvent] = []
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
                spent = sum(map(seconds, cell)) * (overlap if len(cell) > 1 else 1.0)
                clock[rank] = start + spent
                busy[rank] += spent
                for op in cell:  # the halves of a backward pass end like the whole of one
                    ends[("B" if op[0] == "I" else op[0], op[1], op[2])] = clock[rank]
                    kept[rank] += (op[0] == "F") - (op[0] in "BW")
                    peaks[rank] = max(peaks[rank], kept[rank])
                events.append(PipelineEvent(rank, cell, start, clock[rank]))
                at[rank] += 1
                moved = True
    if any(at[rank] < len(cells) for rank, cells in enumerate(order)):
        raise ValueError("in this order ranks wait for each other for ever")
    return Timetable(tuple(events), ranks, max(clock), tuple(busy), tuple(peaks))


def _needs(op: Op, last: int) -> list[Op]:
    kind, stage, micro = op
    if kind == "F":
        return [("F", stage - 1, micro)] if stage else []
    if kind == "W":
        return [("B", stage, micro)]
    after: list[Op] = [("B", stage + 1, micro)] if stage < last else []
    return [("F", stage, micro), *after]


def idle_seconds(
    schedule: str, stages: int, forward: float, inputs: float, weights: float, virtual: int = 1
) -> float:
    """A rank's idle time in a step where all stages are alike: the papers' closed forms.

    GPipe and 1F1B (P-1)(F+B), a v-th of it interleaved (arXiv 2104.04473); ZB1P (P-1)(F+B-2W)
    (ZB-H1 of arXiv 2401.10241); DualPipe (P/2-1)(F&B+B-3W) (arXiv 2412.19437, table 2), here with
    F&B = F+B: nothing is gained by doing both at a time. Seconds are those of a whole rank.
    """
    whole = inputs + weights
    if schedule == "dualpipe":
        return max(stages / 2 - 1, 0) * (forward + 2 * whole - 3 * weights)
    if schedule == "zb1p":
        return (stages - 1) * (forward + whole - 2 * weights)
    return (stages - 1) * (forward + whole) / virtual


def _one(kind: str, stage: int, micro: int) -> Cell:
    return ((kind, stage, micro),)


def _interleaved(P: int, M: int, v: int) -> Orders:
    """Megatron's order: rank r has stages r, r+P, ...; micro-batches travel in groups of P."""
    ahead_of = [(c, g + i) for g in range(0, M, P) for c in range(v) for i in range(P)]
    back = [(v - 1 - c, m) for c, m in ahead_of]
    found = []
    for r in range(P):
        total = M * v
        ahead = min(total, (P - r - 1) * 2 + (v - 1) * P)
        forward = [_one("F", c * P + r, m) for c, m in ahead_of]
        backward = [_one("B", c * P + r, m) for c, m in back]
        cells = forward[:ahead]
        for k in range(total - ahead):
            cells += [forward[ahead + k], backward[k]]
        found.append(cells + backward[total - ahead :])
    return found


def _zb1p(P: int, M: int) -> Orders:
    """1F1B whose rank r puts off the weights' gradients by r micro-batches.

    So all ranks keep P micro-batches, and each has weights' work left to fill the end with.
    """
    found = []
    for r in range(P):
        ahead = min(P - 1 - r, M)
        cells = [_one("F", r, m) for m in range(ahead)]
        done = 0
        for m in range(M):
            if ahead + m < M:
                cells.append(_one("F", r, ahead + m))
            cells.append(_one("I", r, m))
            if m >= r:
                cells.append(_one("W", r, done))
                done += 1
        found.append(cells + [_one("W", r, m) for m in range(done, M)])
    return found


def _dualpipe(rank: int, P: int, M: int) -> list[Cell]:  # noqa: C901  # the schedule's eight phases
    """The eight phases of DeepSeek's DualPipe (github.com/deepseek-ai/DualPipe, dualpipe.py).

    Half of the micro-batches enter at each end; rank r has stages r and P-1-r. Phase 0 is the
    direction in which the rank's own half of the pipeline is nearer to the entrance.
    """
    half, mirrored = P // 2, rank >= P // 2
    near = min(rank, P - 1 - rank)
    counts = {"F": [0, 0], "B": [0, 0]}
    waiting: deque[Cell] = deque()
    cells: list[Cell] = []

    def next_op(kind: str, phase: int) -> Op:
        way = phase ^ int(mirrored)
        number = counts[kind][way]
        counts[kind][way] += 1
        return kind, (P - 1 - rank if way else rank), number + (M // 2 if way else 0)

    def forward(phase: int) -> None:
        cells.append((next_op("F", phase),))

    def backward(phase: int, apart: bool = False) -> None:
        kind, stage, micro = next_op("B", phase)
        cells.append((("I" if apart else kind, stage, micro),))
        if apart:
            waiting.append(_one("W", stage, micro))

    def both(ahead: int, back: int) -> None:
        cells.append((next_op("F", ahead), next_op("B", back)))

    for _ in range((half - near - 1) * 2):  # 1: F0
        forward(0)
    for _ in range(near + 1):  # 2: F0 F1
        forward(0)
        forward(1)
    for _ in range(half - near - 1):  # 3: I1 W1 F1
        backward(1, apart=True)
        cells.append(waiting.popleft())
        forward(1)
    for turn in range(M // 2 - P + near + 1):  # 4, most of the time: F0&B1 F1&B0
        if turn == 0 and near == half - 1:
            forward(0)
            backward(1)
        else:
            both(0, 1)
        both(1, 0)
    for _ in range(half - near - 1):  # 5: B1 F1&B0
        backward(1)
        both(1, 0)
    for turn in range(near + 1):  # 6: B1 B0, the second half of them without weights
        late = turn > (near + 1) // 2 or (turn == (near + 1) // 2 and near % 2 == 1)
        backward(1, apart=late)
        backward(0, apart=late or turn == (near + 1) // 2)
    for _ in range(half - near - 1):  # 7: W I0
        cells.append(waiting.popleft())
        backward(0, apart=True)
    cells.extend(waiting)  # 8: W
    return cells
