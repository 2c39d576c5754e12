"""Local shards of a distributed model as plain tensors: optimizer, norm, saving.

Parameters of a sharded or split module are ``DTensor``: a shard and its placement. An
update rule that treats each number by itself needs the shard alone. So the optimizer
gets plain tensors over the same memory. Kernels without DTensor support then work.
Shards of different meshes go through one call, and no operator needs the placement.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.optim import Optimizer

from hasten.machine.lazy_torch import is_dtensor
from hasten.parts.comm.groups import message_device
from hasten.parts.distributed.fsdp import reshard_all
from hasten.parts.optim.muon import MuonAdamW

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Sum = Callable[[Tensor], Tensor]  # sums a float64 tensor on the host over all ranks


class Format(Protocol):
    """A number format with the module's own weights (unchanged, or under autocast)."""

    def prepare(self, module: nn.Module) -> None: ...

    def region(self) -> AbstractContextManager[Any]: ...

    def finish(self, module: nn.Module) -> None: ...


class LocalShards:
    """The true weights of a sharded module: this rank's shards.

    Args:
        inner: the number format around it.
        dtype: in which blocks compute, where sharding casts their weights; None: it doesn't.
    """

    def __init__(self, inner: Format, dtype: torch.dtype | None = None) -> None:
        self.inner, self.dtype = inner, dtype
        self._module = nn.Module()
        self._pairs: list[tuple[Tensor, Tensor]] = []  # (parameter, this rank's shard)
        self._owners: dict[int, Tensor] = {}  # parameter by id of the shard
        self._copies: dict[int, int] = {}  # number of ranks with the same shard, by id of the shard
        self._counted: tuple[list[int], Tensor] | None = None  # (holders of each, its weight)

    def prepare(self, module: nn.Module) -> None:
        self._module = module
        self.inner.prepare(module)

    def region(self) -> AbstractContextManager[Any]:
        return self.inner.region()

    def attach_optimizer(self, optimizer: Optimizer) -> None:
        """Replaces the optimizer's parameters with the shards.

        Raises:
            ValueError: its rule needs whole matrices.
        """
        if isinstance(optimizer, MuonAdamW):
            raise ValueError(
                "muon needs whole matrices and each rank holds a piece of them; take adamw"
            )
        for group in optimizer.param_groups:
            group["params"] = [self._piece(p) for p in group["params"]]

    def _piece(self, parameter: Tensor) -> Tensor:
        shard = parameter
        if is_dtensor(parameter):
            shard = nn.Parameter(parameter.detach().to_local(), parameter.requires_grad)
        self._pairs.append((parameter, shard))
        self._owners[id(shard)] = parameter
        self._copies[id(shard)] = _pieces(parameter)
        return shard

    def parameter_of(self, weight: Tensor) -> Tensor:
        """Returns the parameter of a shard; any other weight is its own parameter."""
        return self._owners.get(id(weight), weight)

    def before_backward(self, reduces: bool) -> None:
        return None

    def accumulate_gradients(self) -> None:
        """Moves the existing gradients to the shards, split like the shards."""
        for parameter, shard in self._pairs:
            if shard is not parameter and is_dtensor(parameter.grad):
                shard.grad = _local_gradient(parameter.grad, parameter)

    def parameters(self) -> list[Tensor]:
        return [shard for _, shard in self._pairs]

    def update_model_weights(self) -> None:
        """Frees gathered weights of earlier passes after an update of the shards."""
        reshard_all(self._module)

    def finish(self, module: nn.Module) -> None:
        self.inner.finish(module)

    def norm(self, parameters: Sequence[Tensor], world_size: int, total: Sum) -> Tensor:
        """Returns the L2 norm of the full gradient: squares of all shards, each counted once.

        Args:
            parameters: pieces with their ``.grad``.
            total: the sum over all ranks.
        """
        squares, dtype = self.squares(parameters, world_size)
        norm = total(squares.cpu().reshape(1)).sqrt()[0].to(dtype)
        return norm.to(squares.device, non_blocking=True)  # no wait: it is read before it returns

    def squares(self, parameters: Sequence[Tensor], world_size: int) -> tuple[Tensor, torch.dtype]:
        """Returns this rank's part of the squared norm, in float64, and the norm's dtype."""
        squares = torch.zeros((), dtype=torch.float64)
        with_gradients = [p for p in parameters if p.grad is not None and p.grad.numel()]
        if with_gradients:
            norms = torch._foreach_norm(
                [p.grad for p in with_gradients], 2, dtype=_wide(with_gradients)
            )
            holders = [world_size // self._copies[id(p)] for p in with_gradients]
            weights = self._shares(holders, norms[0].device)
            squares = (torch.stack(norms).double().square() * weights).sum()
        return squares, _wide(with_gradients)

    def _shares(self, holders: list[int], device: torch.device) -> Tensor:
        """Returns each shard's weight; sent to the device again only if the holders change."""
        if self._counted is None or self._counted[0] != holders:
            shares = torch.tensor([1 / h for h in holders], dtype=torch.float64, device=device)
            self._counted = holders, shares
        return self._counted[1]


def _wide(parameters: Sequence[Tensor]) -> torch.dtype:
    dtype = torch.float32
    for parameter in parameters:
        if parameter.grad is not None:
            dtype = torch.promote_types(dtype, parameter.grad.dtype)
    return dtype


def _pieces(parameter: Tensor) -> int:
    """Returns the number of shards of a parameter; ranks beyond them hold copies."""
    shard_count = 1
    if is_dtensor(parameter):
        for axis, placement in enumerate(parameter.placements):
            if not placement.is_replicate():
                shard_count *= parameter.device_mesh.size(axis)
    return shard_count


def _local_gradient(gradient: DTensor, parameter: Tensor) -> Tensor:
    """Returns the gradient's local shard, after pending sums over ranks (norms of sequences)."""
    assert is_dtensor(parameter)
    if gradient.placements != parameter.placements:
        gradient = gradient.redistribute(parameter.device_mesh, parameter.placements)
    local = gradient.to_local()
    if isinstance(local, AsyncCollectiveTensor):
        local = local.wait()
    return local


@torch.no_grad()
def full_weight(weight: Tensor, dtype: torch.dtype, first: bool) -> Tensor:
    """Returns a full weight in ``dtype`` on the first rank's host; all ranks of its mesh call it.

    It is rounded before it is sent. The return value of other ranks has no meaning.
    """
    from torch.distributed.tensor import Shard

    if not is_dtensor(weight):
        return weight.detach().to("cpu", dtype) if first else weight
    weight, mesh = weight.detach().to(dtype), weight.device_mesh
    local, placements = weight.to_local(), weight.placements
    axes = [n for n, placement in enumerate(placements) if not placement.is_replicate()]
    if not axes:
        return local.cpu() if first else local
    ranks = mesh.mesh[tuple(slice(None) if n in axes else 0 for n in range(mesh.ndim))]
    if any(type(placements[n]) is not Shard for n in axes):  # FSDP2 after tensor parallelism
        axes, ranks = axes[::-1], ranks.permute(*range(len(axes) - 1, -1, -1))
    cuts = [(placements[n].dim, mesh.size(n)) for n in axes]
    return join_on_first(local, weight.shape, cuts, ranks.flatten().tolist())


@torch.no_grad()
def join_on_first(
    local: Tensor, shape: Sequence[int], cuts: Sequence[tuple[int, int]], ranks: Sequence[int]
) -> Tensor:
    """Returns all shards of a weight on the host of the first of ``ranks``.

    No other memory is taken than the full tensor and one shard. The return value of other ranks
    has no meaning; those in ``ranks`` call it.

    Args:
        cuts: (dimension, number of shards), as ``torch.chunk`` makes them; each cuts the shards
            of the one before.
        ranks: of the shards, in this order.
    """
    device, rank = message_device(), dist.get_rank()
    if rank != ranks[0]:
        if rank in ranks and local.numel():
            dist.send(local.to(device).contiguous(), dst=ranks[0])
        return local
    full = torch.empty(tuple(shape), dtype=local.dtype)
    shards = [full]
    for dim, count in cuts:
        shards = [part for shard in shards for part in _chunks(shard, dim, count)]
    for source, part in zip(ranks, shards, strict=True):
        if source == rank:
            part.copy_(local)
        elif part.numel():
            received = torch.empty(part.shape, dtype=part.dtype, device=device)
            dist.recv(received, src=source)
            part.copy_(received)
    return full


def _chunks(full: Tensor, dim: int, count: int) -> list[Tensor]:
    """Returns exactly ``count`` views, the last ones empty if there are too few rows."""
    views = [*full.split(-(-full.shape[dim] // count) or 1, dim)]
    return views + [full.narrow(dim, 0, 0)] * (count - len(views))
