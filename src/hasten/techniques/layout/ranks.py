"""Code that techniques of several ranks share: a layout of all ranks, checks, traffic counters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hasten.core.context import JobContext
from hasten.core.layout import CommTiming, Communication, Layout, NoCompression
from hasten.core.setup import Precision
from hasten.errors import InputError, as_input_error
from hasten.machine.environment import World
from hasten.machine.lazy_torch import is_dtensor
from hasten.parts.comm.groups import sum_over_ranks
from hasten.parts.distributed.ddp import ring_bytes, under_way, watch_reducer
from hasten.parts.distributed.fsdp import reshard_all
from hasten.parts.optim.muon import MuonAdamW


class RanksLayout(Layout):
    """A layout of all ranks of the process group.

    Args:
        partners: ranks that process the same examples, each with its part of the model.
    """

    partners = 1

    def __init__(self, world: World) -> None:
        """Every rank has its own examples."""
        self.size = self.data_size = self.averages = world.size
        self.data_rank = world.rank
        self._world = world

    def all_reduce_data(self, values: Tensor) -> Tensor:
        return self.all_reduce_world(values) / self.partners

    def all_reduce_world(self, values: Tensor) -> Tensor:
        return sum_over_ranks(values)


def no_torch_distributed(context: JobContext) -> tuple[str, ...]:
    """Returns why several ranks can't work together at all; empty if they can, or on one rank."""
    if context.world.size > 1 and not dist.is_available():
        return ("this torch was built without torch.distributed",)
    return ()


@contextmanager
def of_the_same_plan(state: Mapping[str, Any], kind: str) -> Iterator[None]:
    """Context in which a communication method reads its ``state`` of a checkpoint.

    Raises:
        InputError: another technique than ``kind`` has written the state, or it doesn't fit.
    """
    if state["technique"] != kind:
        raise InputError(
            f"the checkpoint was written with {state['technique']} and the plan has {kind}; "
            "resume with the plan that wrote it, or choose another folder"
        )
    with as_input_error(kind, "; resume with the plan that wrote it"):
        yield


class StepCounts:
    """Returns by how much counts grow from step to step; None for an unknown count."""

    def __init__(self, read: Callable[[], Sequence[float | None]]) -> None:
        self._read, self._before = read, read()

    def take(self) -> list[Any]:
        """Returns the differences since the last call."""
        before, self._before = self._before, self._read()
        pairs = zip(before, self._before, strict=True)
        return [None if old is None or new is None else new - old for old, new in pairs]


class ReplicaTraffic:
    """Reads the seconds from DDP's reducer and the bytes from the communication method.

    ``late`` is set if the first bucket left after the passes, so that no computation hid it.
    """

    def __init__(self, module: DistributedDataParallel, communication: Communication) -> None:
        self.late, self._module = False, module
        self._dense = ring_bytes(module) if isinstance(communication, NoCompression) else None
        self._counts = StepCounts(lambda: [communication.sent_bytes])
        self._reducer = watch_reducer(module)

    def traffic(self) -> CommTiming | None:
        """Returns the timing of the last step; None if the reducer has no clock."""
        timing = under_way(self._module) if self._reducer else None
        late, self.late, (sent,) = self.late, False, self._counts.take()
        if timing is None:
            return None
        hidden = 0.0 if late else timing.hidden
        sent = self._dense if sent is None else sent
        return CommTiming(timing.exposed + timing.hidden - hidden, hidden, sent)


class LocalShards(Precision):
    """The true weights of a sharded module: this rank's shards, as plain tensors.

    Parameters of a sharded or split module are ``DTensor``: a shard and its placement. An update
    rule that treats each number by itself needs the shard alone. So the optimizer gets plain
    tensors over the same memory. Kernels without DTensor support then work. Shards of different
    meshes go through one call, and no operator needs the placement.

    Args:
        inner: the number format with the module's own weights (unchanged, or under autocast).
        dtype: in which blocks compute, where sharding casts their weights; None: it doesn't.
    """

    def __init__(self, inner: Precision, dtype: torch.dtype | None = None) -> None:
        self.inner, self.dtype = inner, dtype
        self._module = nn.Module()
        self._pairs: dict[int, tuple[Tensor, Tensor]] = {}  # (parameter, shard) by id of the shard

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
            group["params"] = [self._shard_of(p) for p in group["params"]]

    def _shard_of(self, parameter: Tensor) -> Tensor:
        shard = parameter
        if is_dtensor(parameter):
            shard = nn.Parameter(parameter.detach().to_local(), parameter.requires_grad)
        self._pairs[id(shard)] = parameter, shard
        return shard

    def parameter_of(self, weight: Tensor) -> Tensor:
        """Returns the parameter of a shard; any other weight is its own parameter."""
        return self._pairs.get(id(weight), (weight,))[0]

    def accumulate_gradients(self) -> None:
        """Moves the existing gradients to the shards, split like the shards."""
        for parameter, shard in self._pairs.values():
            gradient = parameter.grad
            if is_dtensor(parameter) and is_dtensor(gradient):
                if gradient.placements != parameter.placements:  # norms of sequences
                    gradient = gradient.redistribute(parameter.device_mesh, parameter.placements)
                local = gradient.to_local()  # perhaps a sum over ranks that is under way
                shard.grad = local.wait() if isinstance(local, AsyncCollectiveTensor) else local

    def parameters(self) -> list[Tensor]:
        return [shard for _, shard in self._pairs.values()]

    def update_model_weights(self) -> None:
        """Frees gathered weights of earlier passes after an update of the shards."""
        reshard_all(self._module)

    def finish(self, module: nn.Module) -> None:
        self.inner.finish(module)
