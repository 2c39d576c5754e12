"""What a step asks of ROUTING, and the default: tokens go where the model sends them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor, nn

from hasten.core.batch import MicroBatch


class Routing(Protocol):
    """ROUTING: how tokens are balanced over experts."""

    def prepare(self, model: nn.Module) -> None:
        """Look at the fresh model's routers, before anything replaces modules."""

    def forward(self, module: nn.Module, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """The forward pass of a micro-batch: (loss summed over trained tokens, their number)."""

    def after_update(self, total: Callable[[Tensor], Tensor]) -> None:
        """The weights have moved; ``total`` sums a float64 tensor on the host over all ranks."""

    def discard(self) -> None:
        """The passes since the last update don't count."""

    def load_ratio(self) -> float | None:
        """The busiest expert's load / the mean in the last step, over layers; None: unknown."""


class AsTheModelDoes:
    """Nothing beside what the model's own routers do."""

    def prepare(self, model: nn.Module) -> None:
        return None

    def forward(self, module: nn.Module, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        loss, labels = module(**micro_batch.inputs)
        return loss, labels

    def after_update(self, total: Callable[[Tensor], Tensor]) -> None:
        return None

    def discard(self) -> None:
        return None

    def load_ratio(self) -> float | None:
        return None
