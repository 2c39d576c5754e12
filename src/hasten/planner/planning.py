"""The plan: a job's possible layouts on a cluster, their costs, and the best of them.

  1. Every layout within the rules (``layout``), on all nodes and on fewer.
  2. All predicted at once (``predict``).
  3. The best few, with their pipelines simulated (``simulate``).
  4. The layouts that fit and that no other beats in time, memory and device hours
     together.

The answers are for users before they rent machines. The class ``ClusterPlan`` has the
best layouts with their intervals. For all others it has enough data to explain why they
aren't among the best (``advice``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from hasten.errors import InputError
from hasten.launch.cluster import CloudConfig
from hasten.machine.accelerators import DEVICES
from hasten.models.architecture import Architecture
from hasten.planner.candidate import PlanCandidate, candidate
from hasten.planner.cluster import Cluster
from hasten.planner.layout import (
    Deal,
    EnumeratedLayouts,
    Layouts,
    LayoutSpace,
    PlannedJob,
    PlannedLayout,
    enumerate_layouts,
)
from hasten.planner.numbers import Calibration
from hasten.planner.predict import Prediction, predict
from hasten.planner.simulate import resimulated

CHUNK = 100_000  # layouts predicted at a time
LIMITS = 12  # of memory, below each of which the quickest layout is looked for
MOST_HALVES = 3  # a half, a quarter and an eighth of the nodes are tried, while they are whole
SAME_TIME, SAME_MEMORY = 1.02, 1.10  # differences below are none to choose by
DEAR = 2.0  # times the cheapest's device hours: nobody's choice
Model = Architecture | Mapping[str, Any] | str | Path
T = TypeVar("T")


@dataclass(frozen=True)
class EvaluatedLayouts:
    """All layouts on one cluster, with what was predicted of them."""

    cluster: Cluster
    job: PlannedJob
    enumeration: EnumeratedLayouts
    predictions: Prediction

    @property
    def layouts(self) -> Layouts:
        return self.enumeration.layouts

    def candidate(self, row: int) -> PlanCandidate:
        return candidate(self.predictions, self.layouts, row, self.cluster, self.job)

    def order(self) -> NDArray[np.int64]:
        """Rows that fit, the quickest first; of equally quick ones the leanest."""
        rows = np.flatnonzero(self.predictions.fits)
        seconds = np.round(np.log(self.predictions.step_seconds[rows]), 3)
        return np.asarray(rows[np.lexsort((self.predictions.memory_p90[rows], seconds))])

    def quickest(self, count: int) -> list[PlanCandidate]:
        """The quickest that fit, one for each way to deal out devices and to schedule."""
        chosen: dict[tuple[float, ...], int] = {}
        rows = self.layouts
        columns = [rows.dp, rows.tp, rows.pp, rows.ep, rows.cp, rows.schedule, rows.virtual]
        for row in self.order():
            chosen.setdefault(tuple(float(c[row]) for c in columns), int(row))
            if len(chosen) == count:
                break
        return [self.candidate(row) for row in chosen.values()]

    def corners(self) -> list[PlanCandidate]:
        """For each of some limits of memory the quickest layout below it."""
        order = self.order()
        if not len(order):
            return []
        needed = self.predictions.memory_p90[order]
        most = max(needed.max(), needed.min() * 1.001)
        limits = np.geomspace(needed.min() * 1.0001, most, LIMITS)
        rows = {int(order[np.flatnonzero(needed <= limit)[0]]) for limit in limits}
        return [self.candidate(row) for row in sorted(rows)]


@dataclass(frozen=True)
class ClusterPlan:
    """The planner's result; ``best`` by time on all nodes, ``pareto`` also on fewer."""

    model: Architecture
    cluster: Cluster
    job: PlannedJob
    considered: tuple[EvaluatedLayouts, ...]  # all nodes first
    best: tuple[PlanCandidate, ...]
    pareto: tuple[PlanCandidate, ...]
    calibration: Calibration | None
    stack: str | None
    space: LayoutSpace | None = None

    @property
    def layouts(self) -> int:
        """How many layouts were predicted."""
        return sum(len(each.layouts) for each in self.considered)

    def predict(
        self,
        layouts: Sequence[PlannedLayout],
        cluster: Cluster | None = None,
        model: Architecture | None = None,
    ) -> Prediction:
        """Any layouts of the job, also on another cluster or of another model."""
        return predict(
            *(model or self.model, cluster or self.cluster, self.job, Layouts.of(layouts)),
            *(self.calibration, self.stack),
        )

    def closed_form(
        self, layout: PlannedLayout, model: Architecture | None = None
    ) -> PlanCandidate:
        """One layout as the closed forms predict it, also of another model."""
        rows = Layouts.of([layout])
        return candidate(self.predict([layout], model=model), rows, 0, self.cluster, self.job)

    def simulated(self, one: PlanCandidate) -> PlanCandidate:
        """The candidate with its pipeline simulated."""
        return resimulated(self.model, one, self.job.task == "lora")

    def best_on(self, cluster: Cluster) -> ClusterPlan:
        """The plan of the same job on another cluster, with a single best layout.

        Raises:
            InputError: nothing fits there.
        """
        return plan(
            *(self.model, cluster, self.job),
            space=self.space,
            top=1,
            fewer_nodes=False,
            calibration=self.calibration,
            stack=self.stack,
        )


def plan(
    model: Model,
    cluster: Cluster | CloudConfig,
    job: PlannedJob,
    *,
    device: str = "",
    space: LayoutSpace | None = None,
    top: int = 5,
    fewer_nodes: bool = True,
    calibration: Calibration | None = None,
    stack: str | None = None,
) -> ClusterPlan:
    """The best layouts of a job on a cluster.

    Args:
        model: an architecture, a config's fields or file, or a preset's name.
        cluster: a ``Cluster``, or a ``CloudConfig`` with devices that ``device`` names.
        job: tokens per sequence, sequences per step, total tokens.
        space: choices that may vary; formats and compression that change the mathematics
            only if named.
        top: number of layouts in ``best``, each with another division of the devices.
        fewer_nodes: also evaluate halves of the cluster, which are slower and cheaper.
        calibration: fitted constants; default: those of the package.
        stack: the software stack with the measurements to use (``Calibration.stacks``).

    Raises:
        InputError: unknown names, or no layout that fits; the message names changes that
            help.
    """
    architecture = model if isinstance(model, Architecture) else Architecture.from_config(model)
    machines = Cluster.of(cluster, device) if isinstance(cluster, CloudConfig) else cluster
    if top < 1:
        raise InputError(f"top is {top}: ask for 1 layout at least")
    lora = job.task == "lora"
    evaluated = evaluate_layouts(architecture, machines, job, space, calibration, stack)
    if not np.any(evaluated.predictions.fits):
        raise InputError(nothing_fits(architecture, evaluated, space, calibration))
    played = [resimulated(architecture, one, lora) for one in evaluated.quickest(3 * top)]
    by_deal: dict[Deal, PlanCandidate] = {}
    for one in sorted(played, key=lambda c: c.step_seconds.middle):
        by_deal.setdefault(one.layout.deal, one)
    best = list(by_deal.values())[:top]
    considered, nodes = [evaluated], machines.nodes
    while fewer_nodes and nodes % 2 == 0 and nodes > machines.nodes / 2**MOST_HALVES:
        nodes //= 2
        fewer = replace(machines, nodes=nodes)
        with contextlib.suppress(InputError):  # the batch suits all nodes and not half of them
            considered.append(evaluate_layouts(architecture, fewer, job, space, calibration, stack))
    corners = pareto([c for each in considered for c in each.corners()])
    front = pareto([*best, *(resimulated(architecture, c, lora) for c in corners)])
    return ClusterPlan(
        *(architecture, machines, job, tuple(considered), tuple(best), tuple(front)),
        *(calibration, stack, space),
    )


def nothing_fits(
    model: Architecture,
    evaluated: EvaluatedLayouts,
    space: LayoutSpace | None,
    calibration: Calibration | None,
) -> str:
    """By how much no layout fits, and what would, in one sentence.

    Every way out is tried with the same prediction: more nodes, a larger device, LoRA, shorter
    sequences.
    """
    cluster, job = evaluated.cluster, evaluated.job

    def fits(cluster: Cluster = cluster, **changes: Any) -> bool:
        try:
            tried = evaluate_layouts(model, cluster, replace(job, **changes), space, calibration)
        except InputError:
            return False
        return bool(np.any(tried.predictions.fits))

    fixes = []
    for times in (2, 4, 8, 16, 32, 64):
        nodes = cluster.nodes * times
        batch = max(job.global_batch, nodes * cluster.per_node)
        if fits(replace(cluster, nodes=nodes), global_batch=batch):
            more = "" if batch == job.global_batch else f" with a global batch of {batch}"
            fixes.append(f"on {nodes} nodes{more}")
            break
    for chip in sorted(DEVICES.values(), key=lambda d: d.memory_bytes):
        larger = chip.memory_bytes > cluster.device.memory_bytes
        if larger and fits(replace(cluster, device=chip)):
            fixes.append(f"on as many {chip.name}")
            break
    if job.task != "lora" and fits(task="lora"):
        fixes.append("as a LoRA")
    if job.sequence > 2048 and fits(sequence=2048):
        fixes.append("with sequences of 2,048 tokens")
    fit = f"it would fit {' or '.join(fixes)}" if fixes else "nothing that was tried would fit it"
    leanest = evaluated.candidate(int(np.argmin(evaluated.predictions.memory_p90)))
    part = max(leanest.memory_parts, key=leanest.memory_parts.__getitem__)
    return (
        f"{model.name} doesn't fit on {cluster.devices} x {cluster.device.name}: its leanest "
        f"layout needs {leanest.memory_bytes.high / 1e9:.1f} GB (P90) of "
        f"{cluster.device.memory_bytes / 1e9:.1f}, most of it {part} "
        f"({leanest.memory_parts[part] / 1e9:.1f} GB); {fit}"
    )


def evaluate_layouts(
    model: Architecture,
    cluster: Cluster,
    job: PlannedJob,
    space: LayoutSpace | None = None,
    calibration: Calibration | None = None,
    stack: str | None = None,
) -> EvaluatedLayouts:
    """All layouts on that cluster, predicted.

    Raises:
        InputError: the rules allow none.
    """
    all_of_them = enumerate_layouts(model, cluster, job, space)
    rows = all_of_them.layouts
    if not len(rows):
        raise InputError(
            f"no layout of {cluster.devices} devices suits a global batch of {job.global_batch} "
            f"sequences: give a multiple of {cluster.devices}, or of a large share of it"
        )
    parts = [
        predict(model, cluster, job, rows.take(chunk), calibration, stack)
        for chunk in np.array_split(np.arange(len(rows)), -(-len(rows) // CHUNK))
    ]
    return EvaluatedLayouts(cluster, job, all_of_them, joined(parts))


def pareto(candidates: list[PlanCandidate]) -> list[PlanCandidate]:
    """Candidates that no other beats in time, memory and device hours.

    Small differences are ignored. A candidate with more than twice the device hours of the
    cheapest is left out, even if it needs little memory.
    """
    front: list[PlanCandidate] = []
    least = min((c.step_seconds.middle * c.devices for c in candidates), default=0.0)
    candidates = [c for c in candidates if c.step_seconds.middle * c.devices <= DEAR * least]
    for one in sorted(candidates, key=lambda c: (c.step_seconds.middle, c.memory_bytes.high)):
        if not any(_as_good(other, one) for other in front):
            front.append(one)
    return front


def joined(parts: list[T]) -> T:
    """Predictions of several chunks as one."""
    first: Any = parts[0]
    if not is_dataclass(first):
        columns: Any = parts
        return np.concatenate(columns)  # type: ignore[return-value]
    names = [f.name for f in fields(first)]
    merged: dict[str, Any] = {n: joined([getattr(p, n) for p in parts]) for n in names}
    kind: Any = type(first)
    made: T = kind(**merged)
    return made


def _as_good(one: PlanCandidate, other: PlanCandidate) -> bool:
    hours = one.step_seconds.middle * one.devices
    return (
        one.step_seconds.middle <= SAME_TIME * other.step_seconds.middle
        and one.memory_bytes.high <= SAME_MEMORY * other.memory_bytes.high
        and hours <= SAME_TIME * other.step_seconds.middle * other.devices
    )
