"""Pipeline schedules: the stages of each rank, their order of passes, and its timetable.

The orders of interleaved, zero-bubble, ZBV and DualPipeV are those of
``torch.distributed.pipelining``. GPipe's and 1F1B's are written here. torch has them
only as code that runs them and not as a list that could be run. The 1F1B list of 2.13
is for drawing, and leaves out the first forward pass of the last rank.

| schedule    | stages of a rank        | source                                               |
|-------------|-------------------------|------------------------------------------------------|
| gpipe       | one                     | Huang et al., arXiv 1811.06965                       |
| 1f1b        | one                     | Narayanan et al., PipeDream-Flush, arXiv 2006.09503  |
| interleaved | r, r+P, ...             | Narayanan et al., arXiv 2104.04473                   |
| zero_bubble | one                     | Qi et al., ZB1P, arXiv 2401.10241                    |
| zbv         | r and 2P-1-r (a V)      | Qi et al., arXiv 2405.15362                          |
| dualpipev   | r and 2P-1-r (a V)      | DeepSeek-V3, arXiv 2412.19437, cut in half           |

An event of a timetable, measured or simulated, is one pass of one stage over one micro-batch. It
lasts from the arrival of its inputs to its result. The bubble is the share of the ranks' time in
which a rank runs none, from the first event of a step to the last.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble", "zbv", "dualpipev")
VIRTUAL = {"interleaved": 2, "zbv": 2, "dualpipev": 2}  # number of stages of a rank, if not one
SPLIT = ("zero_bubble", "zbv", "dualpipev")  # schedules with a backward pass in two halves, I and W
TORCH_NAMES = {
    "interleaved": "Interleaved1F1B",
    "zero_bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
LETTERS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
Op = tuple[str, int, int]  # (F forward, B backward, I or W its halves; stage; micro-batch)
Orders = tuple[tuple[Op, ...], ...]  # by rank
Cell = tuple[Op, ...]  # what a rank does at a time: one pass, or two that overlap (DualPipeV)


def stages_per_rank(schedule: str) -> int:
    """Returns the number of stages on each rank; ValueError for an unknown schedule."""
    if schedule not in SCHEDULES:
        raise ValueError(f"there is no schedule {schedule!r}: take one of {', '.join(SCHEDULES)}")
    return VIRTUAL.get(schedule, 1)


def rank_of_stage(schedule: str, ranks: int) -> tuple[int, ...]:
    """Returns the rank of each stage: in a circle, or down and up again if the schedule is a V."""
    total = ranks * stages_per_rank(schedule)
    if schedule in ("zbv", "dualpipev"):
        return tuple(min(stage, total - 1 - stage) for stage in range(total))
    return tuple(stage % ranks for stage in range(total))


def why_impossible(schedule: str, ranks: int, micro_batches: int) -> str:
    """Returns why a schedule can't run so many micro-batches, in one sentence; empty if it can."""
    if micro_batches < 1:
        return "a pipeline needs 1 micro-batch at least"
    rounds = max(1, micro_batches // ranks)
    if schedule in ("interleaved", "zero_bubble") and micro_batches % rounds:
        return (
            f"{schedule} on {ranks} ranks runs so many micro-batches in {rounds} equal rounds, "
            f"which {micro_batches} can't be dealt into; take a multiple of {rounds}"
        )
    if schedule == "dualpipev" and micro_batches < 2 * ranks:
        return (
            f"dualpipev on {ranks} ranks has {2 * ranks} stages and needs as many micro-batches at "
            f"least, not {micro_batches}"
        )
    return ""


def enough_micro_batches(schedule: str, ranks: int, micro_batches: int) -> int:
    """Returns the smallest number of micro-batches from this one on that the schedule can run."""
    count = max(1, micro_batches)
    while why_impossible(schedule, ranks, count):
        count += 1
    return count


@lru_cache(maxsize=64)
def orders(schedule: str, ranks: int, micro_batches: int) -> Orders:
    """Returns each rank's passes in order; ValueError if the schedule can't run so many."""
    if problem := why_impossible(schedule, ranks, micro_batches):
        raise ValueError(problem)
    if schedule == "gpipe":
        return tuple(
            tuple((kind, r, m) for kind in "FB" for m in range(micro_batches)) for r in range(ranks)
        )
    if schedule == "1f1b":
        return tuple(_one_forward_one_backward(r, ranks, micro_batches) for r in range(ranks))
    listed = actions(schedule, ranks, micro_batches)
    return tuple(tuple(op for a in listed[r] if a for op in ops(a)) for r in range(ranks))


def _one_forward_one_backward(rank: int, ranks: int, micro_batches: int) -> tuple[Op, ...]:
    """Runs forward passes until the first gradient can arrive, then one of each in turn."""
    ahead = min(ranks - 1 - rank, micro_batches)
    operations: list[Op] = [("F", rank, m) for m in range(ahead)]
    for m in range(micro_batches):
        if ahead + m < micro_batches:
            operations.append(("F", rank, ahead + m))
        operations.append(("B", rank, m))
    return tuple(operations)


def actions(schedule: str, ranks: int, micro_batches: int) -> dict[int, list[Any]]:
    """Returns the orders for torch's runtime; overlapping passes of DualPipeV stay together."""
    from torch.distributed.pipelining import schedules

    if schedule not in TORCH_NAMES:
        listed = orders(schedule, ranks, micro_batches)
        parsed = schedules._Action.from_str
        return {r: [parsed(f"{s}{kind}{m}") for kind, s, m in listed[r]] for r in range(ranks)}
    homes = rank_of_stage(schedule, ranks)
    # In place of a rank's stages; torch reads no more of them to list an order.
    names = {"group_rank": 0, "group_size": ranks, "num_stages": len(homes), "submod": None}
    stages: Any = [
        SimpleNamespace(**names, stage_index=stage, stage_index_to_group_rank=None)
        for stage, home in enumerate(homes)
        if home == 0
    ]
    kind: Any = schedules.get_schedule_class(TORCH_NAMES[schedule])
    order: dict[int, list[Any]] = kind(stages, micro_batches, None).pipeline_order
    return order


def ops(action: Any) -> tuple[Op, ...]:
    """Returns the passes of torch's action: two of an overlapped pair, none of a message."""
    if action.sub_actions is not None:
        return tuple(op for sub in action.sub_actions for op in ops(sub))
    kind = LETTERS.get(action.computation_type.name)
    return ((kind, action.stage_index, action.microbatch_index),) if kind else ()


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
