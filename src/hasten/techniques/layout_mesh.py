"""The layout behind fsdp2, tensor_parallel and hybrid: one mesh, layers cut, weights sharded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hasten.core.facts import Facts
from hasten.core.setup import AsGiven, Dense, Setup, Wire, on_device
from hasten.errors import InputError
from hasten.parts.layout import whole_state
from hasten.parts.layout.local_shards import LocalShards, whole_on_first
from hasten.parts.layout.mesh import MeshSizes, data_mesh
from hasten.parts.layout.sharding import Sharding, is_sharded, send_gradients, shard
from hasten.parts.master_weights import MasterWeights

Split = Callable[[nn.Module, DeviceMesh], nn.Module]  # cut layers over a mesh's tp axis


@dataclass(frozen=True)
class How:
    """What a technique says of its layout beside the sizes.

    Args:
        name: of the technique, for messages.
        whole_gradients: between the micro-batches of a step each rank keeps whole gradients.
        cut: how layers are split over the ``tp`` axis; None: they aren't.
    """

    name: str
    sharding: Sharding
    whole_gradients: bool = False
    cut: Split | None = None


class Meshed:
    """Ranks on a mesh of copies, shards and pieces of layers."""

    whole = False
    pieces = True

    def __init__(self, setup: Setup, sizes: MeshSizes, how: How) -> None:
        world = setup.facts.world
        self.sizes, self.how = sizes, how
        self.size, self.data_size = world.size, sizes.data_size
        self.data_rank = sizes.data_rank(world.rank)
        self.averages = sizes.data_size
        self.weights = _weights(setup)
        setup.precision = self.weights
        self._first, self._device = world.is_main, setup.job.device
        self._module = nn.Module()

    @cached_property
    def mesh(self) -> DeviceMesh:
        return self.sizes.build(torch.device(self._device).type)

    def split(self, module: nn.Module) -> nn.Module:
        return module

    def within(self, module: nn.Module) -> nn.Module:
        if self.how.cut is None or self.sizes.tp == 1:
            return module
        try:
            return self.how.cut(module, self.mesh["tp"])
        except ValueError as error:
            raise InputError(f"{self.how.name}: {error}") from error

    def across(self, module: nn.Module, wire: Wire) -> nn.Module:
        if not isinstance(wire, Dense):
            raise InputError(
                f"plan: {self.how.name} moves its gradients in torch's own reduce-scatter, which "
                f"{type(wire).__name__.lower()} can't enter; leave the wire's technique out, or "
                "take ddp as the layout"
            )
        self._module = module
        sharding = self.how.sharding
        if self.data_size > 1 or self.weights.dtype is not None:
            how = Sharding(sharding.reshard, sharding.offload, self.weights.dtype)
            shard(module, data_mesh(self.mesh), how)
        return module

    def place(self, module: nn.Module) -> None:
        """Shards are there already: FSDP2 moves a group as it cuts it. What it hasn't cut moves."""
        if not is_sharded(module):
            on_device(module, self._device)

    def sync(self, module: nn.Module, last: bool) -> AbstractContextManager[Any]:
        send_gradients(module, last or not self.how.whole_gradients)
        return nullcontext()

    def sum(self, values: Tensor) -> Tensor:
        return self.everywhere(values) / self.sizes.tp

    def everywhere(self, values: Tensor) -> Tensor:
        moved = values.to(self._device, copy=True)
        dist.all_reduce(moved)
        return moved.cpu()

    def norm(self, parameters: Sequence[Tensor]) -> Tensor:
        return self.weights.norm(parameters, self.size, self.everywhere)

    def gather(self, model: nn.Module) -> AbstractContextManager[bool]:
        return whole_on_first(self._module, model, self._first)

    def whole_of(self, weight: Tensor, value: Tensor) -> Tensor:
        parameter = self.weights.parameter_of(weight)
        if not isinstance(parameter, DTensor) or not value.ndim:  # a number of steps
            return value
        try:
            return whole_state.whole_of(value, parameter, self._first)
        except ValueError as error:
            raise InputError(
                f"{self.how.name}: this optimizer keeps its state in another shape than weights "
                f"have ({error}); leave checkpoints out, or take another optimizer"
            ) from error

    def part_of(self, weight: Tensor, whole: Tensor) -> Tensor:
        parameter = self.weights.parameter_of(weight)
        if not isinstance(parameter, DTensor) or whole.shape != parameter.shape:
            return whole
        part = whole_state.part_of(whole, parameter)
        return part if parameter is weight else part.to_local()


def _weights(setup: Setup) -> LocalShards:
    """PRECISION as it works on shards: float32 pieces are masters already."""
    if isinstance(setup.precision, MasterWeights):
        return LocalShards(AsGiven(), setup.precision.dtype)
    return LocalShards(setup.precision)


def lay_out(setup: Setup, sizes: MeshSizes, how: How) -> None:
    """Fill LAYOUT; one rank needs none.

    Raises:
        InputError: the sizes don't make up the ranks that run.
    """
    if setup.facts.world.size == 1 and sizes.size == 1:
        return
    try:
        sizes.check(setup.facts.world.size)
    except ValueError as error:
        raise InputError(f"{how.name}: {error}; change the sizes, or nproc") from error
    setup.layout = Meshed(setup, sizes, how)


def no_ranks(facts: Facts) -> tuple[str, ...]:
    """Why a layout for several ranks can't work here at all."""
    if facts.world.size > 1 and not dist.is_available():
        return ("this torch was built without torch.distributed",)
    return ()
