"""Ranks whose memory runs out at chosen places while the others go on; run by test_adaptive_batch.

Also the simulated memory itself, for tests in one process.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from hasten.core.plan import Plan
from hasten.core.session import Session, assemble
from hasten.core.setup import prepare
from hasten.core.state import restore, state_of
from hasten.core.step import training
from hasten.core.technique import Technique
from hasten.machine.environment import World
from hasten.parts.nn.losses import WholeLogitsLoss
from hasten.techniques.batch import AdaptiveBatch, GradientAccumulation
from hasten.techniques.feed import Prefetched
from hasten.techniques.layout.ddp import DDP
from hasten.techniques.precision import BF16MasterWeights
from tiny import examples, job_context, language_job, tiny_model

# Where memory runs out, and which of the two ranks have to redo a step.
PLACES = {
    "nowhere": [False, False],
    "forward, rank 0": [True, False],
    "forward, rank 1": [False, True],
    "backward, rank 1": [False, True],
    "last backward, rank 0": [True, False],
    "backward, both": [True, True],
    "backward, rank 1, prefetched": [False, True],
}


class Fails(torch.autograd.Function):
    """Memory runs out in the middle of the backward pass, when later layers have gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grad: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("simulated")


class SmallMemory(nn.Module):
    """The plain loss on a device that holds ``limit`` slots."""

    limit = 160

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner, self.failures = WholeLogitsLoss(model), 0
        model.model.layers[1].register_forward_pre_hook(self._break)  # type: ignore[union-attr, index]
        self.model = model

    def _break(self, module: nn.Module, args: Any) -> Any:
        hidden = args[0]
        if torch.is_grad_enabled() and self.fails(hidden.shape[0] * hidden.shape[1]):
            self.failures += 1
            return (self.fail(hidden), *args[1:])
        return args

    def fails(self, slots: int) -> bool:
        return slots > self.limit

    def fail(self, hidden: torch.Tensor) -> Any:
        return Fails.apply(hidden)

    def forward(self, **inputs: Any) -> Any:
        return self.inner(**inputs)


def all_places(world: World) -> dict[str, Any]:
    """Losses, weights and redone steps with failures in every place, and a resumed state."""
    found = {place: _described(_session(world, place, AdaptiveBatch(8, 16))) for place in PLACES}
    found["accumulated"] = _described(_session(world, "nowhere", GradientAccumulation(2)))
    masters = BF16MasterWeights()
    found["masters"] = _described(_session(world, "backward, both", AdaptiveBatch(8, 16), masters))
    plain = _session(world, "nowhere", GradientAccumulation(2), masters)
    found["masters, accumulated"] = _described(plain)
    return {**found, **_resumed(world)}


def _session(world: World, place: str, *techniques: Technique) -> Session:
    """Steps of eight examples, four a rank, whose memory holds about two of them."""
    here = PLACES[place][world.rank]

    class Memory(SmallMemory):
        def fails(self, slots: int) -> bool:
            if "last" in place:  # not for its size: in the last pass of a step cut in two
                self.passes = getattr(self, "passes", 0) + 1
                return here and self.passes == 2
            return here and slots > 80

        def fail(self, hidden: torch.Tensor) -> Any:
            if "forward" in place:
                raise torch.OutOfMemoryError("simulated")
            return super().fail(hidden)

    masters = any(isinstance(t, BF16MasterWeights) for t in techniques)
    dtype = torch.float32 if masters else torch.float64
    job = language_job(lambda: tiny_model(dtype=dtype), data=examples(24), steps=5, batch=8)
    job = replace(job, loss=Memory)
    if "last" in place:
        techniques = tuple(
            AdaptiveBatch(2, 16) if isinstance(t, AdaptiveBatch) else t for t in techniques
        )
    if "prefetched" in place:
        techniques = (*techniques, Prefetched())
    plan = Plan((*techniques, DDP(bucket_cap_mb=1)))
    return assemble(prepare(job, plan, job_context(job, world=world)))


def _described(session: Session) -> dict[str, Any]:
    steps = list(training(session))
    redone = getattr(session.setup.run_passes, "redone", 0)
    model: Any = session.finish()
    return {
        "losses": [m.loss for m in steps],
        "positions": [m.positions for m in steps],
        "weights": [float(p.detach().double().flatten()[::7].sum()) for p in model.parameters()],
        "redone": redone,
    }


def _resumed(world: World) -> dict[str, Any]:
    """Each rank's size after a run in which only rank 1 failed, and after it is read again."""
    place = "backward, rank 1"
    first = _session(world, place, AdaptiveBatch(8, 16))
    list(training(first))
    second = _session(world, place, AdaptiveBatch(8, 16))
    restore(second, *state_of(first))
    rooms: list[Any] = [s.setup.run_passes for s in (first, second)]
    return {name: a.room.state_dict() for name, a in zip(("learnt", "resumed"), rooms, strict=True)}
