"""What a step asks of each slot: one protocol per slot, and the default that does nothing.

Session and setup are made of these, so methods that are handed one can't name its class here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from hasten.core.batch import MicroBatch
from hasten.core.meter import StepMetrics


class Precision(Protocol):
    """PRECISION: the number format of weights and computation, and who holds the true weights."""

    def prepare(self, module: nn.Module) -> None:
        """Bring the module into its working format, in place."""

    def region(self) -> AbstractContextManager[Any]:
        """The context of every forward pass."""

    def own(self, optimizer: Optimizer) -> None:
        """Make the optimizer update what this precision holds as the true weights."""

    def before_backward(self, reduces: bool) -> None:
        """Called before each backward pass; ``reduces``: its gradients go over the wire."""

    def collect(self) -> None:
        """Called after each backward pass, to take the gradients over."""

    def parameters(self) -> list[Tensor]:
        """The true weights, their ``.grad`` complete once all micro-batches are done."""

    def publish(self) -> None:
        """Called after each update: working weights follow the true ones."""

    def finish(self, module: nn.Module) -> None:
        """Give the module its true weights back, for saving."""


class Wire(Protocol):
    """WIRE: what travels between ranks; three seams."""

    def attach(self, module: nn.Module) -> None:
        """Gradients ready: hook into the wrapped module."""

    def before_update(self, parameters: Sequence[Tensor]) -> None:
        """All gradients are there, the weights have not moved."""

    def after_update(self, parameters: Sequence[Tensor]) -> None:
        """The weights have moved (local steps average here)."""


class Average(Protocol):
    """AVERAGE: a running average of the weights."""

    def after_update(self, parameters: Sequence[Tensor]) -> None:
        """The weights have moved."""

    def versions(self, parameters: Sequence[Tensor]) -> Iterator[str]:
        """Suffixes of the folders to save, the weights in place while each is out."""


class AsGiven:
    """The number format the model came in; parameters are their own true weights."""

    def __init__(self) -> None:
        self._parameters: list[Tensor] = []

    def prepare(self, module: nn.Module) -> None:
        return None

    def region(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def own(self, optimizer: Optimizer) -> None:
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def before_backward(self, reduces: bool) -> None:
        return None

    def collect(self) -> None:
        return None

    def parameters(self) -> list[Tensor]:
        return self._parameters

    def publish(self) -> None:
        return None

    def finish(self, module: nn.Module) -> None:
        return None


class Dense:
    """Gradients travel as they are."""

    def attach(self, module: nn.Module) -> None:
        return None

    def before_update(self, parameters: Sequence[Tensor]) -> None:
        return None

    def after_update(self, parameters: Sequence[Tensor]) -> None:
        return None


class NoAverage:
    """Only the weights themselves are kept."""

    def after_update(self, parameters: Sequence[Tensor]) -> None:
        return None

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


class NoSpikes:
    """Losses are as they are."""

    rate = 1.0
    suspects = False

    def goes_back(self, session: Any, metrics: StepMetrics) -> bool:
        return False


class Adjusting(Protocol):
    """Who changes the settings of a run while it goes on."""

    def after_step(self, metrics: StepMetrics) -> None:
        """A step is done, the next one hasn't begun; called on every rank."""


class AsSet:
    """Every setting stays as the plan has it."""

    def after_step(self, metrics: StepMetrics) -> None:
        return None


class Engine(Protocol):
    """Three verbs, in this order, once per step."""

    def gradients(self, micro_batches: Sequence[MicroBatch], denominator: float) -> Tensor:
        """Gradients of (loss summed over all ranks / denominator); returns this rank's loss sum."""

    def norm(self) -> tuple[float, bool]:
        """The gradients' L2 norm over all ranks; whether all saw finite ones, and a finite loss."""

    def update(self, rate_factor: float) -> None:
        """Clip, move the weights at ``rate_factor`` x the peak learning rate, forget gradients."""

    def discard(self) -> None:
        """Forget the gradients without moving anything (a step that wasn't finite)."""
