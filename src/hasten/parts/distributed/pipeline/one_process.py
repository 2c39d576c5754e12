"""Pipelines in one process, over its devices.

:class:`LocalRunner` runs the schedules of
:class:`~hasten.parts.distributed.pipeline.model.AsyncPipeline`, which order the backward passes as
well. :class:`PipeDream` is an ``nn.Sequential`` that is called like the model:

    model = PipeDream(model, num_worker=4, chunks=8, checkpoint="always")
    loss = criterion(model(x), y)
    loss.backward()
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recomputed

from hasten.errors import require_whole
from hasten.parts.comm.groups import world_size
from hasten.parts.distributed.pipeline.runtime import PipelineSettings, PipelineWork
from hasten.parts.distributed.pipeline.schedules import orders, simulate
from hasten.parts.distributed.pipeline.stages import Inputs, Layers, balanced_layers, ranges


def stage_devices(ranks: int, device: torch.device) -> list[torch.device]:
    """Returns the devices of one process's stages: all accelerators, or the model's device."""
    if device.type == "cpu":
        return [device]
    count = min(ranks, torch.accelerator.device_count())
    return [torch.device(device.type, index) for index in range(count)]


class LocalRunner:
    """All stages in one process, each on its own device or all on one.

    One thread starts each pass as soon as its inputs exist, rank by rank in the schedule's order.
    On accelerators a pass is only queued. So devices work at the same time, and copies between
    them overlap with it. On a CPU passes follow each other. The two halves of a backward pass
    (I and W) run together: autograd frees what it saved after the first.
    """

    def __init__(
        self, stages: Mapping[int, nn.Module], work: PipelineWork, devices: Sequence[torch.device]
    ) -> None:
        self.work, self._stages = work, stages
        self._devices = [devices[home % len(devices)] for home in work.settings.homes]
        self._sent: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}  # (input, output)
        self._returned: dict[tuple[int, int], Tensor] = {}  # gradients for the previous stage
        for index, stage in stages.items():
            stage.to(self._devices[index])

    def run(self, micro_batches: Sequence[Inputs], scale: float) -> Tensor:
        """Computes gradients of ``scale`` x the summed losses; the unscaled sum."""
        settings, work = self.work.settings, self.work
        listed = orders(settings.schedule, settings.ranks, len(micro_batches))
        work.begin([dict(m) for m in micro_batches], scale=scale)
        self._sent.clear()  # messages of a failed step must not be used
        self._returned.clear()
        for planned in simulate([[(op,) for op in ops] for ops in listed], lambda op: 0.0):
            if planned.kind != "W":
                kind, run = ("F", self._forward) if planned.kind == "F" else ("B", self._backward)
                with work.noting(kind, planned.stage, planned.micro_batch):
                    run(planned.stage, planned.micro_batch)
        return work.total

    def _forward(self, stage: int, number: int) -> None:
        hidden = None
        if stage:
            hidden = self._to(self._sent[stage - 1, number][1].detach(), stage)
            hidden = hidden.requires_grad_(hidden.is_floating_point())
        inputs: Any = self.work.batches[number]  # a micro-batch is sent with its hidden states
        for name, value in inputs.items():
            if isinstance(value, Tensor):
                inputs[name] = self._to(value, stage)
        out = self.work.forward(self._stages[stage], stage, number, hidden)
        self._sent[stage, number] = hidden, out

    def _backward(self, stage: int, number: int) -> None:
        hidden, out = self._sent.pop((stage, number))
        if stage == self.work.last:
            (out * self.work.scale).backward()
        else:
            out.backward(self._returned.pop((stage, number)))
        if hidden is not None and hidden.grad is not None:
            self._returned[stage - 1, number] = self._to(hidden.grad, stage - 1)
        self.work.after_backward()

    def _to(self, tensor: Tensor, stage: int) -> Tensor:
        """Moves a tensor to the stage's device, without waiting if memory and device allow it."""
        return tensor.to(self._devices[stage], non_blocking=self.work.settings.overlap)


class PipeDream(nn.Module):
    """Runs a model as a pipeline; ``forward(x)`` returns the whole model's output.

    A batch goes in ``chunks`` pieces from stage to stage. On accelerators a pass is only queued, so
    stages work on different pieces at the same time (Huang et al., GPipe, arXiv:1811.06965). The
    output is on the device of the last stage. The model itself is ``module``; its parameters and
    their names are unchanged. Layers that use a whole batch (BatchNorm) get a piece of it.

    Args:
        model: cut between its children; the cut makes the slowest stage as fast as
            possible.
        num_worker, num_workers: stages; default: the number of accelerators.
        chunks: pieces of a batch; fewer if it has fewer rows.
        checkpoint: as for AsyncPipeline, with pieces as micro-batches.

    Raises:
        ValueError: the model can't be cut so, a setting is invalid, or there are several
            ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        num_worker: int | None = None,
        chunks: int = 1,
        checkpoint: str = "never",
        *,
        num_workers: int | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(model, nn.Sequential):
            raise ValueError(
                f"PipeDream cuts an nn.Sequential, and this is a {type(model).__name__}; "
                "AsyncPipeline cuts causal language models too"
            )
        if num_worker is not None and num_workers is not None:
            raise ValueError("num_worker and num_workers are the same setting; give one of them")
        if (ranks := world_size()) > 1:
            raise ValueError(
                f"PipeDream has all its stages in one process, and there are {ranks} ranks; take "
                f"AsyncPipeline(stages={ranks})"
            )
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        count = num_workers if num_worker is None else num_worker
        if count is None:
            count = torch.accelerator.device_count() if device.type != "cpu" else 1
        require_whole(chunks=chunks, num_worker=count)
        if chunks < 1:
            raise ValueError(f"chunks is {chunks}; give 1 at least")
        self._settings = PipelineSettings("gpipe", count, checkpoint)
        self.module, self.chunks = model, chunks
        spans = ranges(balanced_layers(Layers(model).costs(), count))
        devices = itertools.cycle(stage_devices(count, device))
        self.stages = tuple(zip(devices, spans, strict=False))
        for place, span in self.stages:
            for layer in span:
                model[layer].to(place)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the outputs of all rows of ``x``, in their order.

        Raises:
            ValueError: the model returns something else than a tensor.
        """
        outputs = []
        pieces = x.chunk(self.chunks) if len(x) else (x,)
        for number, hidden in enumerate(pieces):
            again = self._settings.recomputes(number, len(pieces)) and torch.is_grad_enabled()
            for place, span in self.stages:
                run: Any = nn.Sequential(*(self.module[layer] for layer in span))
                args = (hidden.to(place, non_blocking=True),)
                hidden = recomputed(run, *args, use_reentrant=False) if again else run(*args)
            outputs.append(hidden)
        if not isinstance(hidden, Tensor):
            kind = type(hidden).__name__
            raise ValueError(f"PipeDream joins tensors, and this model returns a {kind}")
        return torch.cat(outputs)
