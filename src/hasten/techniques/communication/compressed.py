"""Base of the techniques that compress gradients: a compressor in slot COMMUNICATION.

Its memory is stored in checkpoints, and its proof counts the bytes. A technique of this
kind describes itself in its ``method``.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from hasten.core.context import JobContext
from hasten.core.layout import Communication
from hasten.core.setup import Session, Setup
from hasten.core.slot import Slot
from hasten.core.technique import Claim, EffectCheck, Fidelity, Technique
from hasten.errors import InputError, as_input_error
from hasten.parts.comm.compression_settings import CompressionSettings
from hasten.parts.comm.exchange import CommunicationError
from hasten.parts.comm.gradient_compressor import GradientCompressor
from hasten.parts.comm.groups import MeshSizes
from hasten.parts.distributed.compressed_shards import ShardedGradients
from hasten.techniques.layout.ranks import no_torch_distributed, of_the_same_plan

# Exchanges for sharded layouts.
#
# - shards only: a codec in the reduce-scatter, scope all
# - copies of complete layers: a codec between copies, scope all or hosts
# - copies of shards: shards in full, a codec between copies, scope hosts
#
# If layers are split, their norms are replicated on all ranks that share them and must stay equal.
# A format that rounds each number separately keeps them equal; codes in blocks don't.


def exchange_for(
    layout: str,
    sizes: MeshSizes,
    mesh: DeviceMesh,
    communication: Communication,
    scale: Callable[[], float],
) -> ShardedGradients:
    """Returns the exchange to attach to the sharded module, after the method has entered it.

    If copies of the shards exchange gradients, the module then has no axis of copies.

    Raises:
        InputError: this layout doesn't support this communication method.
    """
    compressed = communication if isinstance(communication, Compressed) else None
    settings = None
    if compressed is not None:
        settings = CompressionSettings(**compressed.compressor.settings())
    reason = _reason(layout, sizes, communication, settings)
    if reason or compressed is None or settings is None:  # without settings there is a reason
        raise InputError(f"plan: {reason}")
    with as_input_error(f"plan: {layout}"):
        exchange = ShardedGradients(settings, scale, None if sizes.dp == 1 else members(mesh))
    compressed.enter(exchange, merges=sizes.dp == sizes.tp == 1)
    return exchange


def members(mesh: DeviceMesh) -> list[tuple[int, ...]]:
    """Returns for each shard, or split layer, the ranks that hold it, one for each copy."""
    by_copy = mesh.mesh.flatten(1)  # (dp, shard x tp)
    return [tuple(column.tolist()) for column in by_copy.T]


def _reason(
    layout: str,
    sizes: MeshSizes,
    communication: Communication,
    settings: CompressionSettings | None,
) -> str:
    """Returns why this exchange isn't supported, in one sentence; empty if it is."""
    if settings is None:
        return (
            f"{layout} adds gradients up as they become shards, which "
            f"{type(communication).__name__.lower()} can't enter; take half, quantised or topk as "
            "the communication method, leave it out, or take ddp as the layout"
        )
    if sizes.data_size == 1:
        return (
            f"all ranks of {layout} get the same examples, so no gradients travel between ranks "
            "that a communication method could compress; leave the communication method's "
            "technique out"
        )
    if sizes.dp > 1 and sizes.shard > 1 and settings.scope == "all":
        return (
            f"{layout} has {sizes.dp} copies of {sizes.shard} pieces, and gradients can be "
            "compressed between copies only; set scope: hosts"
        )
    if sizes.dp == 1 and settings.scope == "hosts":
        return (
            f"{layout} has one copy of the model, so no gradients travel between hosts only; set "
            "scope: all, or give each host a replica (in hybrid, dp)"
        )
    if sizes.tp > 1 and settings.method not in ("half", "bf16"):
        return (
            f"ranks that share a layer in {layout} each hold all of its norms, and "
            f"{settings.method} rounds a value by its neighbours, which differ from rank to rank; "
            "take half as the communication method"
        )
    return ""


def proof_of(exchange: ShardedGradients, session: Session, note: str) -> EffectCheck:
    """Returns a check that gradients were compressed, with the number of bytes."""
    between = "to other copies in a step" if exchange.members else "in a pass"
    sent, travel = exchange.predicted(), exchange.travel
    effective = travel.compresses and session.progress.step > 0 and exchange.sent_bytes > 0
    return EffectCheck(
        effective,
        f"{travel.steps} steps, {exchange.sent_bytes:,} bytes sent by this rank, {sent:,} "
        f"{between} past the dense start{note}",
    )


# The communication method

UNKNOWN_START = 100  # steps of the dense start if the run's length is unknown


class CompressesGradients(Technique):
    """A technique that averages gradients by a method of :class:`GradientCompressor`.

    Its settings ``minimum``, ``check_every`` and ``scope``, and ``dense_share`` where it has one,
    mean the same with all methods.
    """

    slot = Slot.COMMUNICATION
    fidelity = Fidelity.LOSSY
    claims = (Claim("tokens_per_second", 1.12, "the articles' gradient compression: +12 % speed"),)

    @property
    @abstractmethod
    def method(self) -> dict[str, Any]:
        """Returns the compressor's settings of this method."""

    def __post_init__(self) -> None:
        super().__post_init__()
        share = self.settings().get("dense_share", 0.0)
        if not 0 <= share <= 1:
            raise ValueError(f"dense_share is {share}; it is a share of the steps, 0 to 1")
        GradientCompressor(communication_backend=None, **self._compressor_settings())

    def apply(self, setup: Setup) -> None:
        """One rank sends nothing, so nothing is set."""
        if setup.context.world.size == 1:
            return
        settings = self.settings()
        start = dense_steps(setup, settings.get("dense_share", 0.0))
        arguments = {**self._compressor_settings(), "dense_steps": start}
        setup.communication = Compressed(setup, self.name(), arguments, settings["check_every"])

    def unsupported_reasons(self, context: JobContext) -> tuple[str, ...]:
        return no_torch_distributed(context)

    def check_effect(self, session: Session) -> EffectCheck:
        communication = session.setup.communication
        if not isinstance(communication, Compressed) or communication.kind != self.name():
            return EffectCheck(
                False, "gradients were not compressed: one rank, or another communication"
            )
        return communication.proof(session)

    def _compressor_settings(self) -> dict[str, Any]:
        settings = self.settings()
        return {**self.method, "minimum": settings["minimum"], "scope": settings["scope"]}


class Compressed(Communication):
    """A run's compressor: counts steps that move weights, and compares weights at times.

    If a layout shards weights, an exchange between shards replaces the compressor.

    A checkpoint has the memory of every rank. With another number of ranks each continues
    with the mean, so no part of the omitted gradients is lost. If only hosts exchange
    compressed gradients, memory begins empty.
    """

    each_rank = True  # a checkpoint has the state of every rank

    def __init__(self, setup: Setup, kind: str, settings: dict[str, Any], check_every: int) -> None:
        self.kind = kind
        self.compressor = GradientCompressor(communication_backend=None, **settings)
        self.merged_from = self.lost_from = 0  # ranks whose memory was averaged or lost
        self.shards: ShardedGradients | None = None
        self._merges = True  # ranks have memories of the same weights
        self._setup, self._check_every, self._updates = setup, check_every, 0

    def attach(self, module: nn.Module) -> None:
        if isinstance(module, DistributedDataParallel):
            try:
                self.compressor.attach(
                    module, loss_scale=lambda: self._setup.loss_factor, confirmed=True
                )
            except CommunicationError as error:  # hosts or settings that can't be combined
                raise InputError(f"{self.kind}: {error}") from error

    def enter(self, exchange: ShardedGradients, merges: bool) -> None:
        """Sets the exchange that a sharded layout has chosen.

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
        """Returns the memory of this rank."""
        local_state = self.compressor.state_dict()
        if self.shards is not None:
            local_state["travel"] = self.shards.state()
        return {"technique": self.kind, "memory": local_state}

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restores this rank's memory from the states of all saved ranks."""
        world = self._setup.context.world
        first = states[world.rank if len(states) == world.size else 0]
        with of_the_same_plan(first, self.kind):
            memory = first["memory"]
            if len(states) != world.size:
                # Ranks may have memories of different weights: of hosts, shards, stages.
                alike = self.compressor.settings()["scope"] == "all" and self._merges
                mean = _mean(states) if alike else None
                if mean is None:
                    self.lost_from = len(states)
                    return
                self.merged_from, memory = len(states), mean
            if self.shards is not None:
                self.shards.load(memory["travel"])
            else:
                self.compressor.load_state_dict(memory)

    def proof(self, session: Session) -> EffectCheck:
        """Returns a check that gradients were compressed, with the number of bytes."""
        merged = f"; memory is the mean of {self.merged_from} ranks'" if self.merged_from else ""
        if self.lost_from:
            merged = f"; the memory of {self.lost_from} ranks was left behind"
        if self.shards is not None:
            return proof_of(self.shards, session, merged)
        compressor = self.compressor
        trained = [p for p in session.loss_module.parameters() if p.requires_grad]
        sent = compressor.predicted(trained) if compressor.steps else 0
        if compressor.hosts == 1:
            return EffectCheck(
                False, "nothing was compressed: scope is hosts, and all ranks share one"
            )
        what = (
            f"{sent:,} {'by its host to others ' if compressor.hosts else ''}in a compressed step"
        )
        return EffectCheck(
            compressor.compresses and (compressor.sent_bytes > 0 or compressor.hosts > 1),
            f"{compressor.steps} steps, {compressor.sent_bytes:,} bytes sent by this rank, "
            f"{what}{merged}",
        )

    @property
    def sent_bytes(self) -> int:
        return (self.shards or self.compressor).sent_bytes

    @property
    def is_main(self) -> bool:
        return self._setup.context.world.is_main

    @property
    def size(self) -> int:
        return self._setup.context.world.size


def dense_steps(setup: Setup, share: float) -> int:
    job = setup.job
    steps = job.stop.steps
    if steps is None and job.stop.epochs is not None and len(job.examples) and job.batch.examples:
        steps = job.stop.epochs * math.ceil(len(job.examples) / job.batch.examples)
    if not share:
        return 0
    return UNKNOWN_START if steps is None else math.ceil(share * steps)


def memory(context: JobContext) -> float:
    """Returns the bytes of error feedback in float32, twice while a step runs."""
    return 8.0 * context.model.parameters if context.world.size > 1 else 0.0


def _mean(states: Sequence[Mapping[str, Any]]) -> Any:
    """Returns the mean of all ranks' memories, which keeps all that was left out for any count.

    States are read one after the other. None: they have tensors of other names or shapes.
    """
    total = states[0]["memory"]
    for number in range(1, len(states)):
        total = _sum(total, states[number]["memory"])
        if total is None:
            return None
    return _scaled(total, 1 / len(states))


def _sum(one: Any, other: Any) -> Any:
    """Returns the sum of two nested states, or None if they differ in names or shapes."""
    if isinstance(one, Tensor):
        return one + other if one.shape == other.shape else None
    if not isinstance(one, dict):
        return one
    if not isinstance(other, dict) or one.keys() != other.keys():
        return None
    sums = {key: _sum(value, other[key]) for key, value in one.items()}
    lost = any(sums[key] is None and value is not None for key, value in one.items())
    return None if lost else sums


def _scaled(value: Any, factor: float) -> Any:
    if isinstance(value, dict):
        return {key: _scaled(item, factor) for key, item in value.items()}
    return value * factor if isinstance(value, Tensor) else value
