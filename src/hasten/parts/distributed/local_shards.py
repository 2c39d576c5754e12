"""Local shards of a distributed model as plain tensors: optimizer, norm, saving.

Parameters of a sharded or split module are ``DTensor``: a shard and its placement. An
update rule that treats each number by itself needs the shard alone. So the optimizer
gets plain tensors over the same memory. Kernels without DTensor support then work.
Shards of different meshes go through one call, and no operator needs the placement.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
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
from hasten.parts.nn.late_weights import box_of
from hasten.parts.optim.muon import MuonAdamW

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


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


def _local_gradient(gradient: DTensor, parameter: Tensor) -> Tensor:
    """Returns the gradient's local shard, after pending sums over ranks (norms of sequences)."""
    assert is_dtensor(parameter)
    if gradient.placements != parameter.placements:
        gradient = gradient.redistribute(parameter.device_mesh, parameter.placements)
    local = gradient.to_local()
    if isinstance(local, AsyncCollectiveTensor):
        local = local.wait()
    return local


def norms_of(parameters: Sequence[Tensor]) -> tuple[Tensor, torch.dtype]:
    """Returns the norm of each gradient in float64, and the format they were computed in.

    All have a gradient. It is float32 or wider, so that no sum of squares overflows.
    """
    gradients = [p.grad for p in parameters]
    dtype = functools.reduce(torch.promote_types, [g.dtype for g in gradients], torch.float32)
    if not gradients:
        return torch.zeros(0, dtype=torch.float64), dtype
    return torch.stack(torch._foreach_norm(gradients, 2, dtype=dtype)).double(), dtype


@torch.no_grad()
def full_weight(weight: Tensor, dtype: torch.dtype, first: bool) -> Tensor:
    """Returns a full weight in ``dtype`` on the first rank's host; all ranks of its mesh call it.

    It is rounded before it is sent. No other memory is taken than the full tensor and one shard.
    The return value of other ranks has no meaning.
    """
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

    if not is_dtensor(weight):
        return weight.detach().to("cpu", dtype) if first else weight
    mesh, placements, rank = weight.device_mesh, weight.placements, dist.get_rank()
    local, device = weight.detach().to(dtype).to_local(), message_device()
    axes = tuple(0 if cut.is_replicate() else slice(None) for cut in placements)
    ranks = mesh.mesh[axes].flatten().tolist()
    if rank != ranks[0]:
        if rank in ranks and local.numel():
            dist.send(local.to(device).contiguous(), dst=ranks[0])
        return local
    full = torch.empty(tuple(weight.shape), dtype=dtype)
    for source in ranks:
        coordinate = (mesh.mesh == source).nonzero()[0].tolist()
        size, start = _compute_local_shape_and_global_offset(
            weight.shape, mesh.shape, coordinate, placements
        )
        part = box_of(full, start, size)
        if source == rank:
            part.copy_(local)
        elif part.numel():
            received = torch.empty(part.shape, dtype=dtype, device=device)
            dist.recv(received, src=source)
            part.copy_(received)
    return full
