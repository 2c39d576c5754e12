"""Two models, a job, a cluster and closed forms that tests of the planner share."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hasten.models.architecture import Architecture, Experts
from hasten.parts.distributed.pipeline.schedules import (
    StageEvent,
    StageSeconds,
    orders,
    simulate,
    stages_per_rank,
)
from hasten.planner.cluster import Cluster
from hasten.planner.layout import PlannedJob
from hasten.planner.numbers import Calibration

PLAIN = Calibration()  # before any fit: tests don't depend on measurements
MODEL = Architecture("seven", 32, 4096, 32, 8, 128, 14336, 128256)
SPARSE = Architecture(
    "sparse", 16, 2048, 16, 16, 128, 8192, 32000, moe=Experts(16, 2, 1024, dense_layers=1)
)
JOB = PlannedJob(4096, 256, tokens=1e9)
TWO = Cluster.preset("dgx_h100", 2)


def idle_seconds(
    schedule: str, stages: int, forward: float, inputs: float, weights: float, virtual: int = 1
) -> float:
    """A rank's idle time in a step with equal stages: the papers' closed forms.

    - GPipe and 1F1B: (P-1)(F+B). Interleaved: 1/v of it (arXiv 2104.04473).
    - ZB1P: (P-1)(F+B-2W) (ZB-H1 of arXiv 2401.10241).

    Seconds are those of a whole rank.
    """
    backward = inputs + weights
    if schedule == "zero_bubble":
        return (stages - 1) * (forward + backward - 2 * weights)
    return (stages - 1) * (forward + backward) / virtual


def most_kept(events: Sequence[StageEvent], rank: int) -> int:
    """The most micro-batches of one stage that a rank keeps at a time."""
    own = (e for e in events if e.rank == rank)
    steps = [(e.kind == "F") - (e.kind in "BW") for e in own]
    return max(itertools.accumulate(steps))


def played(
    schedule: str, ranks: int, micro_batches: int, seconds: StageSeconds
) -> list[StageEvent]:
    """The timetable of the trainer's order with stages of these lengths."""
    order = orders(schedule, ranks, micro_batches)
    return simulate([[(op,) for op in of_rank] for of_rank in order], seconds)


def played_evenly(schedule: str, ranks: int, micro_batches: int) -> list[StageEvent]:
    """The same with a second for each rank's forward pass and half of a backward pass."""
    each = stages_per_rank(schedule)
    even = StageSeconds.even(ranks * each, 1 / each, 1 / each, 1 / each)
    return played(schedule, ranks, micro_batches, even)
