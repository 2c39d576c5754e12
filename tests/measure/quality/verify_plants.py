"""Planted techniques for the verification's tests: each does one kind of wrong, and nothing
else.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hasten.core.job import Job, Stop, with_language_counts
from hasten.core.layout import NoCompression
from hasten.core.plan import Plan
from hasten.core.setup import Session, Setup
from hasten.core.slot import Slot
from hasten.core.technique import EffectCheck, Fidelity, Technique
from hasten.machine.environment import World
from hasten.measure.quality.bench import CheckContext
from hasten.measure.quality.runner import CheckRequest
from hasten.measure.worker import QualityJob
from hasten.measure.workers import Reply, merge_replies
from hasten.parts.data import collate
from hasten.techniques import CATALOGUE
from hasten.techniques.layout.ddp import DDP
from tiny import job_context, language_job, tiny_model


class Planted(Technique):
    """What all plants share: they say that they effective."""

    @property
    def fidelity(self) -> Fidelity:
        return Fidelity.ROUNDING

    def check_effect(self, session: Session) -> EffectCheck:
        return EffectCheck(True, "planted")


@dataclass(frozen=True)
class Leaky(Planted):
    """Packs examples, and forgets that positions begin anew: attention sees the neighbours."""

    slot = Slot.COLLATE

    def apply(self, setup: Setup) -> None:
        def lay_out(examples: Sequence[Any]) -> dict[str, Any]:
            found = collate.packed(examples)
            return {k: found[k] for k in ("input_ids", "labels")}

        setup.collate = with_language_counts(lay_out)


@dataclass(frozen=True)
class MeanOfMeans(Planted):
    """Accumulates, and divides by each micro-batch's own count: short ones weigh like long ones."""

    slot = Slot.BATCH

    def apply(self, setup: Setup) -> None:
        setup.split_micro_batches = lambda examples: [list(examples[:1]), list(examples[1:])]
        usual = setup.run_passes

        def attempt(engine: Any, batch: Any) -> Any:
            whole = batch.counts.trained_tokens / len(batch.micro_batches)
            plain = engine._pass

            def passed(module: Any, micro_batch: Any, denominator: float, sums: Any) -> Any:
                weight = micro_batch.counts.trained_tokens / whole
                return plain(module, micro_batch, denominator * weight, sums)

            engine._pass = passed
            try:
                return usual(engine, batch)
            finally:
                del engine._pass

        setup.run_passes = attempt


@dataclass(frozen=True)
class NotExact(Planted):
    """Claims to keep every bit and changes the last ones of a weight before the first step."""

    slot = Slot.ALLOCATOR

    @property
    def fidelity(self) -> Fidelity:
        return Fidelity.EXACT

    def apply(self, setup: Setup) -> None:
        def nudge(model: nn.Module) -> None:
            with torch.no_grad():
                list(model.parameters())[-1].mul_(1 + 1e-6)

        setup.recompute = nudge


@dataclass(frozen=True)
class Ruinous(Planted):
    """Fast, and trains nothing: every other step's gradient has its sign turned."""

    slot = Slot.AVERAGE

    @property
    def fidelity(self) -> Fidelity:
        return Fidelity.LOSSY

    def apply(self, setup: Setup) -> None:
        build = setup.optimizer
        assert build is not None

        def turned(named: Any) -> Any:
            optimizer = build(named)

            def turn(optimizer: Any, args: Any, kwargs: Any) -> None:
                for group in optimizer.param_groups:
                    for p in group["params"]:
                        p.grad.neg_()

            optimizer.register_step_pre_hook(turn)
            return optimizer

        setup.optimizer = turned


@dataclass(frozen=True)
class HalfRate(Planted):
    """An optimizer that claims AdamW's rule and moves the weights half as far."""

    slot = Slot.OPTIMIZER

    def apply(self, setup: Setup) -> None:
        build = setup.optimizer
        assert build is not None

        def slower(named: Any) -> Any:
            optimizer = build(named)
            for group in optimizer.param_groups:
                group["lr"] /= 2
            return optimizer

        setup.optimizer = slower


@dataclass(frozen=True)
class Unscaled(Planted):
    """Replicas whose mean is taken for their sum: every gradient is too small by their number."""

    slot = Slot.LAYOUT

    def apply(self, setup: Setup) -> None:
        DDP().apply(setup)
        setup.layout.averages = 1


@dataclass(frozen=True)
class Louder(Planted):
    """A communication method that claims to round, and delivers two per cent more than was sent."""

    slot = Slot.COMMUNICATION

    def apply(self, setup: Setup) -> None:
        setup.communication = _Louder()


class _Louder(NoCompression):
    def before_update(self, parameters: Sequence[Any]) -> None:
        for parameter in parameters:
            parameter.grad.mul_(1.02)


PLANTS: tuple[type[Technique], ...] = (
    *(Leaky, MeanOfMeans, NotExact, Ruinous, HalfRate),
    *(Unscaled, Louder),
)


def bench(
    folder: Path, architecture: str = "llama", world: World | None = None, **changes: Any
) -> CheckContext:
    """Proofs on a tiny job, in this process; on several ranks replicated, if no plan says how."""
    settings: dict[str, Any] = {"lr": 1e-2, "steps": 3, **changes}

    def job_of(plan: Plan, seed: int | None, tokens: int | None) -> Job:
        job = language_job(lambda: tiny_model(architecture), **settings)
        job = job if seed is None else replace(job, seed=seed)
        return job if tokens is None else replace(job, stop=Stop(tokens=tokens))

    def read(stored: list[Any]) -> Plan:
        plan = Plan.from_list(stored, (*CATALOGUE, *PLANTS))
        alone = world is None or world.size == 1 or Slot.LAYOUT in plan
        return plan if alone else plan.with_(DDP())

    context = job_context(job_of(Plan(), None, None), architecture, world)
    return CheckContext(job_of, read, context, folder)


class Here:
    """Obeys orders in this process and remembers them.

    After each the collector looks for garbage: among what it has made, not among all that the tests
    have loaded.
    """

    def __init__(self, bench: CheckContext) -> None:
        self.bench = bench
        self.orders: list[CheckRequest] = []

    def __call__(self, orders: Sequence[CheckRequest]) -> list[Reply]:
        self.orders += orders
        gc.freeze()
        try:
            job = QualityJob(self.bench)
            return [merge_replies([job.handle(order.do, order.arguments())]) for order in orders]
        finally:
            gc.unfreeze()
