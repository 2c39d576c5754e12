"""The layout and the engine behind pipeline: ranks in pipelines, each rank with its stages."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hasten.core.batch import MicroBatch
from hasten.core.checkpointing import NoCheckpoint
from hasten.core.engine import Assembly, PlainEngine
from hasten.core.layout import gradients_of, total_norm
from hasten.core.routing import AsTheModelDoes
from hasten.core.setup import Dense, Setup, Wire, leave, once
from hasten.errors import InputError
from hasten.parts.layout import partition
from hasten.parts.layout.pipeline import hidden_shape
from hasten.parts.layout.pipeline_batches import alike
from hasten.parts.layout.pipeline_ranks import RanksRunner
from hasten.parts.layout.pipeline_schedules import enough
from hasten.parts.layout.pipeline_stages import LanguageModel
from hasten.parts.layout.pipeline_tied import TiedHead
from hasten.parts.layout.pipeline_whole import Pruned, prune, put_together
from hasten.parts.layout.pipeline_work import Seams, Settings, Work


class Stages:
    """``data_size`` pipelines side by side; neighbouring ranks make up one of them."""

    averages = 1  # gradients of the pipelines are added
    whole = False

    def __init__(self, setup: Setup, settings: Settings) -> None:
        world = setup.facts.world
        if world.size % settings.ranks:
            raise InputError(
                f"pipeline: {world.size} ranks can't be dealt into pipelines of {settings.ranks} "
                "stages; make nproc a multiple of stages"
            )
        self.setup, self.settings = setup, settings
        self.size, self.data_size = world.size, world.size // settings.ranks
        self.data_rank, self.stage = divmod(world.rank, settings.ranks)
        self.sizes: tuple[int, ...] = ()  # layers of each stage
        self.tied: TiedHead | None = None
        self.runner: RanksRunner | None = None
        self._device = torch.device(setup.job.device)
        self._mesh: DeviceMesh | None = None
        self._pruned: Pruned | None = None

    @property
    def mesh(self) -> DeviceMesh:
        """Pipelines x stages; made once, when all ranks come here."""
        if self._mesh is None:
            shape, names = (self.data_size, self.settings.ranks), ("dp", "pp")
            self._mesh = init_device_mesh(self._device.type, shape, mesh_dim_names=names)
        return self._mesh

    def split(self, module: nn.Module) -> nn.Module:
        """Cut by cost, and let go what other ranks hold; evaluation goes through all stages."""
        check_company(self.setup)
        try:
            whole = LanguageModel(module)
            costs, first, last = whole.costs()
            self.sizes = partition.balanced(costs, len(self.settings.homes), first, last)
        except (ValueError, AttributeError) as error:
            raise InputError(f"pipeline: {error}") from error
        group = self.mesh.get_group("pp")
        self.tied = TiedHead(whole, self.settings.homes, group)
        self._pruned = prune(whole, self.sizes, self.settings.homes, self.stage)
        loss: Any = module
        loss.forward = self._evaluate  # of this instance; the class's own runs in the last stage
        return module

    def within(self, module: nn.Module) -> nn.Module:
        return module

    def across(self, module: nn.Module, wire: Wire) -> nn.Module:
        if not isinstance(wire, Dense):
            raise InputError(
                "plan: pipeline adds up its gradients between pipelines itself, which "
                f"{type(wire).__name__.lower()} can't enter; leave the wire's technique out, or "
                "take ddp as the layout"
            )
        return module

    def start(self, seams: Seams) -> RanksRunner:
        """The runner of this rank's stages, over the modules as they are now."""
        assert self._pruned is not None  # split() comes first
        whole, spans = self._pruned.model, partition.ranges(self.sizes)
        own = {
            index: whole.stage(spans[index])
            for index, home in enumerate(self.settings.homes)
            if home == self.stage
        }
        work = Work(self.settings, seams, self._device)
        group = self.mesh.get_group("pp")
        shape = hidden_shape(whole.causal.config.hidden_size, lambda: whole.dtype)
        self.runner = RanksRunner(own, work, group, self._device, shape)
        return self.runner

    def _evaluate(self, **inputs: Any) -> tuple[Tensor, Tensor]:
        assert self.runner is not None  # the engine has started it
        with torch.no_grad():
            total = self.runner.evaluate(inputs)
        return total, (inputs["labels"] != -100).sum()

    def sync(self, module: nn.Module, last: bool) -> AbstractContextManager[Any]:
        return nullcontext()

    def add_up(self, parameters: Sequence[Tensor]) -> None:
        """Gradients of this rank's stages, over the pipelines; experts without tokens bring 0."""
        if self.data_size == 1:
            return
        by_format: dict[torch.dtype, list[Tensor]] = {}
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            by_format.setdefault(parameter.grad.dtype, []).append(parameter.grad)
        for gradients in by_format.values():
            flat = torch.cat([g.flatten() for g in gradients])
            dist.all_reduce(flat, group=self.mesh.get_group("dp"))
            parts = flat.split([g.numel() for g in gradients])
            for gradient, part in zip(gradients, parts, strict=True):
                gradient.copy_(part.view_as(gradient))

    def carrier(self, parameters: Sequence[Tensor]) -> Tensor | None:
        """The tied weight among the true weights: itself, or the master of its shape."""
        if self.tied is None or self.tied.weight is None:
            return None
        weight = self.tied.weight
        alike = [p for p in parameters if p is weight or p.shape == weight.shape]
        return next((p for p in alike if p is weight), alike[0] if alike else None)

    def sum(self, values: Tensor) -> Tensor:
        return self.everywhere(values) / self.settings.ranks

    def everywhere(self, values: Tensor) -> Tensor:
        moved = values.to(self._device, copy=True)
        dist.all_reduce(moved)
        return moved.cpu()

    def norm(self, parameters: Sequence[Tensor]) -> Tensor:
        """Squares summed over stages; a tied head counts where it embeds."""
        twice = self.carrier(parameters) if self.tied and not self.tied.counts else None
        own = total_norm(gradients_of([p for p in parameters if p is not twice]))
        squares = own.to(self._device, torch.float64) ** 2
        dist.all_reduce(squares, group=self.mesh.get_group("pp"))
        return squares.sqrt().to(own.dtype)

    def gather(self, model: nn.Module) -> AbstractContextManager[bool]:
        if self.data_rank or self._pruned is None:
            return nullcontext(False)
        return put_together(self._pruned, self.mesh.get_group("pp"))


def check_company(setup: Setup) -> None:
    """InputError for techniques that reach into passes which a pipeline runs itself."""
    taken = {
        "recompute": setup.recompute is not leave,
        "compiled": setup.compile is not leave,
        "adaptive_batch": setup.attempt is not once,
        "balanced_routing": not isinstance(setup.routing, AsTheModelDoes),
        "checkpoints": not isinstance(setup.checkpoint, NoCheckpoint),
    }
    advice = {"recompute": "set pipeline's checkpoint: always in its place"}
    for name, there in taken.items():
        if there:
            raise InputError(
                f"plan: {name} doesn't work under pipeline, whose passes and stages it doesn't "
                f"see; {advice.get(name, 'leave it out, or take another layout')}"
            )


class PipelineEngine(PlainEngine):
    """A step's micro-batches through all stages; norm and update are the plain engine's."""

    def __init__(self, assembly: Assembly) -> None:
        super().__init__(assembly)
        layout = self.setup.layout
        if not isinstance(layout, Stages) or not self.setup.job.counted:
            raise InputError("pipeline: a loss of the user's own can't be cut into stages")
        self.layout = layout
        precision = self.setup.precision
        self.runner = layout.start(Seams(precision.region, precision.collect))
        self.passes = self.filler = 0  # micro-batches so far

    def gradients(self, micro_batches: Sequence[MicroBatch], denominator: float) -> Tensor:
        settings, precision = self.layout.settings, self.setup.precision
        count = enough(settings.schedule, settings.ranks, len(micro_batches))
        try:
            pieces = alike([m.inputs for m in micro_batches], count)
        except ValueError as error:
            raise InputError(f"pipeline: {error}") from error
        precision.before_backward(reduces=False)
        scale = self.setup.loss_scale.value / (denominator or 1.0)
        self._loss = self.runner.run(pieces, scale)
        parameters = precision.parameters()
        if self.layout.tied is not None:
            self.layout.tied.add(self.layout.carrier(parameters))
        self.layout.add_up(parameters)
        self.passes, self.filler = self.passes + count, self.filler + count - len(micro_batches)
        return self._loss
