"""The layout behind pipeline: ranks in pipelines, each rank with its stages of one."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from hasten.core.contracts import Dense, Wire
from hasten.core.layout import gradients_of, total_norm
from hasten.core.setup import Setup
from hasten.errors import InputError
from hasten.parts.distributed.ddp import reduce_now
from hasten.parts.distributed.pipeline.runtime import Settings
from hasten.parts.distributed.pipeline.stages import is_end
from hasten.techniques.layout.layout_stages_cut import Cut, DealsCut
from hasten.techniques.wire.wire_compressed import Compressed


class Stages(DealsCut):
    """``data_size`` pipelines side by side; neighbouring ranks make up one of them.

    Stages that several pipelines have are copies: their gradients are averaged when all passes of a
    step are done, in DistributedDataParallel's buckets and by the wire's codec.
    """

    whole = False

    def __init__(self, setup: Setup, settings: Settings) -> None:
        world = setup.facts.world
        if world.size % settings.ranks:
            raise InputError(
                f"pipeline: {world.size} ranks can't be dealt into pipelines of {settings.ranks} "
                "stages; make nproc a multiple of stages"
            )
        self.settings = settings
        self.size, self.data_size = world.size, world.size // settings.ranks
        self.averages = self.data_size
        self.data_rank, stage = divmod(world.rank, settings.ranks)
        self.cut = Cut(
            setup, settings, stage, not self.data_rank, lambda: self.mesh.get_group("pp")
        )
        self._device = torch.device(setup.job.device)
        self._replicas: DistributedDataParallel | None = None

    @cached_property
    def mesh(self) -> DeviceMesh:
        """Pipelines x stages; made once, when all ranks come here."""
        shape, names = (self.data_size, self.settings.ranks), ("dp", "pp")
        return init_device_mesh(self._device.type, shape, mesh_dim_names=names)

    def split(self, module: nn.Module) -> nn.Module:
        return self.cut.split(module)

    def within(self, module: nn.Module) -> nn.Module:
        return module

    def across(self, module: nn.Module, wire: Wire) -> nn.Module:
        check_wire(wire, self.data_size)
        if self.data_size > 1:
            group = self.mesh.get_group("dp")
            self._replicas = DistributedDataParallel(module, process_group=group)
            wire.attach(self._replicas)
        return module

    def sync(self, module: nn.Module, last: bool) -> AbstractContextManager[Any]:
        return nullcontext()

    def average(self) -> None:
        """Gradients of this rank's stages over the pipelines; experts without tokens bring 0."""
        if self._replicas is not None:
            reduce_now(self._replicas)

    def carrier(self, parameters: Sequence[Tensor]) -> Tensor | None:
        """The tied weight among the true weights: itself, or its master."""
        return next((p for p in parameters if is_end(p)), None)

    def sum(self, values: Tensor) -> Tensor:
        return self.everywhere(values) / self.settings.ranks

    def of_layers(self, values: Tensor) -> Tensor:
        """The sum over data ranks of what each rank knows of its own layers, 0 of the others'."""
        return self.everywhere(values)

    def everywhere(self, values: Tensor) -> Tensor:
        moved = values.to(self._device, copy=True)
        dist.all_reduce(moved)
        return moved.cpu()

    def norm(self, parameters: Sequence[Tensor]) -> Tensor:
        """Squares summed over stages; a tied head counts where it embeds."""
        twice = None if self.cut.tied.counts else self.carrier(parameters)
        own = total_norm(gradients_of([p for p in parameters if p is not twice]))
        squares = own.to(self._device, torch.float64) ** 2
        dist.all_reduce(squares, group=self.cut.group)
        return squares.sqrt().to(own.dtype)

    def gather(self, model: nn.Module) -> AbstractContextManager[bool]:
        return nullcontext(False) if self.data_rank else self.cut.put_together()


def check_wire(wire: Wire, pipelines: int) -> None:
    """InputError for a wire that can't carry what the pipelines exchange."""
    if isinstance(wire, Dense):
        return
    if not isinstance(wire, Compressed):
        raise InputError(
            f"plan: pipelines average the gradients of their stages, which "
            f"{type(wire).__name__.lower()} can't do for some of the ranks; take half, quantised, "
            "topk or powersgd as the wire, or none"
        )
    if pipelines == 1:
        raise InputError(
            f"plan: {wire.kind} has nothing to compress in a single pipeline, whose ranks exchange "
            "hidden states alone; leave it out, or set stages below the number of ranks"
        )
    if wire.compressor.settings()["scope"] != "all":
        raise InputError(
            f"plan: {wire.kind} with scope hosts works on gradients of all ranks, and pipelines "
            "average stage by stage; set scope to all"
        )
