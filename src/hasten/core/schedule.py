"""Learning-rate schedules as a factor of the peak rate: constant, linear, cosine, and WSD.

WSD (warm-up, stable, decay) holds the peak until the last part of the run: Hu et al., MiniCPM,
arXiv:2404.06395.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from hasten.errors import InputError

Kind = Literal["constant", "linear", "cosine", "wsd"]


@dataclass(frozen=True)
class Schedule:
    """Factor of the peak learning rate at a step, counted from 0.

    Args:
        kind: shape after the warm-up.
        warmup_steps: steps of linear rise; the first step already has a rate above zero.
        total_steps: steps of the whole run; the floor is reached on the last one.
        floor: lowest factor of the decay.
        decay_share: part of the run that WSD decays in.
    """

    kind: Kind = "constant"
    warmup_steps: int = 0
    total_steps: int = 1
    floor: float = 0.0
    decay_share: float = 0.1

    def __post_init__(self) -> None:
        if self.kind not in ("constant", "linear", "cosine", "wsd"):
            raise InputError(
                f"lr_schedule: {self.kind!r} is not one of constant, linear, cosine, wsd"
            )
        if self.warmup_steps < 0 or not 0 <= self.floor <= 1 or not 0 < self.decay_share <= 1:
            raise InputError(
                f"lr_schedule: warm-up {self.warmup_steps}, floor {self.floor} and decay share "
                f"{self.decay_share} must be >= 0, within 0..1, within 0..1"
            )

    def __call__(self, step: int) -> float:
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        start = self._decay_start()
        length = max(self.total_steps - 1 - start, 1)
        progress = min(max((step - start) / length, 0.0), 1.0)
        return self.floor + (1 - self.floor) * self._shape(progress)

    def _decay_start(self) -> int:
        if self.kind != "wsd":
            return self.warmup_steps
        decay_steps = max(round(self.total_steps * self.decay_share), 1)
        return max(self.total_steps - decay_steps, self.warmup_steps)

    def _shape(self, progress: float) -> float:
        if self.kind == "constant":
            return 1.0
        if self.kind == "cosine":
            return 0.5 * (1 + math.cos(math.pi * progress))
        return 1 - progress
