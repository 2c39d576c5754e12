"""Calibrates the model to a machine of the user's own, from a few runs of twenty steps each.

Four factors are fitted, with priors, to measured seconds per step: of products, of memory, of what
doesn't shrink with the work, and of the links. One run fixes the first; runs with another
batch, layout or link rate tell them apart. Where there are four runs or more, the interval is that
of what the fit left unexplained, and never narrower than a twentieth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from hasten.errors import InputError
from hasten.models.architecture import Architecture
from hasten.planner.cluster import Cluster
from hasten.planner.constants import Calibration, Constants, calibrated, prior
from hasten.planner.fitting import fit
from hasten.planner.layout import Column, Job, Layout, Layouts
from hasten.planner.numbers import machine, numbers
from hasten.planner.predict import steps

NARROWEST, FEW = 0.05, 0.15  # half an interval's logarithm: at best, and after fewer than four runs
OWN_STACK = "own runs"
COMPUTES = (
    *("gemm16", "gemm16_new", "gemm16_newest", "gemm8", "gemm8_blocks", "gemm4"),
    *("attention", "attention_new", "attention_newest", "attention_unfused"),
)
MOVES = ("small", "elementwise", "cast", "unfused_bytes", "loss_bytes", "optimizer_bytes")
STANDS = ("layer_seconds", "expert_seconds", "stage_seconds", "step_seconds")
LINKS = ("intra", "inter")


@dataclass(frozen=True)
class OwnRun:
    """One short run: what ran, on what, and the median seconds of its steps."""

    architecture: Architecture
    cluster: Cluster
    job: Job
    layout: Layout
    step_seconds: float


@dataclass(frozen=True)
class MachineFactors:
    """How a machine differs from the calibration that it starts from, as factors."""

    compute: float = prior(1.0, 1.0)  # of the rates of products
    memory: float = prior(1.0, 0.5)  # of memory's rate, beside the products
    # Of seconds beside the work; the calibration's are those of whole clusters, so fewer here.
    standing: float = prior(0.3, 1.0)
    links: float = prior(0.9, 0.7)  # share of the links' rates that a collective reaches

    def applied(self, c: Constants) -> Constants:
        """The constants on that machine."""
        changed = {name: getattr(c, name) * self.compute for name in COMPUTES}
        changed |= {name: getattr(c, name) / self.memory for name in MOVES}
        changed |= {name: getattr(c, name) * self.standing for name in STANDS}
        changed |= dict.fromkeys(LINKS, self.links)
        return replace(c, **changed)


def calibrate_machine(
    runs: Sequence[OwnRun], calibration: Calibration | None = None, *, link_measured: bool = False
) -> Calibration:
    """The calibration of the machine that these runs ran on; predict with ``stack=OWN_STACK``.

    ``link_measured``: the cluster's links are what a collective was seen to reach, not what
    they are called.

    Raises:
        InputError: no runs, or one whose seconds aren't above 0.
    """
    if not runs:
        raise InputError("no run to calibrate from: run twenty steps of the job first")
    for place, run in enumerate(runs, start=1):
        if not 0 < run.step_seconds < float("inf"):
            raise InputError(f"run {place} took {run.step_seconds} s a step; give seconds above 0")
    start = calibration or calibrated()

    def seconds(factors: MachineFactors) -> Column:
        return np.log(_seconds(runs, factors.applied(start.constants)))

    target = np.log([run.step_seconds for run in runs])
    even, no_stacks = np.ones(len(runs)), np.zeros((len(runs), 0))
    free = [f.name for f in fields(MachineFactors) if not (link_measured and f.name == "links")]
    first = MachineFactors(links=1.0) if link_measured else MachineFactors()
    factors, _ = fit(first, seconds, target, even, NARROWEST, no_stacks, free)
    left = target - seconds(factors)
    wide = max(NARROWEST, 1.2816 * float(np.std(left, ddof=1))) if len(runs) > 3 else FEW
    found: dict[str, Any] = {f.name: getattr(factors, f.name) for f in fields(factors)}
    provenance = {**start.provenance, "own_runs": len(runs), "own_factors": found}
    own = (min(-wide, float(np.min(left))), max(wide, float(np.max(left))))
    spread = {**start.spread, "dense": own, "moe": own}
    stacks = {**start.stacks, OWN_STACK: 1.0}
    return Calibration(factors.applied(start.constants), start.memory, stacks, spread, provenance)


def _seconds(runs: Sequence[OwnRun], c: Constants) -> Column:
    return np.array([float(_one(run, c)[0]) for run in runs])


def _one(run: OwnRun, c: Constants) -> Column:
    return steps(
        numbers(run.architecture, run.job.sequence),
        machine(run.cluster),
        Layouts.of([run.layout]),
        float(run.job.global_batch),
        c,
        run.job.task == "lora",
    ).total
