"""What would make a job fit that fits nowhere: more nodes, a larger device, fewer weights to train.

Every way out is tried with the same prediction, so none is promised that wouldn't be found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import numpy as np

from hasten.machine.accelerators import DEVICES
from hasten.models.architecture import Architecture
from hasten.planner.cluster import Cluster
from hasten.planner.layout import Job, Layouts
from hasten.planner.memory import Memory
from hasten.planner.predict import FATAL, Prediction, why

MEMORY = 1  # the bit of ``Prediction.reasons`` that says so
Fits = Callable[[Architecture, Cluster, Job], bool]


class Found(Protocol):
    """All layouts on one cluster with their prediction."""

    @property
    def layouts(self) -> Layouts: ...

    @property
    def found(self) -> Prediction: ...


def nothing_fits(model: Architecture, cluster: Cluster, job: Job, found: Found, fits: Fits) -> str:
    """Why no layout can run, by how much, and what would, in one sentence."""
    here = f"{cluster.devices} x {cluster.device.name}"
    bits = found.found.reasons & FATAL
    lean = np.flatnonzero((bits & ~MEMORY) == 0)
    if not len(lean):
        rarest = why(int(bits[np.argmin([int(b).bit_count() for b in bits])]))
        return f"{model.name} has no layout on {here}: {'; '.join(rarest)}"
    row = int(lean[np.argmin(found.found.memory_p90[lean])])
    needs, has = found.found.memory_p90[row] / 1e9, cluster.device.memory_bytes / 1e9
    part = largest_part(found.found.memory, row)
    ways = ways_out(model, cluster, job, fits)
    advice = f"it would fit {' or '.join(ways)}" if ways else "nothing that was tried would fit it"
    return (
        f"{model.name} doesn't fit on {here}: its leanest layout needs {needs:.1f} GB (P90) of "
        f"{has:.1f}, most of it {part}; {advice}"
    )


def ways_out(model: Architecture, cluster: Cluster, job: Job, fits: Fits) -> list[str]:
    """What would fit: more nodes, the next larger device, a LoRA, shorter sequences."""
    found = []
    for times in (2, 4, 8, 16, 32, 64):
        nodes = cluster.nodes * times
        batch = max(job.global_batch, nodes * cluster.per_node)
        if fits(model, replace(cluster, nodes=nodes), replace(job, global_batch=batch)):
            more = "" if batch == job.global_batch else f" with a global batch of {batch}"
            found.append(f"on {nodes} nodes{more}")
            break
    larger = sorted(
        (d for d in DEVICES.values() if d.memory_bytes > cluster.device.memory_bytes),
        key=lambda d: d.memory_bytes,
    )
    for chip in larger:
        if fits(model, replace(cluster, device=chip), job):
            found.append(f"on as many {chip.name}")
            break
    if job.task != "lora" and fits(model, cluster, replace(job, task="lora")):
        found.append("as a LoRA")
    if job.sequence > 2048 and fits(model, cluster, replace(job, sequence=2048)):
        found.append("with sequences of 2,048 tokens")
    return found


def largest_part(held: Memory, row: int) -> str:
    """The largest part of a layout's memory, with its size."""
    sizes = {name: float(np.atleast_1d(column)[row]) for name, column in vars(held).items()}
    name = max(sizes, key=sizes.__getitem__)
    return f"{name} ({sizes[name] / 1e9:.1f} GB)"
