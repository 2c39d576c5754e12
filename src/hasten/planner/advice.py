"""What would change the answer: a faster network, other devices, another number format.

Everything is predicted with the same model, so that common errors cancel in the ratios; the
interval of each prediction is that of ``predict`` all the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hasten.errors import InputError
from hasten.machine.accelerators import DEVICES, Device
from hasten.planner.candidate import Candidate, candidate
from hasten.planner.cluster import Cluster
from hasten.planner.layout import Layout, Layouts
from hasten.planner.planning import ClusterPlan, plan
from hasten.planner.predict import predict
from hasten.planner.resimulate import resimulated
from hasten.planner.words import changed_cluster

WORTH = 500  # of the quickest layouts, those that another machine may prefer


@dataclass(frozen=True)
class Change:
    """Something changed: the rate against that of the plan's best, with its layout and anew."""

    what: str
    same_layout: float  # times the tokens per second; nan where it no longer fits
    best_layout: float
    layout: Layout | None  # the best then, if it is another one
    note: str = ""


@dataclass(frozen=True)
class Choice:
    """The same job on as many devices of another kind."""

    device: str
    found: Candidate | None
    reason: str = ""  # why there is none
    price_ratio: float = float("nan")  # an hour of it may cost so many times one of the plan's


def sensitivity(found: ClusterPlan) -> list[Change]:
    """What twice or half of each property of the machine would do to the rate."""
    here = found.cluster
    chip = here.device
    twice = {
        "twice the network": replace(here, inter=2 * here.inter),
        "half the network": replace(here, inter=here.inter / 2),
        "twice the link within a node": replace(here, intra=2 * here.intra),
        "half the link within a node": replace(here, intra=here.intra / 2),
        "twice the memory's rate": replace(
            here, device=replace(chip, memory_rate=2 * chip.memory_rate)
        ),
        "twice the products' rate": replace(here, device=_faster(chip, 2.0)),
        "twice the memory": replace(here, device=replace(chip, memory_bytes=2 * chip.memory_bytes)),
    }
    if here.nodes == 1:
        twice = {name: value for name, value in twice.items() if "network" not in name}
    return [_changed(found, name, cluster) for name, cluster in twice.items()]


def switches(found: ClusterPlan) -> list[Change]:
    """What formats and compression that change the mathematics would do to the rate."""
    best, chip = found.best[0].layout, found.cluster.device
    said = "other mathematics: have the guard prove it"
    tried = {"fp8 products": replace(best, precision="fp8")} if chip.peak8 else {}
    if chip.peak4:
        tried["nvfp4 products"] = replace(best, precision="nvfp4")
    if best.dp * best.cp > 1:
        for word in ("int8", "int4", "topk1"):
            tried[f"gradients as {word}"] = replace(best, compression=word)
    changes = []
    for name, layout in tried.items():
        ratio = _ratio(found, found.cluster, [layout])[0]
        changes.append(Change(name, ratio, ratio, None, said))
    return changes


def devices(found: ClusterPlan) -> list[Choice]:
    """The job on as many devices of each kind known, the quickest first."""
    choices = []
    for name, chip in DEVICES.items():
        if name == found.cluster.device.name:
            choices.append(Choice(name, found.best[0], "", 1.0))
            continue
        own = found.cluster.intra == found.cluster.device.link
        there = replace(found.cluster, device=chip, intra=chip.link if own else found.cluster.intra)
        try:
            best = plan(
                *(found.model, there, found.job),
                space=found.space,
                top=1,
                fewer_nodes=False,
                calibration=found.calibration,
                stack=found.stack,
            ).best[0]
        except InputError as error:
            choices.append(Choice(name, None, str(error)))
            continue
        ratio = found.best[0].step_seconds.middle / best.step_seconds.middle
        choices.append(Choice(name, best, "", ratio))
    return sorted(choices, key=lambda c: -c.price_ratio if c.found else 0.0)


def what_if(found: ClusterPlan, change: str) -> tuple[Cluster, ClusterPlan]:
    """The plan anew with one change: ``gpu=a100``, ``nodes=8``, ``network=25``, ``network=2x``.

    Raises:
        InputError: a change that can't be read, or a cluster on which nothing fits.
    """
    there = changed_cluster(found.cluster, change)
    return there, plan(
        *(found.model, there, found.job),
        space=found.space,
        top=1,
        fewer_nodes=False,
        calibration=found.calibration,
        stack=found.stack,
    )


def _faster(chip: Device, times: float) -> Device:
    names = ("peak16", "peak8", "peak4", "peak32", "reached16", "reached8", "reached32")
    rates: dict[str, Any] = {name: times * getattr(chip, name) for name in names}
    return replace(chip, **rates)


def _changed(found: ClusterPlan, name: str, cluster: Cluster) -> Change:
    """The plan's layout on the changed cluster, and the best of those that may be best there."""
    whole, best = found.considered[0], found.best[0].layout
    order = np.argsort(whole.found.step_seconds)[:WORTH]
    fitting = whole.order()[:WORTH]
    rows = [whole.layouts.at(int(row)) for row in {*order.tolist(), *fitting.tolist()}]
    # Closed forms may call another layout quicker than the best here already: not by the change.
    ahead = np.nan_to_num(_ratio(found, found.cluster, [best, *rows]), nan=1.0)
    ratios = (np.array(_ratio(found, cluster, [best, *rows])) / np.maximum(ahead, 1.0)).tolist()
    winner = int(np.nanargmax(ratios)) if not np.all(np.isnan(ratios)) else 0
    another = rows[winner - 1] if winner and ratios[winner] > 1.01 * ratios[0] else None
    return Change(name, ratios[0], ratios[winner] if another else ratios[0], another)


def _ratio(found: ClusterPlan, cluster: Cluster, layouts: list[Layout]) -> list[float]:
    """Rates of the layouts there, over that of the plan's best here; nan where they don't fit."""
    rows = Layouts.of(layouts)
    there = predict(found.model, cluster, found.job, rows, found.calibration, found.stack)
    here = predict(
        *(found.model, found.cluster, found.job, Layouts.of([found.best[0].layout])),
        *(found.calibration, found.stack),
    )
    ratio = here.step_seconds[0] / there.step_seconds
    return [float(r) if fits else float("nan") for r, fits in zip(ratio, there.fits, strict=True)]


def predicted(found: ClusterPlan, layout: Layout) -> Candidate:
    """What a layout of the user's own would do on the plan's cluster."""
    rows = Layouts.of([layout])
    told = predict(found.model, found.cluster, found.job, rows, found.calibration, found.stack)
    one = candidate(told, rows, 0, found.cluster, found.job)
    return resimulated(found.model, one, found.job.task == "lora")
