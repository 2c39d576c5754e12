"""Experiments whose variants only pretend: made-up numbers, from processes where these may fail."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import simulate_job
from hasten.core.plan import Plan
from hasten.measure.ablation import Design, Kind
from hasten.measure.experiment import ExperimentContext, Measured, measure_variants
from hasten.measure.record import ExperimentRecord
from hasten.measure.workers import Reply, WorkerPool, WorkerSpec
from hasten.techniques.attention import DocumentAttention
from hasten.techniques.collate import Packed
from hasten.techniques.optimizer import FusedAdamW

JOB = "simulate_job:pretend"
PLANS = {
    "baseline": Plan(),
    "packed": Plan([Packed()]),
    "attention": Plan([DocumentAttention()]),
    "all": Plan([Packed(), DocumentAttention(), FusedAdamW()]),
}
KINDS: dict[str, Kind] = {
    "baseline": "baseline",
    "packed": "alone",
    "attention": "leave-one-out",
    "all": "all",
}
NAMES = {
    "baseline": "baseline",
    "packed": "packed",
    "attention": "document_attention",
    "all": "packed+document_attention+fused_adamw",
}


class Worker:
    """In place of `hasten.measure.workers.Worker` and its process: replies at once."""

    can_slice = False

    def __init__(self, spec: WorkerSpec) -> None:
        self._job = simulate_job.job_of(spec.arguments)

    def ready(self, timeout: float) -> Reply:
        return self._job.ready()

    def request(self, op: str, timeout: float, **arguments: Any) -> Reply:
        return self._job.handle(op, arguments)

    def close(self, kill: bool = False) -> None: ...


class Workers:
    """In place of a `WorkerPool`."""

    on_cpu = True

    @classmethod
    def of_pretenders(cls) -> WorkerPool:
        return cast(WorkerPool, cls())

    def start(self, spec: WorkerSpec, name: str) -> Worker:
        return Worker(spec)


def pretend(
    folder: Path,
    design: Design,
    variants: Mapping[str, Any] | None = None,
    *,
    plans: Mapping[str, Plan] | None = None,
    kinds: Mapping[str, Kind] | None = None,
    memory: int = 10_000,
    record: ExperimentRecord | None = None,
    joules: Callable[[], float | None] = lambda: None,
    slices: bool = False,
    **more: Any,
) -> Measured:
    """Measure; ``variants`` says by name of the variant how it behaves.

    Turns are whole ones unless ``slices`` are asked for: then it is known whose turn it is. There
    are processes where a variant fails, and for slices.
    """
    design = dataclasses.replace(design, slices=slices)
    told = {_name(plans or PLANS, name): how for name, how in (variants or {}).items()}
    recipe = folder / "recipe.json"
    recipe.write_text(json.dumps({"variants": told, "log": str(folder / "log")}))

    def spec(name: str) -> WorkerSpec:
        given = {"recipe": str(recipe), "plan": (plans or PLANS)[name].to_list()}
        return WorkerSpec(JOB, given)

    with WorkerPool(folder) as processes:
        real = slices or any("fails" in how for how in told.values())
        pool = processes if real else Workers.of_pretenders()
        at = ExperimentContext(pool, spec, memory, 2, joules)
        return measure_variants(
            at, plans or PLANS, design, kinds=kinds or KINDS, record=record, **more
        )


def log(folder: Path) -> list[str]:
    """What the processes did, in its order: ``start NAME`` and ``steps NAME STEP``."""
    return (folder / "log").read_text().splitlines()


def _name(plans: Mapping[str, Plan], variant: str) -> str:
    return "+".join(t.name() for t in plans[variant]) or "baseline"
