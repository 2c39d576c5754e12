"""Fits constants to measurements, and compares runs with predictions.

The method is Levenberg-Marquardt on theta = ln(constant). The residuals are ln(measured
/ predicted) over their noise, and (theta - prior) over its spread (maximum a
posteriori). After each step the rows are weighted again by Cauchy's function. An
outlier therefore has less influence the larger its error is. Every software stack has
one more unknown, regularised towards zero. No random number is drawn and the order of
rows is fixed: the same rows give the same bits.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from hasten.errors import InputError
from hasten.foreign_files import json_lines
from hasten.formatting import measure, number, numbers_of
from hasten.models.architecture import Architecture
from hasten.planner.cluster import Cluster
from hasten.planner.layout import Column, Layouts, PlannedJob, PlannedLayout
from hasten.planner.numbers import (
    OWN_STACK,
    Calibration,
    Constants,
    calibrated,
    machine,
    numbers,
    prior,
)
from hasten.planner.predict import PlanCandidate, steps

STACK_SPREAD = 0.15  # prior deviation of a software stack's factor, as a logarithm
ODD = 2.5  # error / noise at which a row has half its weight
STEPS = 25
NUDGE = 1e-4  # change of a logarithm, for derivatives by forward differences
C = TypeVar("C", bound=Any)


def fit(
    start: C,
    predicted: Callable[[C], Column],
    target: Column,
    weight: Column,
    noise: float,
    one_hot: Column,
    free: Sequence[str] | None = None,
    at_once: bool = False,
) -> tuple[C, Column]:
    """Fits the constants ``free`` (default: all), and one addend per column of ``one_hot``.

    ``at_once``: ``predicted`` receives columns of constants, and returns a row for each.
    """
    chosen = [f for f in fields(start) if free is None or f.name in free]
    prior = np.log([getattr(start, f.name) for f in chosen])
    spread = np.array([f.metadata["spread"] for f in chosen])
    extra = one_hot.shape[1]
    middle = np.concatenate([prior, np.zeros(extra)])
    scale = np.concatenate([spread, np.full(extra, STACK_SPREAD)])
    theta, damping = middle.copy(), 1e-2

    def constants(at: Column) -> C:
        factors = np.exp(at[: len(chosen)])
        values = [v[:, None] if at.ndim > 1 else float(v) for v in factors]
        return replace(start, **{f.name: v for f, v in zip(chosen, values, strict=True)})

    def residuals(at: Column) -> Column:
        """Returns the residuals of one point, or a row for each column of points."""
        return np.asarray(target - predicted(constants(at)) - (one_hot @ at[len(chosen) :]).T)

    def cost(at: Column, errors: Column) -> float:
        odd = np.log1p((errors / (ODD * noise)) ** 2) * ODD**2
        return float(weight @ odd + np.sum(((at - middle) / scale) ** 2))

    errors = residuals(theta)
    best = cost(theta, errors)
    for _ in range(STEPS):
        if at_once:
            slopes = (residuals(_moved(theta, len(chosen))) - errors).T / NUDGE
        else:
            moved = _moved(theta, len(chosen)).T
            slopes = np.column_stack([residuals(at) - errors for at in moved]) / NUDGE
        jacobian = np.column_stack([slopes, -one_hot])
        trust = weight / (1 + (errors / (ODD * noise)) ** 2) / noise**2
        curvature = jacobian.T @ (trust[:, None] * jacobian) + np.diag(1 / scale**2)
        slope = jacobian.T @ (trust * errors) + (theta - middle) / scale**2
        for _ in range(8):
            damped = curvature + damping * np.diag(np.diag(curvature))
            step = np.clip(np.linalg.solve(damped, -slope), -0.7, 0.7)
            tried = residuals(theta + step)
            new_cost = cost(theta + step, tried)
            if new_cost < best:
                break
            damping *= 4
        else:
            break
        gained, best = best - new_cost, new_cost
        theta, errors, damping = theta + step, tried, max(damping / 4, 1e-6)
        if gained < 1e-4 * best:
            break
    return constants(theta), theta[len(chosen) :]


def _moved(theta: Column, constants: int) -> Column:
    """Returns a column for each constant, in which this constant is slightly larger."""
    moved = np.repeat(theta[:, None], constants, axis=1)
    moved[np.arange(constants), np.arange(constants)] += NUDGE
    return moved


# Calibration to the user's machine, from a few runs of twenty steps each.
#
# Four factors are fitted, with priors, to measured seconds per step: of products, memory, fixed
# costs and links. One run determines the first; runs with another batch, layout or link rate
# determine the others. With four runs or more, the interval follows from the residuals, and is at
# least 5 % wide on each side.

NARROWEST, FEW = 0.05, 0.15  # logarithm of half an interval: minimum, and with fewer than four runs
COMPUTES = (
    *("gemm16", "gemm16_new", "gemm16_newest", "gemm8"),
    *("attention", "attention_new", "attention_newest", "attention_unfused"),
)
MOVES = ("small", "elementwise", "cast", "unfused_bytes", "loss_bytes", "optimizer_bytes")
STANDS = ("layer_seconds", "expert_seconds", "stage_seconds", "step_seconds")
LINKS = ("intra", "inter")


@dataclass(frozen=True)
class OwnRun:
    """One short run: model, cluster, job, layout, and the median seconds of its steps."""

    architecture: Architecture
    cluster: Cluster
    job: PlannedJob
    layout: PlannedLayout
    step_seconds: float


@dataclass(frozen=True)
class MachineFactors:
    """Factors between a machine and the initial calibration."""

    compute: float = prior(1.0, 1.0)  # factor of the rates of products
    memory: float = prior(1.0, 0.5)  # factor of the rate of memory
    # Factor of fixed costs; below 1, because the calibration is that of large clusters.
    standing: float = prior(0.3, 1.0)
    links: float = prior(0.9, 0.7)  # share of the links' rates that a collective reaches

    def applied(self, c: Constants) -> Constants:
        """Returns the constants on the machine."""
        changed = {name: getattr(c, name) * self.compute for name in COMPUTES}
        changed |= {name: getattr(c, name) / self.memory for name in MOVES}
        changed |= {name: getattr(c, name) * self.standing for name in STANDS}
        changed |= dict.fromkeys(LINKS, self.links)
        return replace(c, **changed)


def calibrate_machine(
    runs: Sequence[OwnRun], calibration: Calibration | None = None, *, link_measured: bool = False
) -> Calibration:
    """Returns the calibration of the machine of these runs.

    ``link_measured``: the cluster's links are measured rates of a collective, not nominal
    rates.

    Raises:
        InputError: there is no run, or a run's seconds aren't above 0.
    """
    if not runs:
        raise InputError("no run to calibrate from: run twenty steps of the job first")
    for position, run in enumerate(runs, start=1):
        if not 0 < run.step_seconds < float("inf"):
            raise InputError(
                f"run {position} took {run.step_seconds} s a step; give seconds above 0"
            )
    start = calibration or calibrated()

    def seconds(factors: MachineFactors) -> Column:
        c = factors.applied(start.constants)
        totals = [
            steps(
                numbers(run.architecture, run.job.sequence),
                machine(run.cluster),
                Layouts.of([run.layout]),
                float(run.job.global_batch),
                c,
                run.job.task == "lora",
            ).total[0]
            for run in runs
        ]
        return np.log(totals)

    target = np.log([run.step_seconds for run in runs])
    even, no_stacks = np.ones(len(runs)), np.zeros((len(runs), 0))
    free = [f.name for f in fields(MachineFactors) if not (link_measured and f.name == "links")]
    first = MachineFactors(links=1.0) if link_measured else MachineFactors()
    factors, _ = fit(first, seconds, target, even, NARROWEST, no_stacks, free)
    residuals = target - seconds(factors)
    wide = max(NARROWEST, 1.2816 * float(np.std(residuals, ddof=1))) if len(runs) > 3 else FEW
    factor_values: dict[str, Any] = {f.name: getattr(factors, f.name) for f in fields(factors)}
    provenance = {**start.provenance, "own_runs": len(runs), "own_factors": factor_values}
    interval = (min(-wide, float(np.min(residuals))), max(wide, float(np.max(residuals))))
    spread = {**start.spread, "dense": interval, "moe": interval}
    stacks = {**start.stacks, OWN_STACK: 1.0}
    return Calibration(factors.applied(start.constants), start.memory, stacks, spread, provenance)


# Comparison of a finished run with its prediction.
#
# A run's metrics have three parts (waiting for data, passes, optimizer); the prediction has ten.
# The predicted parts are added up to these three.

WARM_UP = 3  # first steps that are left out, if there are enough steps
# Part of a step -> the run's metric, and the predicted parts; waiting for data isn't predicted.
TERMS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "passes": (
        "passes_seconds",
        ("compute", "attention", "head", "recompute", "tp", "dp", "pp", "ep"),
    ),
    "optimizer": ("optimizer_seconds", ("optimizer", "other")),
    "waiting for data": ("data_seconds", ()),
}


@dataclass(frozen=True)
class CalibratedTerm:
    """A predicted and a measured term of a step."""

    name: str
    unit: str
    predicted: float
    measured: float | None
    within: bool | None  # True if measured within P10-P90; None if the term has no interval

    @property
    def ratio(self) -> float | None:
        """Measured over predicted."""
        return self.measured / self.predicted if self.measured and self.predicted else None


def terms_of_run(predicted: PlanCandidate, run: Path) -> list[CalibratedTerm]:
    """Returns predicted and measured terms, from the folder of a finished run.

    Raises:
        InputError: the folder has no metrics of steps that moved weights.
    """
    rows = measured_steps(run)
    step = _median(rows, "step_seconds")
    tokens = _median(rows, "positions")
    rate = tokens / step / predicted.devices if step and tokens else None
    memory = max(numbers_of(rows, "peak_memory_bytes"), default=0.0) or None
    spans = (
        ("step", "s", predicted.step_seconds, step),
        ("rate of a device", "tokens/s", predicted.tokens_per_second_per_device, rate),
        ("peak memory", "bytes", predicted.memory_bytes, memory),
    )
    terms = []
    for name, unit, span, measured in spans:
        within = None if measured is None else span.low <= measured <= span.high
        terms.append(CalibratedTerm(name, unit, span.middle, measured, within))
    for name, (key, parts) in TERMS.items():
        expected = sum(predicted.step_parts[part] for part in parts)
        terms.append(CalibratedTerm(name, "s", expected, _median(rows, key), None))
    return terms


def measured_steps(run: Path) -> list[dict[str, Any]]:
    """Returns the lines of ``metrics.jsonl`` without warm-up and skipped steps."""
    path = run / "metrics.jsonl"
    if not path.exists():
        raise InputError(f"{run} has no {path.name}: name the folder of a run")
    rows = [
        row
        for row in json_lines(path, "run's log")
        if (number(row.get("step_seconds")) or 0.0) > 0 and not row.get("skipped")
    ]
    if not rows:
        raise InputError(
            f"{path} has no step that changed weights: let the run continue for a while"
        )
    return rows[WARM_UP:] if len(rows) > 2 * WARM_UP else rows


def table(terms: list[CalibratedTerm]) -> list[list[str]]:
    """Returns the rows of the table, the head first."""
    rows = [["term", "predicted", "measured", "measured/predicted", "in P10-P90"]]
    for term in terms:
        values = [measure(figure, term.unit) for figure in (term.predicted, term.measured)]
        ratio = "-" if term.ratio is None else f"{term.ratio:.2f}"
        within = {None: "-", True: "yes", False: "no"}[term.within]
        rows.append([term.name, *values, ratio, within])
    return rows


def _median(rows: list[dict[str, Any]], key: str) -> float | None:
    values = numbers_of(rows, key)
    return statistics.median(values) if values else None
