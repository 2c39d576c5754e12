"""One pass of one stage: with its activations kept or not, in the number format of the run.

Every runner hands each stage's passes to :class:`Work`, so that recomputation, precision and the
sum of the losses are the same in one process and in many.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recomputed

from hasten.parts.distributed.pipeline.schedules import SPLIT, check, homes
from hasten.parts.distributed.pipeline.trace import Recorder

CHECKPOINTS = ("always", "except_last", "never")
Inputs = Mapping[str, Any]
Pass = Callable[[], Tensor]
Beside = Callable[[int, Pass], tuple[Tensor, Tensor | None]]


def nothing_beside(number: int, run: Pass) -> tuple[Tensor, Tensor | None]:
    """A pass by itself."""
    return run(), None


@dataclass(frozen=True)
class Seams:
    """What the training loop around a pipeline does in each pass.

    ``beside`` runs a stage's forward pass over the micro-batch of a number and says, with what came
    out, what the pass adds to the step's summed loss (a balance of experts), or None.
    """

    region: Callable[[], AbstractContextManager[Any]] = nullcontext  # around a forward pass
    after_backward: Callable[[], None] = field(default=lambda: None)  # takes gradients over
    beside: Beside = nothing_beside


@dataclass(frozen=True)
class Settings:
    """How a pipeline works, whatever runs it.

    ``ranks`` are the processes (or, in one process, devices) it is laid out for; ``checkpoint``
    says of which micro-batches a stage keeps its input alone and computes the rest again: of all,
    of all but the last (whose backward pass follows at once), of none.
    """

    schedule: str
    ranks: int
    checkpoint: str = "never"
    overlap: bool = True

    def __post_init__(self) -> None:
        check(self.schedule)
        if self.ranks < 1:
            raise ValueError(f"stages is {self.ranks}; give 1 at least")
        if self.checkpoint not in CHECKPOINTS:
            raise ValueError(
                f"checkpoint is {self.checkpoint!r}; it must be one of {', '.join(CHECKPOINTS)}"
            )
        if self.checkpoint != "never" and self.schedule in SPLIT:
            raise ValueError(
                f"{self.schedule} runs a backward pass in two halves and would compute the forward "
                "pass again in each; take checkpoint='never', or the schedule 1f1b"
            )

    @property
    def homes(self) -> tuple[int, ...]:
        """The rank of each stage."""
        return homes(self.schedule, self.ranks)

    def recomputes(self, number: int, count: int) -> bool:
        """Whether micro-batch ``number`` of ``count`` is computed again in its backward pass."""
        return self.checkpoint == "always" or (
            self.checkpoint == "except_last" and number < count - 1
        )


class Work:
    """The micro-batches of a step in progress, and what has come of them on this process."""

    def __init__(self, settings: Settings, seams: Seams, device: torch.device) -> None:
        self.settings, self.seams = settings, seams
        self.recorder = Recorder(device)
        self.last = len(settings.homes) - 1  # the stage whose output is the loss
        self._device = device
        # By stage and micro-batch, and not a sum: torch may try a pass out beforehand.
        self._losses: dict[tuple[int, int], Tensor] = {}
        self._scale = 1.0
        self.recomputed = 0  # passes so far, for whoever asks
        self._batches: Sequence[Inputs] = ()

    def inputs(self, number: int) -> Inputs:
        """A micro-batch of the step in progress."""
        return self._batches[number]

    def begin(self, micro_batches: Sequence[Inputs], group: Any = None, scale: float = 1.0) -> None:
        """A step, whose backward passes are of ``scale`` x the losses."""
        self._batches, self._scale = micro_batches, scale
        self._losses.clear()
        self.recorder.begin(group)

    @property
    def total(self) -> Tensor:
        """What the stages here brought to the step's summed loss; the last one the loss itself."""
        if not self._losses:
            return torch.zeros((), device=self._device)
        return torch.stack([loss.double() for loss in self._losses.values()]).sum()

    def forward(self, stage: nn.Module, index: int, number: int, hidden: Tensor | None) -> Tensor:
        """Hidden states of a micro-batch, or its loss, which is added up."""
        with self.seams.region():
            out, more = self.seams.beside(number, partial(self._run, stage, number, hidden))
        if index == self.last:
            out = out if more is None else out + more
            self._losses[index, number] = out.detach()
        elif more is not None:
            self._losses[index, number] = more.detach()
            if more.requires_grad:
                zero: Any = Seed.apply(more, self._scale)
                out = out + zero.to(out.dtype)
        return out

    def _run(self, stage: nn.Module, number: int, hidden: Tensor | None) -> Tensor:
        inputs = self._batches[number]
        out: Tensor
        if torch.is_grad_enabled() and self.settings.recomputes(number, len(self._batches)):
            self.recomputed += 1
            out = recomputed(stage, hidden, inputs, use_reentrant=False)
        else:
            out = stage(hidden, inputs)
        return out


class Seed(torch.autograd.Function):
    """Zero, added to what a stage sends on, so that a loss of the stage's own takes part in its
    backward pass (as Megatron-LM's MoEAuxLossAutoScaler does)."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, scale: float) -> Tensor:
        ctx.scale, ctx.like = scale, (loss.dtype, loss.device)
        return torch.zeros_like(loss)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        dtype, device = ctx.like
        return torch.full((), ctx.scale, dtype=dtype, device=device), None


class Runner(Protocol):
    """Runs stages over micro-batches in a schedule's order; in one process, or one of many."""

    work: Work

    def run(self, micro_batches: Sequence[Inputs], scale: float) -> Tensor:
        """Gradients of ``scale`` x the summed losses; the sum itself, unscaled, on every rank."""
