"""LAYOUT: which rank holds which part."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hasten.core.agreement import Agreement
from hasten.core.facts import Facts
from hasten.core.session import Session
from hasten.core.setup import Setup, Wire
from hasten.core.slot import Slot
from hasten.core.technique import Fidelity, Proof, Technique, knob
from hasten.parts.late_reduction import reduce_now


@dataclass(frozen=True)
class DDP(Technique):
    """Every rank holds the whole model and its own records; gradients are averaged in buckets."""

    slot = Slot.LAYOUT
    bucket_cap_mb: int = knob(25, "size of a gradient bucket in MB", low=1, high=256, log=True)

    def __post_init__(self) -> None:
        if self.bucket_cap_mb < 1:
            raise ValueError(f"bucket_cap_mb is {self.bucket_cap_mb}; it must be at least 1")

    @property
    def fidelity(self) -> Fidelity:
        return Fidelity.ROUNDING

    def apply(self, setup: Setup) -> None:
        world = setup.facts.world
        if world.size > 1:
            setup.layout = Replicas(world.size, self.bucket_cap_mb, setup.job.device)

    def obstacles(self, facts: Facts) -> tuple[str, ...]:
        if facts.world.size > 1 and not dist.is_available():
            return ("this torch was built without torch.distributed",)
        return ()

    def probe(self, session: Session) -> Proof:
        replicated = isinstance(session.module, DistributedDataParallel)
        size, steps = session.setup.layout.size, session.progress.step
        if session.setup.agreement.apart:
            return Proof(size > 1 and steps > 0, f"{size} rank(s) that train apart, {steps} steps")
        # What torch counts of the reducer misses gradients that travel late (adaptive_batch).
        return Proof(
            replicated and steps > 0,
            f"{size} rank(s), {'' if replicated else 'not '}replicated, {steps} steps",
        )


class Replicas:
    """The model on every rank, in torch's DistributedDataParallel."""

    def __init__(self, size: int, bucket_cap_mb: int, device: str) -> None:
        self.size = size
        self._bucket_cap_mb = bucket_cap_mb
        self._device = device

    def split(self, module: nn.Module) -> nn.Module:
        return module

    def within(self, module: nn.Module) -> nn.Module:
        return module

    def across(self, module: nn.Module, wire: Wire) -> nn.Module:
        if isinstance(wire, Agreement) and wire.apart:  # gradients stay where they are
            wire.attach(module)
            return module
        gpu = None if self._device == "cpu" else [torch.device(self._device)]
        wrapped = DistributedDataParallel(
            module, device_ids=gpu, bucket_cap_mb=self._bucket_cap_mb, gradient_as_bucket_view=False
        )
        wire.attach(wrapped)
        return wrapped

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

    def sum(self, values: Tensor) -> Tensor:
        moved = values.to(self._device)
        dist.all_reduce(moved)
        return moved.cpu()
