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

from hasten.core.job import MicroBatch
from hasten.core.layout import gradients_of
from hasten.core.setup import Setup
from hasten.core.timing import BACKWARD, COMMUNICATION, FORWARD, OPTIMIZER

Sums = tuple[Tensor, Tensor]  # of loss and of what carries it


@dataclass(frozen=True)
class Assembly:
    """What an engine is built from: the run's objects, wrapped and in place."""

    setup: Setup
    module: nn.Module  # maps a micro-batch's inputs to (loss sum, count)
    optimizer: Optimizer


@runtime_checkable
class SendsLate(Protocol):
    """A layout whose ranks can run a step's passes each for itself and send gradients after."""

    def alone(self, module: nn.Module) -> nn.Module:
        """What to run so that no other rank notices."""

    def send(self, module: nn.Module) -> None:
        """Gradients travel now; every rank calls it once per step."""


class PlainEngine:
    """Forward and backward of one module in this process."""

    def __init__(self, assembly: Assembly) -> None:
        self.setup = assembly.setup
        self.module = assembly.module
        self.optimizer = assembly.optimizer
        self.max_norm = assembly.setup.job.max_grad_norm
        self._norm = self._loss = torch.tensor(0.0)
        self.sum_loads = assembly.setup.agreement.sum  # of experts, over all ranks
        self._peak_rates = [group["lr"] for group in self.optimizer.param_groups]

    def gradients(self, micro_batches: Sequence[MicroBatch], denominator: float) -> Tensor:
        layout, last = self.setup.layout, len(micro_batches)
        sums = torch.zeros(()), torch.zeros(())
        for index, micro_batch in enumerate(micro_batches, start=1):
            self.setup.precision.before_backward(reduces=index == last and layout.averages > 1)
            with layout.sync(self.module, index == last):
                sums = self._pass(self.module, micro_batch, denominator, sums)
        return self._loss_sum(sums, denominator)

    def gradients_apart(
        self, micro_batches: Sequence[MicroBatch], denominator: float, layout: SendsLate
    ) -> Callable[[], Tensor]:
        """The same in two halves: passes that no other rank notices, then, called, the rest.

        A failure of the first half concerns this rank alone: ``discard`` it and begin again.
        """
        inner = layout.alone(self.module)
        sums = torch.zeros(()), torch.zeros(())
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
        return total.to(loss.device) + loss.detach(), count.to(loss.device) + labels

    def _loss_sum(self, sums: Sums, denominator: float) -> Tensor:
        total, count = sums
        self._loss = total
        return total if self.setup.job.counted else total * self._recount(denominator, count)

    def _recount(self, denominator: float, count: Tensor) -> float:
        """Divide by what the forward passes counted in the place of what was said before them."""
        true_count: float = self.setup.agreement.sum(count.double().cpu()).item()
        factor = denominator / true_count if true_count else 0.0
        torch._foreach_mul_(gradients_of(self.setup.precision.parameters()), factor)
        return factor

    def norm(self) -> tuple[float, bool]:
        parameters = self.setup.precision.parameters()
        self.setup.loss_scale.unscale(gradients_of(parameters))
        self._norm = self.setup.layout.norm(parameters)
        value = self._norm.item()  # the step's one wait for the device: may the weights move?
        self.setup.clock.mark(OPTIMIZER)
        # A flag of its own: a wire need not carry one rank's overflow to the others, and a loss
        # that is infinite need not show in the gradients.
        good = math.isfinite(value) and math.isfinite(self._loss.item())  # the device is done
        wrong = torch.tensor([0.0 if good else 1.0], dtype=torch.float64)
        finite = not self.setup.agreement.sum(wrong).item()
        self.setup.clock.mark(COMMUNICATION)
        self.setup.loss_scale.judge(finite)
        return value, finite

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
