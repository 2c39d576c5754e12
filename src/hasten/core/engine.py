"""An engine turns micro-batches into moved weights with three verbs; the step knows no more.

The plain engine runs the whole model in this process, replicated or not. A pipeline schedule or a
DeepSpeed engine replaces it and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hasten.core.batch import MicroBatch
from hasten.core.setup import Setup


@dataclass(frozen=True)
class Assembly:
    """What an engine is built from: the run's objects, wrapped and in place."""

    setup: Setup
    module: nn.Module  # maps a micro-batch's inputs to (loss sum, count)
    optimizer: Optimizer


class Engine(Protocol):
    """Three verbs, in this order, once per step."""

    def gradients(self, micro_batches: Sequence[MicroBatch], denominator: float) -> Tensor:
        """Gradients of (loss summed over all ranks / denominator); returns this rank's loss sum."""

    def norm(self) -> tuple[float, bool]:
        """The gradients' L2 norm over all ranks, and whether every rank saw finite numbers."""

    def update(self, rate_factor: float) -> None:
        """Clip, move the weights at ``rate_factor`` x the peak learning rate, forget gradients."""

    def discard(self) -> None:
        """Forget the gradients without moving anything (a step that wasn't finite)."""


class PlainEngine:
    """Forward and backward of one module in this process."""

    def __init__(self, assembly: Assembly) -> None:
        self.setup = assembly.setup
        self.module = assembly.module
        self.optimizer = assembly.optimizer
        self.max_norm = assembly.setup.job.max_grad_norm
        self._norm = torch.tensor(0.0)
        self._peak_rates = [group["lr"] for group in self.optimizer.param_groups]

    def gradients(self, micro_batches: Sequence[MicroBatch], denominator: float) -> Tensor:
        precision, layout = self.setup.precision, self.setup.layout
        scale = layout.size / denominator  # replicas average their gradients; the step wants a sum
        total, count = torch.zeros(()), torch.zeros(())
        for index, micro_batch in enumerate(micro_batches, start=1):
            last = index == len(micro_batches)
            precision.before_backward(reduces=last and layout.size > 1)
            with layout.sync(self.module, last):
                with precision.region():
                    loss, labels = self.module(**micro_batch.inputs)
                (loss * scale).backward()
            precision.collect()
            total, count = total.to(loss.device) + loss.detach(), count.to(loss.device) + labels
        return total if self.setup.job.counted else total * self._recount(denominator, count)

    def _recount(self, denominator: float, count: Tensor) -> float:
        """Divide by what the forward passes counted in the place of what was said before them."""
        true_count: float = self.setup.layout.sum(count.double().cpu()).item()
        factor = denominator / true_count if true_count else 0.0
        torch._foreach_mul_(_gradients(self.setup.precision.parameters()), factor)
        return factor

    def norm(self) -> tuple[float, bool]:
        found = _gradients(self.setup.precision.parameters())
        self._norm = torch.nn.utils.get_total_norm(found)
        value = self._norm.item()  # the step's one wait for the device: may the weights move?
        return value, bool(torch.isfinite(torch.tensor(value)))

    def update(self, rate_factor: float) -> None:
        setup, parameters = self.setup, self.setup.precision.parameters()
        if self.max_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.max_norm, self._norm)
        for group, peak in zip(self.optimizer.param_groups, self._peak_rates, strict=True):
            group["lr"] = peak * rate_factor
        setup.wire.before_update(parameters)
        self.optimizer.step()
        setup.precision.publish()
        setup.wire.after_update(parameters)
        setup.average.after_update(parameters)
        self.discard()

    def discard(self) -> None:
        for parameter in self.setup.precision.parameters():
            parameter.grad = None
        self.module.zero_grad(set_to_none=True)


def _gradients(parameters: Sequence[Tensor]) -> list[Tensor]:
    return [p.grad for p in parameters if p.grad is not None]
