"""What the techniques that compress gradients share: a run's compressor in the slot WIRE.

Its memory is in checkpoints, its proof counts the bytes, and what a technique of that kind has to
say of itself is its ``method``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hasten.core.facts import Facts
from hasten.core.session import Session
from hasten.core.setup import Setup
from hasten.core.technique import Claim, Proof
from hasten.errors import InputError
from hasten.parts.comm.exchange import WireError
from hasten.parts.comm.gradient_compressor import GradientCompressor
from hasten.techniques.wire.wire_sharded import Exchange, proof_of

UNKNOWN_START = 100  # steps of the dense start where nobody knows the run's length
CLAIMS = (Claim("tokens_per_second", 1.12, "the articles' gradient compression: +12 % speed"),)


class Compresses(Protocol):
    """A technique that averages gradients by a method of :class:`GradientCompressor`.

    Its settings ``minimum``, ``check_every`` and ``scope``, and ``dense_share`` where it has one,
    mean the same with all methods.
    """

    @property
    def method(self) -> dict[str, Any]:
        """The compressor's settings that are the method's own."""

    @classmethod
    def name(cls) -> str: ...

    def settings(self) -> dict[str, Any]: ...


def check(technique: Compresses) -> None:
    """Refuse settings that are impossible.

    Raises:
        ValueError: one is.
    """
    settings = technique.settings()
    share = settings.get("dense_share", 0.0)
    if settings["check_every"] < 0:
        raise ValueError("check_every can't be negative")
    if not 0 <= share <= 1:
        raise ValueError(f"dense_share is {share}; it is a share of the steps, 0 to 1")
    GradientCompressor(communication_backend=None, **_given(technique))


def fill(setup: Setup, technique: Compresses) -> None:
    """With one rank nothing travels, and nothing is to be done."""
    if setup.facts.world.size == 1:
        return
    settings = technique.settings()
    start = dense_steps(setup, settings.get("dense_share", 0.0))
    given = {**_given(technique), "dense_steps": start}
    setup.wire = Compressed(setup, technique.name(), given, settings["check_every"])


def proof(session: Session, technique: Compresses) -> Proof:
    """What the technique's compressor did in this session."""
    wire = session.setup.wire
    if not isinstance(wire, Compressed) or wire.kind != technique.name():
        return Proof(False, "gradients were not compressed: one rank, or another wire")
    return wire.proof(session)


def obstacles() -> tuple[str, ...]:
    return () if dist.is_available() else ("this torch was built without torch.distributed",)


def _given(technique: Compresses) -> dict[str, Any]:
    settings = technique.settings()
    return {**technique.method, "minimum": settings["minimum"], "scope": settings["scope"]}


class Compressed:
    """A run's compressor: a step counts when its weights move, and weights are compared at times.

    Where a layout deals weights out, an exchange between shards takes the compressor's place.

    A checkpoint has the memory of every rank. With another number of ranks each goes on with the
    mean, so that nothing of what is owed is lost; where only hosts exchange compressed gradients,
    memory begins anew.
    """

    def __init__(self, setup: Setup, kind: str, given: dict[str, Any], check_every: int) -> None:
        self.kind, self.compressor = kind, GradientCompressor(communication_backend=None, **given)
        self.merged_from = self.lost_from = 0  # ranks whose memory became a mean, or was left
        self.shards: Exchange | None = None
        self._merges = True  # ranks' memories are of the same weights
        self._setup, self._check_every, self._updates = setup, check_every, 0

    def attach(self, module: nn.Module) -> None:
        if isinstance(module, DistributedDataParallel):
            scale = self._setup.loss_scale
            try:
                self.compressor.attach(module, loss_scale=lambda: scale.value, confirmed=True)
            except WireError as error:  # hosts or settings that don't go together
                raise InputError(f"{self.kind}: {error}") from error

    def enter(self, exchange: Exchange, merges: bool) -> None:
        """A layout that deals weights out has found what to exchange.

        Args:
            merges: ranks remember what they left out of the same weights.
        """
        self.shards, self._merges = exchange, merges

    def before_update(self, parameters: Sequence[Tensor]) -> None:
        (self.shards or self.compressor).confirm()

    def after_update(self, parameters: Sequence[Tensor]) -> None:
        self._updates += 1
        if self._check_every and self._updates % self._check_every == 0:
            (self.shards or self.compressor).check(parameters)

    def state_dict(self) -> dict[str, Any]:
        """Of all ranks, on the first; every rank calls it."""
        mine = self.compressor.state_dict()
        if self.shards is not None:
            mine["travel"] = self.shards.state()
        parted = self._setup.layout.data_size < self.size or self.compressor.hosts > 1
        if parted or self.shards is not None:  # ranks may remember other weights
            rows: list[Any] = [None] * self.size
            dist.gather_object(mine, rows if self.is_main else None)
            states = rows
        else:
            states = _of_ranks(mine, self)
        return {"technique": self.kind, "ranks": states if self.is_main else []}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        world, states = self._setup.facts.world, state["ranks"]
        if state["technique"] != self.kind:
            raise InputError(
                f"the checkpoint was written with {state['technique']} and the plan has "
                f"{self.kind}; resume with the plan that wrote it, or choose another folder"
            )
        if len(states) != world.size:
            alike = self.compressor.settings()["scope"] == "all" and self._merges
            if not alike or not _same_sizes(states):  # whose it was isn't whose it is
                self.lost_from = len(states)
                return
            self.merged_from = len(states)
            states = [_mean(states)] * world.size
        try:
            if self.shards is not None:
                self.shards.load(states[world.rank]["travel"])
            else:
                self.compressor.load_state_dict(states[world.rank])
        except ValueError as error:
            raise InputError(f"{self.kind}: {error}; resume with the plan that wrote it") from error

    def proof(self, session: Session) -> Proof:
        """Whether gradients were compressed, and in how many bytes."""
        merged = f"; memory is the mean of {self.merged_from} ranks'" if self.merged_from else ""
        if self.lost_from:
            merged = f"; the memory of {self.lost_from} ranks was left behind"
        if self.shards is not None:
            return proof_of(self.shards, session, merged)
        compressor = self.compressor
        trained = [p for p in session.loss_module.parameters() if p.requires_grad]
        sent = compressor.predicted(trained) if compressor.steps else 0
        if compressor.hosts == 1:
            return Proof(False, "nothing was compressed: scope is hosts, and all ranks share one")
        what = (
            f"{sent:,} {'by its host to others ' if compressor.hosts else ''}in a compressed step"
        )
        return Proof(
            compressor.compresses and (compressor.sent_bytes > 0 or compressor.hosts > 1),
            f"{compressor.steps} steps, {compressor.sent_bytes:,} bytes sent by this rank, "
            f"{what}{merged}",
        )

    @property
    def sent_bytes(self) -> int:
        return (self.shards or self.compressor).sent_bytes

    @property
    def is_main(self) -> bool:
        return self._setup.facts.world.is_main

    @property
    def size(self) -> int:
        return self._setup.facts.world.size


def dense_steps(setup: Setup, share: float) -> int:
    job = setup.job
    steps = job.stop.steps
    if steps is None and job.stop.epochs is not None and len(job.records) and job.batch.records:
        steps = job.stop.epochs * math.ceil(len(job.records) / job.batch.records)
    if not share:
        return 0
    return UNKNOWN_START if steps is None else math.ceil(share * steps)


def memory(facts: Facts) -> float:
    """Error feedback in float32, twice while a step lasts."""
    return 8.0 * facts.model.parameters if facts.world.size > 1 else 0.0


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


def _same_sizes(values: Sequence[Any]) -> bool:
    """Whether nested states hold tensors of the same names and shapes."""
    first = values[0]
    if isinstance(first, Tensor):
        return all(v.shape == first.shape for v in values)
    if isinstance(first, dict):
        alike = all(isinstance(v, dict) and v.keys() == first.keys() for v in values)
        return alike and all(_same_sizes([v[key] for v in values]) for key in first)
    return True
