"""The layout behind hybrid's pipelines of pieces: stages whose weights are sharded, layers cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hasten.core.contracts import Dense, Wire
from hasten.core.setup import Setup, on_device
from hasten.errors import InputError
from hasten.models.tensor_plans import TENSOR_PLANS
from hasten.parts.distributed.fsdp import shard_stage
from hasten.parts.distributed.local_shards import LocalShards, whole_on_first
from hasten.parts.distributed.mesh import MeshSizes, data_mesh
from hasten.parts.distributed.pipeline.runtime import Settings
from hasten.parts.distributed.tensor_parallel import split_layers
from hasten.parts.optim.master_weights import MasterWeights
from hasten.techniques.layout import layout_dealt
from hasten.techniques.layout.layout_stages_cut import Cut, DealsCut
from hasten.techniques.layout.tensor import refuse_other_code


class StagesInPieces(DealsCut):
    """Pipelines of ``settings.ranks`` stages, each stage on copies, shards and pieces of layers.

    Ranks are numbered with ``tp`` innermost and stages next to it, so that what talks most are
    neighbours. Hidden states travel whole; embedding and head are whole on each piece's rank.
    """

    whole = False
    pieces = True

    def __init__(self, setup: Setup, settings: Settings, sizes: MeshSizes) -> None:
        world = setup.facts.world
        if sizes.size * settings.ranks != world.size:
            raise InputError(
                f"hybrid: {sizes} x pp {settings.ranks} is {sizes.size * settings.ranks} ranks and "
                f"{world.size} are running; change the sizes, or nproc"
            )
        if isinstance(setup.precision, MasterWeights):
            raise InputError(
                "hybrid: bf16_master_weights doesn't know the pieces of a pipeline's stages; take "
                "autocast, or pp beside dp alone"
            )
        self.sizes, self.settings = sizes, settings
        self.size, self.data_size, self.averages = world.size, sizes.data_size, sizes.data_size
        lane, self._piece = divmod(world.rank, sizes.tp)
        self.data_rank, stage = divmod(lane, settings.ranks)
        self._keeps = self.data_rank == self._piece == 0  # one rank of each stage
        self.cut = Cut(setup, settings, stage, self._keeps, lambda: self.mesh.get_group("pp"))
        self.weights = LocalShards(setup.precision)
        setup.precision = self.weights
        self._device, self._module = torch.device(setup.job.device), nn.Module()

    @cached_property
    def mesh(self) -> DeviceMesh:
        shape = (self.sizes.dp, self.sizes.shard, self.settings.ranks, self.sizes.tp)
        names = ("dp", "shard", "pp", "tp")
        return init_device_mesh(self._device.type, shape, mesh_dim_names=names)

    def split(self, module: nn.Module) -> nn.Module:
        return self.cut.split(module)

    def within(self, module: nn.Module) -> nn.Module:
        if self.sizes.tp == 1:
            return module
        refuse_other_code(self.cut.setup, "hybrid")
        causal = self.cut.model.causal
        plan = TENSOR_PLANS.get(causal.config.model_type)
        if plan is None:
            raise InputError(
                f"hybrid: how to cut the layers of {type(causal).__name__} isn't known"
            )
        try:
            split_layers(causal, self.mesh["tp"], plan, sequence=False)
        except ValueError as error:
            raise InputError(f"hybrid: {error}") from error
        return module

    def across(self, module: nn.Module, wire: Wire) -> nn.Module:
        if not isinstance(wire, Dense):
            raise InputError(
                "plan: stages in pieces move their gradients in torch's own reduce-scatter, which "
                "no wire enters here; leave the wire's technique out, or give pp beside dp alone"
            )
        self._module = module
        if self.data_size > 1:
            for stage in self.cut.stages.values():
                shard_stage(stage, self.cut.model.trunk.layers, data_mesh(self.mesh))
        return module

    def place(self, module: nn.Module) -> None:
        """Shards are on the device already; what isn't sharded goes there."""
        if self.data_size == 1:
            on_device(module, str(self._device))

    def sync(self, module: nn.Module, last: bool) -> AbstractContextManager[Any]:
        return nullcontext()

    def average(self) -> None:
        """Nothing is left to do: each backward pass has averaged its gradients."""

    def carrier(self, parameters: Sequence[Tensor]) -> Tensor | None:
        """This rank's piece of the tied weight."""
        if self.cut.tied.weight is None:
            return None
        model = self.cut.model
        end = model.trunk.embed_tokens if self.cut.tied.counts else model.causal.lm_head
        owners = self.weights.parameter_of
        return next((p for p in parameters if owners(p) is end.weight), None)

    def sum(self, values: Tensor) -> Tensor:
        return self.everywhere(values) / (self.settings.ranks * self.sizes.tp)

    def of_layers(self, values: Tensor) -> Tensor:
        """The sum over data ranks of what each rank knows of its own layers, 0 of the others'."""
        return self.everywhere(values) / self.sizes.tp

    def everywhere(self, values: Tensor) -> Tensor:
        moved = values.to(self._device, copy=True)
        dist.all_reduce(moved)
        return moved.cpu()

    def norm(self, parameters: Sequence[Tensor]) -> Tensor:
        """Each piece counts once among the ranks of its stage; a tied head where it embeds."""
        twice = None if self.cut.tied.counts else self.carrier(parameters)
        counted = [p for p in parameters if p is not twice]
        return self.weights.norm(counted, self.size // self.settings.ranks, self.everywhere)

    @contextmanager
    def gather(self, model: nn.Module) -> Iterator[bool]:
        """First each stage is made whole, on one rank, then all of them on the first."""
        with whole_on_first(self._module, model, self._keeps) as kept:
            if not kept:
                yield False
                return
            with self.cut.put_together() as first:
                yield first

    def whole_of(self, weight: Tensor, value: Tensor) -> Tensor:
        """Whole on one rank of the stage; ``brought`` takes it to the first."""
        return layout_dealt.whole_of("hybrid", self.weights, weight, value, self._keeps)

    def part_of(self, weight: Tensor, whole: Tensor) -> Tensor:
        return layout_dealt.part_of(self.weights, weight, whole)
