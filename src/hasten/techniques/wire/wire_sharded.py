"""What WIRE does where a layout deals weights out: which ranks exchange small gradients, and how.

    pieces of weights alone      a codec in the reduce-scatter            scope all
    copies of whole layers       a codec between copies                   scope all or hosts
    copies of pieces             pieces in full, a codec between copies   scope hosts

Where layers are cut, their norms lie whole on all ranks that share them and have to stay the same
there; a format that rounds each number by itself keeps them so, codes in blocks don't.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed.device_mesh import DeviceMesh

from hasten.core.contracts import Wire
from hasten.core.session import Session
from hasten.core.technique import Proof
from hasten.errors import InputError
from hasten.parts.comm.methods import Settings
from hasten.parts.distributed.compressed_shards import CopiedShards, ShardedGradients
from hasten.parts.distributed.fsdp import why_not
from hasten.parts.distributed.mesh import MeshSizes

Exchange = ShardedGradients | CopiedShards


def exchange_for(
    layout: str,
    sizes: MeshSizes,
    mesh: DeviceMesh,
    wire: Wire,
    settings: Settings | None,
    scale: Callable[[], float],
) -> Exchange:
    """What is to be attached to the sharded module; the module has no axis of copies then, where
    they exchange.

    Args:
        settings: the wire's, if it compresses gradients.

    Raises:
        InputError: this wire can't enter this layout.
    """
    reason = _reason(layout, sizes, wire, settings)
    if reason:
        raise InputError(f"plan: {reason}")
    assert settings is not None  # otherwise there is a reason
    try:
        if sizes.dp == 1:
            return ShardedGradients(settings, scale)
        return CopiedShards(settings, members(mesh), scale)
    except ValueError as error:
        raise InputError(f"plan: {layout}: {error}") from error


def members(mesh: DeviceMesh) -> list[tuple[int, ...]]:
    """For each shard, and piece of layers, the ranks that have it, one of each copy."""
    by_copy = mesh.mesh.flatten(1)  # (dp, shard x tp)
    return [tuple(column.tolist()) for column in by_copy.T]


def _reason(layout: str, sizes: MeshSizes, wire: Wire, settings: Settings | None) -> str:
    """Why not, in one sentence; empty when nothing is in the way."""
    if settings is None:
        return (
            f"{layout} adds gradients up as they become shards, which "
            f"{type(wire).__name__.lower()} can't enter; take half, quantised or topk as the wire, "
            "leave it out, or take ddp as the layout"
        )
    if sizes.data_size == 1:
        return (
            f"all ranks of {layout} see the same records, so no gradients travel between ranks "
            "that a wire could make small; leave the wire's technique out"
        )
    if sizes.dp > 1 and sizes.shard > 1 and settings.scope == "all":
        return (
            f"{layout} has {sizes.dp} copies of {sizes.shard} pieces, and between copies alone "
            "gradients can be made small; say scope: hosts"
        )
    if sizes.dp == 1 and settings.scope == "hosts":
        return (
            f"{layout} has one copy of the model, so nothing goes between hosts alone; say scope: "
            "all, or replicas (in hybrid, dp), one for each host"
        )
    if sizes.tp > 1 and settings.method not in ("half", "bf16"):
        return (
            f"ranks that share a layer in {layout} each hold its norms whole, and "
            f"{settings.method} would round them by what lies beside them, which differs from rank "
            "to rank; take half as the wire"
        )
    return why_not()


def proof_of(exchange: Exchange, session: Session, note: str) -> Proof:
    """Whether gradients were compressed, and in how many bytes."""
    between = "to other copies in a step" if isinstance(exchange, CopiedShards) else "in a pass"
    sent = exchange.predicted()
    acted = exchange.compresses and session.progress.step > 0 and exchange.sent_bytes > 0
    return Proof(
        acted,
        f"{exchange.steps} steps, {exchange.sent_bytes:,} bytes sent by this rank, {sent:,} "
        f"{between} past the dense start{note}",
    )
