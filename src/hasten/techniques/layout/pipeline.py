"""LAYOUT: each rank holds some of the layers, and micro-batches pass from rank to rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from hasten.core.context import JobContext
from hasten.core.job import MicroBatch, WorkCounts
from hasten.core.setup import EngineParts, Session, Setup
from hasten.core.slot import Slot
from hasten.core.step import PlainEngine, forward_of
from hasten.core.technique import EffectCheck, Fidelity, Forecast, Technique, knob, setting
from hasten.errors import InputError, as_input_error
from hasten.parts.comm.groups import MeshSizes
from hasten.parts.data import collate
from hasten.parts.distributed.pipeline.runtime import (
    CHECKPOINTS,
    Pass,
    PipelineSettings,
    PipelineWork,
    equal_micro_batches,
)
from hasten.parts.distributed.pipeline.schedules import (
    SCHEDULES,
    enough_micro_batches,
    stages_per_rank,
)
from hasten.parts.distributed.pipeline.stages import KNOWN
from hasten.techniques.layout.parallel import LayoutOptions, ParallelLayout, forecast, lay_out
from hasten.techniques.layout.ranks import no_torch_distributed

# The engine behind pipeline: runs a step's micro-batches through all stages.


class PipelineEngine(PlainEngine):
    """Runs a step's micro-batches through all stages; norm and update are the plain engine's."""

    def __init__(self, assembly: EngineParts) -> None:
        super().__init__(assembly)
        layout = self.setup.layout
        pipe = layout.pipe if isinstance(layout, ParallelLayout) else None
        if not isinstance(layout, ParallelLayout) or pipe is None or not self.setup.job.counted:
            raise InputError(
                "pipeline: a loss of the user's own can't be cut into stages; take ddp or fsdp2 as "
                "the layout"
            )
        self.layout, self.pipe, precision = layout, pipe, self.setup.precision
        self.sum_loads = layout.of_layers
        self.passes = self.filler = 0  # number of micro-batches so far
        self._filled: list[MicroBatch] = []  # micro-batches of the step in their order
        device = torch.device(self.setup.job.device)
        hooks = precision.region, precision.accumulate_gradients, self._run_watched
        self.runner = pipe.start(PipelineWork(pipe.settings, device, *hooks))

    def gradients(self, micro_batches: Sequence[MicroBatch], denominator: float) -> Tensor:
        layout, precision = self.layout, self.setup.precision
        settings, original_count = self.pipe.settings, len(micro_batches)
        count = enough_micro_batches(settings.schedule, settings.ranks, original_count)
        with as_input_error("pipeline"):
            resolved = [self.pipe.with_divergence(m.inputs) for m in micro_batches]
            pieces = equal_micro_batches(resolved, count)
        self._filled = [
            MicroBatch(inputs, m.counts, m.examples) if m else MicroBatch(inputs, WorkCounts())
            for inputs, m in zip_longest(pieces, micro_batches)
        ]
        if self.setup.indexer is not None:
            self._filled = [self.setup.indexer.marked(micro_batch) for micro_batch in self._filled]
            pieces = [dict(micro_batch.inputs) for micro_batch in self._filled]
        precision.before_backward(reduces=False)
        scale = self.setup.loss_factor * layout.averages / (denominator or 1.0)
        loss_sum = self.runner.run(pieces, scale)
        if layout.data_size > 1:
            precision.before_backward(reduces=True)
            layout.send(self.module)
            precision.accumulate_gradients()
        # Copied after the average, because a codec may round the two copies of a tied weight
        # differently.
        self.pipe.tied.add(layout.carrier(precision.parameters()))
        self.passes, self.filler = self.passes + count, self.filler + count - original_count
        return loss_sum

    def _run_watched(self, number: int, run: Pass) -> tuple[Tensor, Tensor | None]:
        """Runs a stage's pass under ROUTING, as a full model's pass."""
        routing = self.setup.routing
        if routing is None or not (self.module.training and torch.is_grad_enabled()):
            return run(), None  # an evaluation or a probe needs no routing
        stage_pass = _StagePass(run)
        more, _ = forward_of(routing, stage_pass, self._filled[number])
        return stage_pass.out, more


class _StagePass(nn.Module):
    """A stage's pass in the form of a loss module; its own loss is zero."""

    out: Tensor

    def __init__(self, run: Pass) -> None:
        super().__init__()
        self._run = run

    def forward(self, labels: Tensor, **inputs: Any) -> tuple[Tensor, Tensor]:
        self.out = self._run()
        return torch.zeros((), device=labels.device), (labels != -100).sum()


@dataclass(frozen=True)
class Pipeline(Technique):
    """The layers in stages, one per rank; several micro-batches are in progress at a time.

    Of more ranks than ``stages`` every ``stages`` neighbours are one pipeline, and gradients are
    averaged between the pipelines.
    """

    slot = Slot.LAYOUT
    fidelity = Fidelity.ROUNDING
    stages: int = setting(0, "ranks of one pipeline; 0: all there are", least=0)
    micro_batch_size: int = knob(
        1,
        "examples of a micro-batch; 0: as BATCH and SAMPLER cut them",
        low=1,
        high=64,
        log=True,
        least=0,
    )
    schedule: str = knob("1f1b", "order of passes on a rank", choices=SCHEDULES)
    checkpoint: str = knob(
        "never", "micro-batches with recomputation in the backward pass", choices=CHECKPOINTS
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.settings_on(1)  # raises ValueError

    def apply(self, setup: Setup) -> None:
        world = setup.context.world.size
        stages = self.ranks(world)
        sizes = MeshSizes(dp=max(world // stages, 1), pp=stages)
        self.lay_out(setup, LayoutOptions(self.name(), sizes))

    def settings_on(self, world_size: int) -> PipelineSettings:
        return PipelineSettings(self.schedule, self.ranks(world_size), self.checkpoint)

    def lay_out(self, setup: Setup, how: LayoutOptions) -> None:
        """Sets a layout; with several stages also the engine that runs them."""
        if how.sizes.pp == 1:
            lay_out(setup, how)
            return
        lay_out(setup, replace(how, pipeline=self.settings_on(how.sizes.pp)))
        setup.engine = PipelineEngine
        if not self.micro_batch_size:
            return
        before = setup.split_micro_batches

        def smaller(examples: Sequence[Any]) -> list[list[Any]]:
            pieces = before(examples)
            return [p for part in pieces for p in collate.by_count(part, self.micro_batch_size)]

        setup.split_micro_batches = smaller

    def ranks(self, world_size: int) -> int:
        """Returns the number of ranks in one pipeline."""
        return self.stages or world_size

    def unsupported_reasons(self, context: JobContext) -> tuple[str, ...]:
        ranks = self.ranks(context.world.size)
        reasons = [*no_torch_distributed(context), *self.unsupported_stages(context, ranks)]
        if context.world.size % ranks:
            reasons.append(
                f"{context.world.size} ranks can't be dealt into pipelines of {ranks} stages; make "
                "nproc a multiple of stages"
            )
        return tuple(reasons)

    def unsupported_stages(self, context: JobContext, ranks: int) -> list[str]:
        """Returns why this model's layers can't be stages on so many ranks."""
        layers = context.model.layers
        architecture, reasons = context.model.architecture, [*context.model.why_not_of(KNOWN)]
        if context.model.router_loss:
            reasons.append(
                f"the last stage computes the loss, and that of {architecture} has a part for the "
                "routers of all stages; set output_router_logits to false in its config.json"
            )
        wanted = ranks * stages_per_rank(self.schedule)
        if 0 < layers < wanted:
            reasons.append(
                f"{self.schedule} on {ranks} ranks needs {wanted} stages and {architecture} has "
                f"{layers} layers here; take fewer stages"
            )
        return reasons

    def forecast(self, context: JobContext) -> Forecast:
        """Forecasts the rank's part of the weights; hidden states are sent instead of gradients."""
        return forecast(context, MeshSizes(pp=self.ranks(context.world.size)))

    def check_effect(self, session: Session) -> EffectCheck:
        engine = session.engine
        if not isinstance(engine, PipelineEngine):
            return EffectCheck(False, "one rank holds all layers")
        layout, pipe = engine.layout, engine.pipe
        layers, schedule = "+".join(map(str, pipe.layers)), pipe.settings.schedule
        holder = session.module if layout.weights is None else layout.weights
        local_count = sum(p.numel() for p in holder.parameters())
        return EffectCheck(
            engine.passes > 0 and session.progress.step > 0,
            f"{layout.data_size} pipeline(s) of {layers} layers, {schedule}; this rank holds "
            f"{local_count:,} weights; {engine.passes} micro-batches, {engine.filler} of them "
            f"filler, in {session.progress.step} steps",
        )
