"""What a step asks of each slot and of other ranks: one protocol each, and the plain default.

Session and setup are made of these, so methods that are handed one can't name its class here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hasten.core.job import MicroBatch, WorkCounts
from hasten.core.timing import BACKWARD, StepMetrics
from hasten.errors import InputError


class Precision(Protocol):
    """PRECISION: the number format of weights and computation, and who holds the true weights."""

    def prepare(self, module: nn.Module) -> None:
        """Bring the module into its working format, in place."""
        return

    def region(self) -> AbstractContextManager[Any]:
        """The context of every forward pass."""

    def own(self, optimizer: Optimizer) -> None:
        """Make the optimizer update what this precision holds as the true weights."""

    def before_backward(self, reduces: bool) -> None:
        """Called before each backward pass; ``reduces``: its gradients go over the wire."""
        return

    def collect(self) -> None:
        """Called after each backward pass, to take the gradients over."""
        return

    def parameters(self) -> list[Tensor]:
        """The true weights, their ``.grad`` complete once all micro-batches are done."""

    def publish(self) -> None:
        """Called after each update: working weights follow the true ones."""
        return

    def finish(self, module: nn.Module) -> None:
        """Give the module its true weights back, for saving."""
        return


class Wire(Protocol):
    """WIRE: what travels between ranks; three seams."""

    def attach(self, module: nn.Module) -> None:
        """Gradients ready: hook into the wrapped module."""
        return

    def before_update(self, parameters: Sequence[Tensor]) -> None:
        """All gradients are there, the weights have not moved."""
        return

    def after_update(self, parameters: Sequence[Tensor]) -> None:
        """The weights have moved (local steps average here)."""
        return


class Average(Protocol):
    """AVERAGE: a running average of the weights."""

    def after_update(self, parameters: Sequence[Tensor]) -> None:
        """The weights have moved."""
        return

    def versions(self, parameters: Sequence[Tensor]) -> Iterator[str]:
        """Suffixes of the folders to save, the weights in place while each is out."""


class GivenPrecision(Precision):
    """The number format the model came in; parameters are their own true weights."""

    def __init__(self) -> None:
        self._parameters: list[Tensor] = []

    def region(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def own(self, optimizer: Optimizer) -> None:
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def parameters(self) -> list[Tensor]:
        return self._parameters


class NoCompression(Wire):
    """Gradients travel as they are."""


class NoAverage(Average):
    """Only the weights themselves are kept."""

    def versions(self, parameters: Sequence[Tensor]) -> Iterator[str]:
        yield ""


class SpikeWatching(Protocol):
    """What a run asks of its policy."""

    rate: float  # the schedule's learning rate is multiplied by it

    @property
    def suspects(self) -> bool:
        """Losses are unusual just now: no state of it should be kept."""

    def goes_back(self, session: Any, metrics: StepMetrics) -> bool:
        """Look at a step; True where the session is at an earlier one now."""


class NoSpikes(SpikeWatching):
    """Losses are as they are."""

    rate = 1.0
    suspects = False

    def goes_back(self, session: Any, metrics: StepMetrics) -> bool:
        return False


class Adjusting(Protocol):
    """Who changes the settings of a run while it goes on."""

    def after_step(self, metrics: StepMetrics) -> None:
        """A step is done, the next one hasn't begun; called on every rank."""
        return


class FixedSettings(Adjusting):
    """Every setting stays as the plan has it."""


class StepNumbers(NamedTuple):
    """What the host has to know of a step before the weights move.

    Args:
        norm: L2 norm of the gradients over all ranks.
        loss_sum: of this rank.
        finite: norm and loss are finite on every rank.
    """

    norm: float
    loss_sum: float
    finite: bool


class Engine(Protocol):
    """Three verbs, in this order, once per step."""

    def gradients(self, micro_batches: Sequence[MicroBatch], denominator: float) -> Tensor:
        """Gradients of (loss summed over all ranks / denominator); returns this rank's loss sum."""

    def norm(self, loss_sum: Tensor) -> StepNumbers:
        """The step's numbers on the host; ``loss_sum`` is what ``gradients`` returned."""

    def update(self, rate_factor: float) -> None:
        """Clip, move the weights at ``rate_factor`` x the peak learning rate, forget gradients."""

    def discard(self) -> None:
        """Forget the gradients without moving anything (a step that wasn't finite)."""


# What ranks tell each other in a step beside gradients, and the default: everything, at once.
#
# Where a wire lets ranks train apart from each other (local steps), a step that waited for such
# sums would be as slow as the link. Then a step goes by what its own rank knows, times the number
# of ranks, and ``settle`` makes weights and counts of all ranks equal again: before an evaluation,
# before a checkpoint, at the end.


class Sums(Protocol):
    """What adds up over ranks: a layout."""

    def sum(self, values: Tensor) -> Tensor: ...


@runtime_checkable
class Agreement(Protocol):
    """A wire that is one too takes the place of the default."""

    apart: bool  # ranks may differ in weights, optimizer state and progress until they settle

    def counts(self, mine: WorkCounts, stop: bool) -> tuple[WorkCounts, bool]:
        """Before a step's first pass: counts over all ranks, and whether the run stops here.

        The answer to the second is the same on every rank.
        """

    def sum(self, values: Tensor) -> Tensor:
        """A step's other sums over ranks: loss, gradients that aren't finite, load of experts."""

    def skipped(self) -> None:
        """A step was given up; ``after_update`` of the wire is not called for it."""
        return

    def settle(self) -> None:
        """Every rank calls it between the same two steps; weights are equal after it."""
        return

    def others(self, state: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        """On rank 0 the same of each other rank, in order. For checkpoints; all ranks call it."""


class SumsEachStep(Agreement):
    """Every sum is taken when it is asked for, so that ranks never differ."""

    apart = False

    def __init__(self, layout: Sums) -> None:
        self._layout = layout

    def counts(self, mine: WorkCounts, stop: bool) -> tuple[WorkCounts, bool]:
        sums = self._layout.sum(torch.tensor([*astuple(mine), float(stop)], dtype=torch.float64))
        *found, wanted = sums.tolist()
        return WorkCounts(*(round(v) for v in found)), bool(wanted)

    def sum(self, values: Tensor) -> Tensor:
        return self._layout.sum(values)

    def others(self, state: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        return []


# What a run asks of CHECKPOINT, and the default: state stays in memory.


class Checkpointing(Protocol):
    """CHECKPOINT: called between two steps, never inside one."""

    def after_step(self, session: Any) -> None:
        """A step is done."""
        return

    def after_epoch(self, session: Any) -> None:
        """An epoch is done, after its last step."""
        return

    def resume(self, session: Any, path: Path | None = None) -> Path | None:
        """Bring a fresh session to the newest saved state, or to that of ``path``; its path, or
        None without one."""

    def settle(self) -> None:
        """Until nothing is under way, before another process is measured on this machine."""
        return

    def running(self, session: Any) -> AbstractContextManager[None]:
        """Around all steps: what can't be written is refused before them, and what is under way
        is done after them. A run that was asked to stop is saved."""


class NoCheckpoint(Checkpointing):
    """State stays in memory."""

    def resume(self, session: Any, path: Path | None = None) -> Path | None:
        if path is not None:
            raise InputError(
                f"resume: {path} needs checkpoints in the plan, or checkpoint_every, to be read"
            )
        return None

    def running(self, session: Any) -> AbstractContextManager[None]:
        return nullcontext()


# What a step asks of a loss scale, and the default: losses as they are.


class LossScaling(Protocol):
    """Belongs to PRECISION: what losses are multiplied by where gradients of fp16 would vanish."""

    value: float
    searching: bool  # the last step was given up to find the scale, which is no failure

    def unscale(self, gradients: Sequence[Tensor]) -> None:
        """Divide the complete gradients of a step, in place."""
        return

    def judge(self, finite: bool) -> None:
        """Called after each norm with what all ranks agreed on."""
        return


class NoLossScaling(LossScaling):
    """Losses as they are; every step that isn't finite is a failure."""

    value = 1.0
    searching = False


# What a step asks of ROUTING, and the default: tokens go where the model sends them.


class Routing(Protocol):
    """ROUTING: how tokens are balanced over experts."""

    def prepare(self, model: nn.Module) -> None:
        """Look at the fresh model's routers, before anything replaces modules."""
        return

    def forward(self, module: nn.Module, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """The forward pass of a micro-batch: (loss summed over trained tokens, their number)."""

    def after_update(self, total: Callable[[Tensor], Tensor]) -> None:
        """The weights have moved; ``total`` sums a float64 tensor on the host over all ranks."""
        return

    def discard(self) -> None:
        """The passes since the last update don't count."""
        return

    def load_ratio(self) -> float | None:
        """The busiest expert's load / the mean in the last step, over layers; None: unknown."""


class ModelRouting(Routing):
    """Nothing beside what the model's own routers do."""

    def forward(self, module: nn.Module, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        loss, labels = module(**micro_batch.inputs)
        return loss, labels

    def load_ratio(self) -> float | None:
        return None


# What a step's exchange between ranks took on this rank, where the layout can tell.
#
# A layout that can has the methods of ``MeasuresExchange``; with any other the step says that it
# isn't known.
# What ranks tell each other beside it (counts, the loss) isn't in here: the clock's marks have it.


@dataclass(frozen=True)
class Traffic:
    """Of one step's gradients, or of the weights that travel in their place.

    Args:
        exposed: seconds in which this rank had nothing to do but wait for it; None: not known.
        hidden: seconds in which it was under way beside the computation; None: not known.
        sent_bytes: what this rank has handed over for others; None: not known.
        during: the part of the step in which the exposed seconds were spent.
    """

    exposed: float | None
    hidden: float | None = None
    sent_bytes: int | None = None
    during: str = BACKWARD


@runtime_checkable
class MeasuresExchange(Protocol):
    """A layout, or a wire, that knows what its exchange took."""

    def traffic(self) -> Traffic | None:
        """Of the step that has just moved the weights, or given up; asked once a step."""


def traffic_of(holder: object) -> Traffic | None:
    """What it knows of the step."""
    return holder.traffic() if isinstance(holder, MeasuresExchange) else None
