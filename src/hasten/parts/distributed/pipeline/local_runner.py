"""A pipeline in one process: stages run on the available devices.

One thread starts each pass as soon as its inputs exist, rank by rank in the schedule's order. On
accelerators a pass is only queued. So devices work at the same time, and copies between them
overlap with it. On a CPU passes follow each other. The two halves of a backward pass (I and W) run
together: autograd frees what it saved after the first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hasten.parts.distributed.pipeline.runtime import Inputs, PipelineWork
from hasten.parts.distributed.pipeline.schedules import (
    Op,
    orders,
)


class LocalRunner:
    """All stages, each on its own device or all on one."""

    def __init__(
        self, stages: Mapping[int, nn.Module], work: PipelineWork, devices: Sequence[torch.device]
    ) -> None:
        self.work, self._stages = work, stages
        self._homes = work.settings.homes
        self._devices = [devices[home % len(devices)] for home in self._homes]
        self._sent: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}  # (input, output)
        self._returned: dict[tuple[int, int], Tensor] = {}  # gradients for the previous stage
        for index, stage in stages.items():
            stage.to(self._devices[index])

    def run(self, micro_batches: Sequence[Inputs], scale: float) -> Tensor:
        settings = self.work.settings
        listed = orders(settings.schedule, settings.ranks, len(micro_batches))
        self.work.begin([dict(m) for m in micro_batches], scale=scale)
        self._sent.clear()  # messages of a failed step must not be used
        self._returned.clear()
        at = [0] * len(listed)
        while any(at[r] < len(ops) for r, ops in enumerate(listed)):
            before = sum(at)
            for rank, ops in enumerate(listed):
                while at[rank] < len(ops) and self._ready(ops[at[rank]]):
                    self._pass(rank, ops[at[rank]], micro_batches, scale)
                    at[rank] += 1
            if sum(at) == before:
                raise RuntimeError(f"{settings.schedule}: ranks wait for each other for ever")
        return self.work.total

    def _ready(self, op: Op) -> bool:
        kind, stage, number = op
        if kind == "F":
            return stage == 0 or (stage - 1, number) in self._sent
        if kind == "W":
            return True
        forward_done = (stage, number) in self._sent
        return forward_done and (stage == self.work.last or (stage, number) in self._returned)

    def _pass(self, rank: int, op: Op, batches: Sequence[Inputs], scale: float) -> None:
        kind, stage, number = op
        if kind == "W":
            return
        with self.work.recorder.noting(rank, "F" if kind == "F" else "B", stage, number):
            if kind == "F":
                self._forward(stage, number)
            else:
                hidden, out = self._sent.pop((stage, number))
                if stage == self.work.last:
                    (out * scale).backward()
                else:
                    out.backward(self._returned.pop((stage, number)))
                if hidden is not None and hidden.grad is not None:
                    self._returned[stage - 1, number] = self._to(hidden.grad, stage - 1)
                self.work.seams.after_backward()

    def _forward(self, stage: int, number: int) -> None:
        hidden = None
        if stage:
            hidden = self._to(self._sent[stage - 1, number][1].detach(), stage)
            hidden = hidden.requires_grad_(hidden.is_floating_point())
        inputs: Any = self.work.inputs(number)  # a micro-batch is sent with its hidden states
        for name, value in inputs.items():
            if isinstance(value, Tensor):
                inputs[name] = self._to(value, stage)
        out = self.work.forward(self._stages[stage], stage, number, hidden)
        self._sent[stage, number] = hidden, out

    def _to(self, tensor: Any, stage: int) -> Any:
        """Moves a tensor to the stage's device, without waiting if memory and device allow it."""
        if tensor is None:
            return None
        return tensor.to(self._devices[stage], non_blocking=self.work.settings.overlap)
