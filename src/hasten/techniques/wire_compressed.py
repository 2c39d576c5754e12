"""A run's gradient compressor in the slot WIRE: its memory in checkpoints and its proof."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hasten.core.facts import Facts
from hasten.core.session import Session
from hasten.core.setup import Setup
from hasten.core.technique import Proof, Technique
from hasten.errors import InputError
from hasten.parts.gradient_compressor import GradientCompressor

UNKNOWN_START = 100  # steps of the dense start where nobody knows the run's length


class Compressed:
    """A run's compressor: a step counts when its weights move, and weights are compared at times.

    A checkpoint has the memory of every rank. With another number of ranks each goes on with the
    mean, so that nothing of what is owed is lost.
    """

    def __init__(self, setup: Setup, kind: str, given: dict[str, Any], check_every: int) -> None:
        self.kind, self.compressor = kind, GradientCompressor(communication_backend=None, **given)
        self.merged_from = 0  # ranks whose memory became a mean
        self._setup, self._check_every, self._updates = setup, check_every, 0

    def attach(self, module: nn.Module) -> None:
        if isinstance(module, DistributedDataParallel):
            scale = self._setup.loss_scale
            self.compressor.attach(module, loss_scale=lambda: scale.value, confirmed=True)

    def before_update(self, parameters: Sequence[Tensor]) -> None:
        self.compressor.confirm()

    def after_update(self, parameters: Sequence[Tensor]) -> None:
        self._updates += 1
        if self._check_every and self._updates % self._check_every == 0:
            self.compressor.check(parameters)

    def state_dict(self) -> dict[str, Any]:
        """Of all ranks, on the first; every rank calls it."""
        states = _of_ranks(self.compressor.state_dict(), self)
        return {"technique": self.kind, "ranks": states if self.is_main else []}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        world, states = self._setup.facts.world, state["ranks"]
        if state["technique"] != self.kind:
            raise InputError(
                f"the checkpoint was written with {state['technique']} and the plan has "
                f"{self.kind}; resume with the plan that wrote it, or choose another folder"
            )
        if len(states) != world.size:
            self.merged_from = len(states)
            states = [_mean(states)] * world.size
        try:
            self.compressor.load_state_dict(states[world.rank])
        except ValueError as error:
            raise InputError(f"{self.kind}: {error}; resume with the plan that wrote it") from error

    @property
    def is_main(self) -> bool:
        return self._setup.facts.world.is_main

    @property
    def size(self) -> int:
        return self._setup.facts.world.size


def fill(setup: Setup, technique: Technique, given: dict[str, Any], check_every: int) -> None:
    """With one rank nothing travels, and nothing is to be done."""
    if setup.facts.world.size > 1:
        setup.wire = Compressed(setup, technique.name(), given, check_every)


def dense_steps(setup: Setup, share: float) -> int:
    job = setup.job
    steps = job.stop.steps
    if steps is None and job.stop.epochs is not None and len(job.records) and job.batch.records:
        steps = job.stop.epochs * math.ceil(len(job.records) / job.batch.records)
    if not share:
        return 0
    return UNKNOWN_START if steps is None else math.ceil(share * steps)


def check(minimum: int, check_every: int, dense_share: float = 0.0) -> None:
    if minimum < 0 or check_every < 0:
        raise ValueError("minimum and check_every can't be negative")
    if not 0 <= dense_share <= 1:
        raise ValueError(f"dense_share is {dense_share}; it is a share of the steps, 0 to 1")


def obstacles() -> tuple[str, ...]:
    return () if dist.is_available() else ("this torch was built without torch.distributed",)


def memory(facts: Facts) -> float:
    """Error feedback in float32, twice while a step lasts."""
    return 8.0 * facts.model.parameters if facts.world.size > 1 else 0.0


def proof(session: Session, technique: Technique) -> Proof:
    wire = session.setup.wire
    if not isinstance(wire, Compressed) or wire.kind != technique.name():
        return Proof(False, "gradients were not compressed: one rank, or another wire")
    compressor = wire.compressor
    trained = [p for p in session.loss_module.parameters() if p.requires_grad]
    sent = compressor.predicted(trained) if compressor.steps else 0
    merged = f"; memory is the mean of {wire.merged_from} ranks'" if wire.merged_from else ""
    return Proof(
        compressor.compresses and compressor.sent_bytes > 0,
        f"{compressor.steps} steps, {compressor.sent_bytes:,} bytes sent by this rank, "
        f"{sent:,} in a compressed step{merged}",
    )


def _of_ranks(value: Any, wire: Compressed) -> list[Any]:
    """Each rank's ``value``; its tensors travel, the rest is alike on all ranks."""
    if isinstance(value, Tensor):
        rows = wire.compressor.gathered(value.flatten())
        if not wire.is_main:
            return [value] * wire.size
        return [row.view(value.shape).clone() for row in rows]
    if isinstance(value, dict):
        found: list[dict[str, Any]] = [{} for _ in range(wire.size)]
        for key in sorted(value):
            for place, item in zip(found, _of_ranks(value[key], wire), strict=True):
                place[key] = item
        return found
    return [value] * wire.size


def _mean(values: Sequence[Any]) -> Any:
    """The mean of nested states: what is owed stays the same for any number of ranks."""
    first = values[0]
    if isinstance(first, Tensor):
        return torch.stack(list(values)).mean(0)
    if isinstance(first, dict):
        return {key: _mean([value[key] for value in values]) for key in first}
    return first
