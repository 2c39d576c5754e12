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

from collections.abc import Callable, Mapping
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
    EnumeratedLayouts,
    Layouts,
    LayoutSpace,
    PlannedJob,
    enumerate_layouts,
)
from hasten.planner.memory import MemoryColumns
from hasten.planner.numbers import Calibration
from hasten.planner.predict import FATAL, Prediction, predict, reason_sentences
from hasten.planner.simulate import resimulated

# What would make a job fit that fits nowhere: more nodes, a larger device, fewer weights to train.
#
# Every way out is tried with the same prediction, so none is promised that wouldn't be found.

MEMORY = 1  # the bit of ``Prediction.reasons`` that says so
Fits = Callable[[Architecture, Cluster, PlannedJob], bool]


def nothing_fits(
    model: Architecture, cluster: Cluster, job: PlannedJob, evaluated: EvaluatedLayouts, fits: Fits
) -> str:
    """Why no layout can run, by how much, and what would, in one sentence."""
    cluster_text = f"{cluster.devices} x {cluster.device.name}"
    bits = evaluated.predictions.reasons & FATAL
    lean = np.flatnonzero((bits & ~MEMORY) == 0)
    if not len(lean):
        rarest = reason_sentences(int(bits[np.argmin([int(b).bit_count() for b in bits])]))
        return f"{model.name} has no layout on {cluster_text}: {'; '.join(rarest)}"
    row = int(lean[np.argmin(evaluated.predictions.memory_p90[lean])])
    needs, has = evaluated.predictions.memory_p90[row] / 1e9, cluster.device.memory_bytes / 1e9
    part = largest_part(evaluated.predictions.memory, row)
    fixes = suggested_fixes(model, cluster, job, fits)
    fit = f"it would fit {' or '.join(fixes)}" if fixes else "nothing that was tried would fit it"
    return (
        f"{model.name} doesn't fit on {cluster_text}: its leanest layout needs {needs:.1f} GB "
        f"(P90) of "
        f"{has:.1f}, most of it {part}; {fit}"
    )


def suggested_fixes(
    model: Architecture, cluster: Cluster, job: PlannedJob, fits: Fits
) -> list[str]:
    """Changes that make the job fit: more nodes, larger device, LoRA, shorter sequences."""
    fixes = []
    for times in (2, 4, 8, 16, 32, 64):
        nodes = cluster.nodes * times
        batch = max(job.global_batch, nodes * cluster.per_node)
        if fits(model, replace(cluster, nodes=nodes), replace(job, global_batch=batch)):
            more = "" if batch == job.global_batch else f" with a global batch of {batch}"
            fixes.append(f"on {nodes} nodes{more}")
            break
    larger = sorted(
        (d for d in DEVICES.values() if d.memory_bytes > cluster.device.memory_bytes),
        key=lambda d: d.memory_bytes,
    )
    for chip in larger:
        if fits(model, replace(cluster, device=chip), job):
            fixes.append(f"on as many {chip.name}")
            break
    if job.task != "lora" and fits(model, cluster, replace(job, task="lora")):
        fixes.append("as a LoRA")
    if job.sequence > 2048 and fits(model, cluster, replace(job, sequence=2048)):
        fixes.append("with sequences of 2,048 tokens")
    return fixes


def largest_part(memory_columns: MemoryColumns, row: int) -> str:
    """The largest part of a layout's memory, with its size."""
    sizes = {
        name: float(np.atleast_1d(column)[row]) for name, column in vars(memory_columns).items()
    }
    name = max(sizes, key=sizes.__getitem__)
    return f"{name} ({sizes[name] / 1e9:.1f} GB)"


# The plan.

CHUNK = 100_000  # layouts predicted at a time
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
        raise InputError(
            nothing_fits(architecture, machines, job, evaluated, _tried(space, calibration))
        )
    best = [
        resimulated(architecture, c, lora) for c in distinct(evaluated, 3 * top, by_schedule=True)
    ]
    best = _each_deal_once(sorted(best, key=lambda c: c.step_seconds.middle))[:top]
    considered = [evaluated]
    for fewer in _fewer(machines) if fewer_nodes else ():
        try:
            considered.append(evaluate_layouts(architecture, fewer, job, space, calibration, stack))
        except InputError:  # the batch suits all nodes and not half of them
            continue
    corners = pareto([c for each in considered for c in _corners(each)])
    front = pareto([*best, *(resimulated(architecture, c, lora) for c in corners)])
    return ClusterPlan(
        *(architecture, machines, job, tuple(considered), tuple(best), tuple(front)),
        *(calibration, stack, space),
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


def distinct(
    evaluated: EvaluatedLayouts, count: int, by_schedule: bool = False
) -> list[PlanCandidate]:
    """The quickest that fit, one for each way to deal out devices (and to schedule)."""
    chosen: dict[tuple[float, ...], int] = {}
    rows = evaluated.layouts
    columns = [rows.dp, rows.tp, rows.pp, rows.ep, rows.cp]
    columns += [rows.schedule, rows.virtual] if by_schedule else []
    for row in evaluated.order():
        chosen.setdefault(tuple(float(c[row]) for c in columns), int(row))
        if len(chosen) == count:
            break
    return [evaluated.candidate(row) for row in chosen.values()]


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


def _corners(evaluated: EvaluatedLayouts, steps: int = 12) -> list[PlanCandidate]:
    """For each of some limits of memory the quickest layout below it."""
    order = evaluated.order()
    if not len(order):
        return []
    memory_bytes = evaluated.predictions.memory_p90[order]
    limits = np.geomspace(
        memory_bytes.min() * 1.0001, max(memory_bytes.max(), memory_bytes.min() * 1.001), steps
    )
    rows = {int(order[np.flatnonzero(memory_bytes <= limit)[0]]) for limit in limits}
    return [evaluated.candidate(row) for row in sorted(rows)]


def _as_good(one: PlanCandidate, other: PlanCandidate) -> bool:
    hours = one.step_seconds.middle * one.devices
    return (
        one.step_seconds.middle <= SAME_TIME * other.step_seconds.middle
        and one.memory_bytes.high <= SAME_MEMORY * other.memory_bytes.high
        and hours <= SAME_TIME * other.step_seconds.middle * other.devices
    )


def _each_deal_once(candidates: list[PlanCandidate]) -> list[PlanCandidate]:
    by_deal: dict[tuple[int, ...], PlanCandidate] = {}
    for one in candidates:
        way = one.layout
        by_deal.setdefault((way.dp, way.tp, way.pp, way.ep, way.cp), one)
    return list(by_deal.values())


def _fewer(cluster: Cluster) -> list[Cluster]:
    """A half, a quarter ... of the nodes, while there are whole ones."""
    clusters: list[Cluster] = []
    nodes = cluster.nodes
    while nodes % 2 == 0 and len(clusters) < 3:
        nodes //= 2
        clusters.append(replace(cluster, nodes=nodes))
    return clusters


def _tried(space: LayoutSpace | None, calibration: Calibration | None) -> Any:
    """A function that tests if a model fits under other conditions, for an error's advice."""

    def fits(model: Architecture, cluster: Cluster, job: PlannedJob) -> bool:
        try:
            evaluated = evaluate_layouts(model, cluster, job, space, calibration)
        except InputError:
            return False
        return bool(np.any(evaluated.predictions.fits))

    return fits
