"""The layout behind fsdp2, tensor_parallel and hybrid: one mesh, split layers, sharded weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hasten.core.context import JobContext
from hasten.core.layout import CommTiming, Communication, NoCompression
from hasten.core.setup import GivenPrecision, Setup, StepNumbers
from hasten.errors import InputError, as_input_error
from hasten.machine.lazy_torch import is_dtensor
from hasten.models.memory import gathered_bytes
from hasten.parts.checkpoint.chunks import place_like
from hasten.parts.comm.compression_settings import CompressionSettings
from hasten.parts.comm.groups import MeshSizes, data_mesh
from hasten.parts.distributed import local_shards
from hasten.parts.distributed.fsdp import Sharding, is_sharded, reshard_all, send_gradients, shard
from hasten.parts.distributed.local_shards import LocalShards
from hasten.parts.optim.master_weights import MasterWeights
from hasten.techniques.communication.compressed import Compressed, Exchange, exchange_for
from hasten.techniques.layout.ranks import PartsLayout

# State of weights that are DTensors: moments in plain tensors are laid out like their weights.


class ShardedLayout(PartsLayout):
    """A layout with sharded weights.

    See ``hasten.core.layout.SplitsModel`` and ``hasten.models.weight_files.GathersWeights``.

    Args:
        technique: its name, for messages.
        weights: this rank's pieces.
    """

    pieces = True
    technique = "hybrid"
    weights: LocalShards
    _module: nn.Module

    def to_device(self, module: nn.Module, device: torch.device) -> nn.Module:
        return module  # shards are moved while they are made

    def placed(self, weight: Tensor, tensor: Tensor) -> Tensor:
        parameter = self.weights.parameter_of(weight)
        if not is_dtensor(parameter) or is_dtensor(tensor) or not tensor.ndim:  # a step count
            return tensor
        try:
            return place_like(tensor, parameter)
        except ValueError as error:
            raise InputError(
                f"{self.technique}: this optimizer keeps its state in another shape than weights "
                f"have ({error}); leave checkpoints out, or take another optimizer"
            ) from error

    @contextmanager
    def all_modules(self, model: nn.Module) -> Iterator[None]:
        reshard_all(self._module)  # after an evaluation some weights are still gathered
        yield

    def full_like(self, weight: Tensor) -> Tensor:
        return torch.empty(weight.shape, dtype=weight.dtype, device="meta")

    def gather_weight(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        return local_shards.full_weight(weight, dtype, self.keeps)


# The layout

Split = Callable[[nn.Module, DeviceMesh], nn.Module]  # splits layers over a mesh's tp axis


@dataclass(frozen=True)
class LayoutOptions:
    """Options of a technique's layout, without the sizes.

    Args:
        name: of the technique, for messages.
        whole_gradients: between the micro-batches of a step each rank keeps full gradients.
        cut: how layers are split over the ``tp`` axis; None: they aren't.
    """

    name: str
    sharding: Sharding
    whole_gradients: bool = False
    cut: Split | None = None


class MeshLayout(ShardedLayout):
    """Ranks on a mesh of copies, shards and tensor-parallel ranks."""

    def __init__(self, setup: Setup, sizes: MeshSizes, how: LayoutOptions) -> None:
        world = setup.context.world
        self.sizes, self.how = sizes, how
        super().__init__(world)
        self.partners = sizes.tp
        self.data_size = self.averages = sizes.data_size
        self.data_rank = sizes.data_rank(world.rank)
        if isinstance(setup.precision, MasterWeights):  # float32 shards are the master weights
            self.weights = LocalShards(GivenPrecision(), setup.precision.dtype)
        else:
            self.weights = LocalShards(setup.precision)
        setup.precision = self.weights
        self.technique, self.keeps, self._device = how.name, world.is_main, setup.job.device
        self._module = nn.Module()
        self._setup = setup
        self._exchange: Exchange | None = None
        self._counted = 0  # bytes that the exchange had sent before the step

    @cached_property
    def mesh(self) -> DeviceMesh:
        return self.sizes.build(torch.device(self._device).type)

    def apply_tensor_parallel(self, module: nn.Module) -> nn.Module:
        self._expect(module)
        if self.how.cut is None or self.sizes.tp == 1:
            return module
        with as_input_error(self.how.name):
            return self.how.cut(module, self.mesh["tp"])

    def apply_data_parallel(self, module: nn.Module, communication: Communication) -> nn.Module:
        self._module, sharding = module, self.how.sharding
        self._exchange = (
            None if isinstance(communication, NoCompression) else self._entered(communication)
        )
        if self.data_size > 1 or self.weights.dtype is not None:
            how = Sharding(sharding.reshard, sharding.offload, self.weights.dtype)
            mesh = data_mesh(self.mesh, self._exchange is None)
            with as_input_error(self.how.name):
                shard(module, mesh, how)
        self._fill(module, torch.device("cpu") if sharding.offload else None)
        if self._exchange is not None:
            self._exchange.attach(module)
        if not is_sharded(module):  # FSDP2 moves a group when it shards it
            module.to(torch.device(self._device))
        return module

    def _entered(self, communication: Communication) -> Exchange:
        """Returns the exchange that compresses gradients by the method's settings."""
        compressed = communication if isinstance(communication, Compressed) else None
        settings = (
            None if compressed is None else CompressionSettings(**compressed.compressor.settings())
        )
        factor = lambda: self._setup.loss_factor  # noqa: E731
        exchange = exchange_for(
            self.how.name, self.sizes, self.mesh, communication, settings, factor
        )
        if compressed is not None:
            compressed.enter(exchange, merges=self.sizes.dp == self.sizes.tp == 1)
        return exchange

    def sync(self, module: nn.Module, last: bool) -> AbstractContextManager[Any]:
        if self._exchange is not None:
            self._exchange.passes(last)
        send_gradients(module, last or not self.how.whole_gradients)
        return nullcontext()

    def traffic(self) -> CommTiming | None:
        """Returns the bytes of a step's gradients if they are counted; the seconds are unknown."""
        if self._exchange is None:
            return None
        before, self._counted = self._counted, self._exchange.sent_bytes
        return CommTiming(None, sent_bytes=self._counted - before)

    def norm(self, parameters: Sequence[Tensor]) -> Tensor:
        return self.weights.norm(parameters, self.size, self.all_reduce_world)

    def norm_and_sums(
        self, parameters: Sequence[Tensor], loss_sum: Tensor, positions: int
    ) -> tuple[Tensor, StepNumbers]:
        squares, dtype = self.weights.squares(parameters, self.size)
        # The step's only wait for a device.
        square, loss = torch.stack([squares, loss_sum.detach().to(squares)]).tolist()
        local = torch.tensor([square, loss, positions], dtype=torch.float64)
        sums = self.all_reduce_world(local)
        norm = sums[0].sqrt().to(dtype)
        norm_on_host = norm.item()
        total_loss, total_positions = (sums[1:] / self.partners).tolist()
        finite = math.isfinite(norm_on_host) and math.isfinite(total_loss)
        numbers = StepNumbers(norm_on_host, loss, finite, total_loss, total_positions)
        return norm.to(squares.device, non_blocking=True), numbers


def gathered(context: JobContext, unsharded: float = 0.0) -> float:
    """Returns the bytes that a step gathers if all weights but ``unsharded`` are in shards."""
    model = context.model
    sizes = model.hidden_size, model.layers, model.vocabulary
    return gathered_bytes(model.parameters - unsharded, *sizes)


def lay_out(setup: Setup, sizes: MeshSizes, how: LayoutOptions) -> None:
    """Sets LAYOUT; one rank needs none.

    Raises:
        InputError: the sizes don't make up the ranks that run.
    """
    if setup.context.world.size == 1 and sizes.size == 1:
        return
    with as_input_error(how.name, "; change the sizes, or nproc"):
        sizes.check(setup.context.world.size)
    setup.layout = MeshLayout(setup, sizes, how)
