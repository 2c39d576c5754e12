"""The engine behind pipeline: a step's micro-batches go through all stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hasten.core.contracts import AsTheModelDoes
from hasten.core.engine import Assembly, PlainEngine
from hasten.core.job import Counts, MicroBatch
from hasten.errors import InputError
from hasten.parts.distributed.pipeline.runtime import Pass, Seams, alike, nothing_beside
from hasten.parts.distributed.pipeline.schedules import enough
from hasten.techniques.layout.layout_stages import Stages
from hasten.techniques.layout.layout_stages_pieces import StagesInPieces


class PipelineEngine(PlainEngine):
    """A step's micro-batches through all stages; norm and update are the plain engine's."""

    def __init__(self, assembly: Assembly) -> None:
        super().__init__(assembly)
        layout = self.setup.layout
        if not isinstance(layout, Stages | StagesInPieces) or not self.setup.job.counted:
            raise InputError(
                "pipeline: a loss of the user's own can't be cut into stages; take ddp or fsdp2 as "
                "the layout"
            )
        self.layout, precision = layout, self.setup.precision
        self.sum_loads = layout.of_layers
        self.passes = self.filler = 0  # micro-batches so far
        self._filled: list[MicroBatch] = []  # of the step, as they run
        self._stage_pass = _StagePass()
        plain = isinstance(self.setup.routing, AsTheModelDoes)
        beside = nothing_beside if plain else self._heard
        self.runner = layout.cut.start(Seams(precision.region, precision.collect, beside))

    def gradients(self, micro_batches: Sequence[MicroBatch], denominator: float) -> Tensor:
        layout, precision = self.layout, self.setup.precision
        settings, given = layout.settings, len(micro_batches)
        count = enough(settings.schedule, settings.ranks, given)
        try:
            pieces = alike([m.inputs for m in micro_batches], count)
        except ValueError as error:
            raise InputError(f"pipeline: {error}") from error
        self._filled = [
            MicroBatch(inputs, m.counts, m.records)
            for inputs, m in zip(pieces, micro_batches, strict=False)
        ]
        self._filled += [MicroBatch(inputs, Counts()) for inputs in pieces[given:]]
        precision.before_backward(reduces=False)
        scale = self.setup.loss_scale.value * layout.averages / (denominator or 1.0)
        self._loss = self.runner.run(pieces, scale)
        if layout.data_size > 1:
            precision.before_backward(reduces=True)
            layout.average()
            precision.collect()
        # After the average: a codec may round the two ends of a tied weight apart.
        layout.cut.tied.add(layout.carrier(precision.parameters()))
        self.passes, self.filler = self.passes + count, self.filler + count - given
        return self._loss

    def _heard(self, number: int, run: Pass) -> tuple[Tensor, Tensor | None]:
        """ROUTING listens to a stage's pass as it does to a whole model's."""
        if not (self.module.training and torch.is_grad_enabled()):  # an evaluation, or a probe
            return run(), None
        stage_pass = self._stage_pass
        stage_pass.run = run
        more, _ = self.setup.routing.forward(stage_pass, self._filled[number])
        out, stage_pass.out = stage_pass.out, None
        assert out is not None  # the pass has run
        return out, more


class _StagePass(nn.Module):
    """A stage's pass in the shape of a loss module, whose own share of the loss is nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.run: Pass | None = None
        self.out: Tensor | None = None

    def forward(self, labels: Tensor, **inputs: Any) -> tuple[Tensor, Tensor]:
        assert self.run is not None  # the engine sets it
        self.out, self.run = self.run(), None
        return torch.zeros((), device=labels.device), (labels != -100).sum()
