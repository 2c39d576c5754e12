"""An engine turns micro-batches into moved weights with three verbs; the step knows no more.

The plain engine runs the whole model in this process, replicated or not. A pipeline schedule or a
DeepSpeed engine replaces it and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hasten.core.contracts import Agreement, StepNumbers
from hasten.core.job import MicroBatch
from hasten.core.layout import gradients_of
from hasten.core.setup import Setup
from hasten.core.timing import BACKWARD, COMMUNICATION, FORWARD, OPTIMIZER

Sums = tuple[Tensor, Tensor]  # of loss and of what carries it


@dataclass(frozen=True)
class EngineParts:
    """What an engine is built from: the run's objects, wrapped and in place."""

    setup: Setup
    module: nn.Module  # maps a micro-batch's inputs to (loss sum, count)
    optimizer: Optimizer


@runtime_checkable
class SendsGradientsLate(Protocol):
    """A layout whose ranks can run a step's passes each for itself and send gradients after."""

    def alone(self, module: nn.Module) -> nn.Module:
        """What to run so that no other rank notices."""

    def send(self, module: nn.Module) -> None:
        """Gradients travel now; every rank calls it once per step."""


def read_together(norm: Tensor, loss_sum: Tensor) -> tuple[float, float]:
    """Both numbers on the host, after one wait for the device that holds them."""
    if norm.device != loss_sum.device:
        return norm.item(), loss_sum.item()
    dtype = torch.promote_types(norm.dtype, loss_sum.dtype)  # wide enough to keep both as they are
    value, loss = torch.stack([norm.to(dtype), loss_sum.detach().to(dtype)]).tolist()
    return value, loss


def all_finite(agreement: Agreement, *mine: float) -> bool:
    """Whether these numbers are finite on every rank; every rank calls it.

    A flag of its own: a wire need not carry one rank's overflow to the others, and a loss that is
    infinite need not show in the gradients.
    """
    wrong = torch.tensor([0.0 if all(map(math.isfinite, mine)) else 1.0], dtype=torch.float64)
    return not agreement.sum(wrong).item()


class PlainEngine:
    """Forward and backward of one module in this process."""

    def __init__(self, assembly: EngineParts) -> None:
        self.setup = assembly.setup
        self.module = assembly.module
        self.optimizer = assembly.optimizer
        self.max_norm = assembly.setup.job.max_grad_norm
        self.loss_count: float | None = None  # of the last step, all ranks; None: batches say it
        self._norm = torch.tensor(0.0)
        self.sum_loads = assembly.setup.agreement.sum  # of experts, over all ranks
        self._peak_rates = [group["lr"] for group in self.optimizer.param_groups]

    def gradients(self, micro_batches: Sequence[MicroBatch], denominator: float) -> Tensor:
        layout, last = self.setup.layout, len(micro_batches)
        sums = self._no_sums()
        for index, micro_batch in enumerate(micro_batches, start=1):
            self.setup.precision.before_backward(reduces=index == last and layout.averages > 1)
            with layout.sync(self.module, index == last):
                sums = self._pass(self.module, micro_batch, denominator, sums)
        return self._loss_sum(sums, denominator)

    def gradients_apart(
        self, micro_batches: Sequence[MicroBatch], denominator: float, layout: SendsGradientsLate
    ) -> Callable[[], Tensor]:
        """The same in two halves: passes that no other rank notices, then, called, the rest.

        A failure of the first half concerns this rank alone: ``discard`` it and begin again.
        """
        inner = layout.alone(self.module)
        sums = self._no_sums()
        for micro_batch in micro_batches:
            self.setup.precision.before_backward(reduces=False)
            sums = self._pass(inner, micro_batch, denominator, sums)

        def rest() -> Tensor:
            self.setup.precision.before_backward(reduces=True)
            layout.send(self.module)
            self.setup.precision.collect()
            return self._loss_sum(sums, denominator)

        return rest

    def _pass(
        self, module: nn.Module, micro_batch: MicroBatch, denominator: float, sums: Sums
    ) -> Sums:
        """One forward and backward pass; ``sums`` with its own added."""
        # Replicas average; the step wants a sum. norm() takes the loss scale out again.
        # A rank that trains apart may have no token in a step, and then no loss either.
        scale = self.setup.loss_scale.value * self.setup.layout.averages / (denominator or 1.0)
        with self.setup.precision.region():
            loss, labels = self.setup.routing.forward(module, micro_batch)
        self.setup.clock.mark(FORWARD)
        (loss * scale).backward()
        self.setup.precision.collect()
        self.setup.clock.mark(BACKWARD)
        total, count = sums
        return total + loss.detach(), count + labels

    def _no_sums(self) -> Sums:
        """Made on the device: a zero that is sent there makes the host wait."""
        device = self.setup.job.device
        return torch.zeros((), device=device), torch.zeros((), device=device)

    def _loss_sum(self, sums: Sums, denominator: float) -> Tensor:
        total, count = sums
        return total if self.setup.job.counted else total * self._recount(denominator, count)

    def _recount(self, denominator: float, count: Tensor) -> float:
        """Divide by what the forward passes counted in the place of what was said before them."""
        true_count: float = self.setup.agreement.sum(count.double().cpu()).item()
        self.loss_count = true_count
        factor = denominator / true_count if true_count else 0.0
        torch._foreach_mul_(gradients_of(self.setup.precision.parameters()), factor)
        return factor

    def norm(self, loss_sum: Tensor) -> StepNumbers:
        parameters = self.setup.precision.parameters()
        self.setup.loss_scale.unscale(gradients_of(parameters))
        self._norm = self.setup.layout.norm(parameters)
        # The step's one wait for the device: may the weights move?
        value, loss = read_together(self._norm, loss_sum)
        self.setup.clock.mark(OPTIMIZER)
        finite = all_finite(self.setup.agreement, value, loss)
        self.setup.clock.mark(COMMUNICATION)
        self.setup.loss_scale.judge(finite)
        return StepNumbers(value, loss, finite)

    def update(self, rate_factor: float) -> None:
        setup, parameters = self.setup, self.setup.precision.parameters()
        self._clip(parameters)
        for group, peak in zip(self.optimizer.param_groups, self._peak_rates, strict=True):
            group["lr"] = peak * rate_factor
        setup.wire.before_update(parameters)
        self.optimizer.step()
        setup.precision.publish()
        setup.wire.after_update(parameters)
        setup.average.after_update(parameters)
        setup.routing.after_update(self.sum_loads)
        self.discard()

    @contextmanager
    def holding_still(self) -> Iterator[None]:
        """Inside, updates take their time and move no weight: the learning rate is zero."""
        rates, self._peak_rates = self._peak_rates, [0.0] * len(self._peak_rates)
        try:
            yield
        finally:
            self._peak_rates = rates

    def _clip(self, parameters: Sequence[Tensor]) -> None:
        """Scale to the largest norm: in the optimizer's own pass, where it takes a divisor.

        Torch's fused optimizers do (``grad_scale``, which loss scaling uses too).
        """
        if self.max_norm is None:
            return
        if not getattr(self.optimizer, "_step_supports_amp_scaling", False):
            torch.nn.utils.clip_grads_with_norm_(parameters, self.max_norm, self._norm)
            return
        divisor = ((self._norm + 1e-6) / self.max_norm).clamp_min(1.0)
        self.optimizer.grad_scale = divisor.float()

    def discard(self) -> None:
        self.setup.routing.discard()
        for parameter in self.setup.precision.parameters():
            parameter.grad = None
        self.module.zero_grad(set_to_none=True)
