"""LAYOUT: every rank holds the full model, and gradients are averaged (DDP)."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hasten.core.context import JobContext
from hasten.core.layout import CommTiming, Communication, MeasuresExchange
from hasten.core.setup import RankSync, Session, Setup
from hasten.core.slot import Slot
from hasten.core.technique import EffectCheck, Fidelity, Technique, knob
from hasten.machine.environment import World
from hasten.parts.comm.collectives import TopoAwareCollective
from hasten.parts.comm.link_model import bucket_bytes
from hasten.parts.distributed.ddp import leave_constants, order_buckets, reduce_now
from hasten.parts.nn.causal_lm import freeze_indexers, may_rest
from hasten.techniques.layout.ranks import RanksLayout, ReplicaTraffic, no_torch_distributed


@dataclass(frozen=True)
class DDP(Technique):
    """Every rank holds the full model and its own examples; gradients are averaged in buckets."""

    slot = Slot.LAYOUT
    fidelity = Fidelity.ROUNDING
    bucket_cap_mb: int = knob(
        25,
        "size of a gradient bucket in MB; 0: by the link, measured",
        least=0,
        low=1,
        high=256,
        log=True,
    )

    def apply(self, setup: Setup) -> None:
        world = setup.context.world
        if world.size > 1:
            setup.layout = Replicas(world, self.bucket_cap_mb, setup.job.device)

    def unsupported_reasons(self, context: JobContext) -> tuple[str, ...]:
        return no_torch_distributed(context)

    def check_effect(self, session: Session) -> EffectCheck:
        replicated = isinstance(session.module, DistributedDataParallel)
        size, steps = session.setup.layout.size, session.progress.step
        if session.setup.rank_sync.diverged:
            return EffectCheck(
                size > 1 and steps > 0, f"{size} rank(s) that train apart, {steps} steps"
            )
        layout = session.setup.layout
        buckets = layout.buckets if isinstance(layout, Replicas) else ""
        # torch's counters of the reducer miss gradients that are sent late (adaptive_batch).
        return EffectCheck(
            replicated and steps > 0,
            f"{size} rank(s), {'' if replicated else 'not '}replicated, {steps} steps{buckets}",
        )


class Replicas(RanksLayout):
    """The model on every rank, in torch's DistributedDataParallel."""

    replicated = True

    def __init__(self, world: World, bucket_cap_mb: int, device: str) -> None:
        super().__init__(world)
        self._bucket_cap_mb = bucket_cap_mb
        self._device = device
        self.buckets = ""  # how the bucket size was chosen
        self._watched: ReplicaTraffic | None = None
        self._communication: Communication | None = None

    def apply_data_parallel(self, module: nn.Module, communication: Communication) -> nn.Module:
        self._communication = communication
        # gradients stay on their rank
        if isinstance(communication, RankSync) and communication.diverged:
            communication.attach(module)
            return module
        gpu = None if self._device == "cpu" else [torch.device(self._device)]
        cap = self._bucket_cap_mb
        if not cap:  # for the present link; all ranks measure together and use the same result
            topology = TopoAwareCollective("nccl" if gpu else "gloo", "measure").topology
            cap = math.ceil(bucket_bytes(topology) / 2**20)
            self.buckets = f"; buckets of {cap} MB for {topology}"
        freeze_indexers(module)
        wrapped = DistributedDataParallel(
            module,
            device_ids=gpu,
            bucket_cap_mb=cap,
            gradient_as_bucket_view=False,
            find_unused_parameters=may_rest(module),
        )
        leave_constants(wrapped)
        order_buckets(wrapped)
        communication.attach(wrapped)
        self._watched = ReplicaTraffic(wrapped, communication)
        return wrapped

    def traffic(self) -> CommTiming | None:
        """Returns the timing of the step's communication: gradients, or weights instead."""
        holder = self._watched or self._communication
        return holder.traffic() if isinstance(holder, MeasuresExchange) else None

    def sync(self, module: nn.Module, last: bool) -> AbstractContextManager[Any]:
        if last or not isinstance(module, DistributedDataParallel):
            return nullcontext()
        quiet: AbstractContextManager[Any] = module.no_sync()
        return quiet

    def alone(self, module: nn.Module) -> nn.Module:
        return module.module if isinstance(module, DistributedDataParallel) else module

    def send(self, module: nn.Module) -> None:
        if isinstance(module, DistributedDataParallel):
            reduce_now(module)
        if self._watched is not None:
            self._watched.late = True
