"""What a step asks of a loss scale, and the default: losses as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class LossScaling(Protocol):
    """Belongs to PRECISION: what losses are multiplied by where gradients of fp16 would vanish."""

    value: float
    searching: bool  # the last step was given up to find the scale, which is no failure

    def unscale(self, gradients: Sequence[Tensor]) -> None:
        """Divide the complete gradients of a step, in place."""

    def judge(self, finite: bool) -> None:
        """Called after each norm with what all ranks agreed on."""


class Unscaled:
    """Losses as they are; every step that isn't finite is a failure."""

    value = 1.0
    searching = False

    def unscale(self, gradients: Sequence[Tensor]) -> None:
        return None

    def judge(self, finite: bool) -> None:
        return None
