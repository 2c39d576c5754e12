"""Loss and speed of each epoch of a training, and their display at intervals.

All numbers are those of ``StepMetrics``, which a step has read from its device anyway.
So the display never makes the host wait. A state is shown ten times a second at most.
An epoch's line stays only if a second has passed since the line before it. Therefore
short epochs don't fill the screen.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from hasten.core.timing import StepMetrics
from hasten.progress import Audience

SHOWN_EVERY_SECONDS = 0.1
LINE_EVERY_SECONDS = 1.0


@dataclass
class _Epoch:
    number: int  # from 0
    loss: float = 0.0  # summed over what carries loss
    count: float = 0.0
    examples: int = 0
    seconds: float = 0.0

    @property
    def mean(self) -> float:
        return self.loss / self.count if self.count else math.nan

    def __str__(self) -> str:
        speed = self.examples / self.seconds if self.seconds else 0.0
        return f"loss {self.mean:.4f}, {speed:,.0f} examples/s"


class EpochProgress:
    """Sums the steps of each epoch, and shows where the training is.

    Args:
        epochs: at which the training ends.
        steps: of an epoch; None if the loader has no length, then the epoch before counts.
    """

    def __init__(self, audience: Audience, epochs: int, steps: int | None) -> None:
        self.losses: dict[int, float] = {}  # mean over what carried loss, as each step found it
        self._audience, self._epochs, self._steps = audience, epochs, steps
        self._epoch: _Epoch | None = None
        self._last_step = 0
        self._shown = self._printed = time.monotonic()

    def after_step(self, metrics: StepMetrics, count: float, step: int) -> None:
        """Adds a step, number ``step`` of its epoch from 1, with a mean loss over ``count``."""
        epoch = self._epoch
        if epoch is None or epoch.number != metrics.epoch:
            self._end_epoch()
            epoch = self._epoch = _Epoch(metrics.epoch)
        epoch.loss += metrics.loss * count
        epoch.count += count
        epoch.examples += metrics.examples
        epoch.seconds += metrics.step_seconds
        self.losses[epoch.number] = epoch.mean
        self._last_step = step
        now, share = time.monotonic(), self._share(epoch.number, step)
        if now - self._shown >= SHOWN_EVERY_SECONDS and share < 1:  # the epoch's line comes then
            self._shown = now
            of_steps = f"{step:,} of {self._steps:,}" if self._steps else f"{step:,}"
            text = f"epoch {epoch.number + 1} of {self._epochs}, step {of_steps}: {epoch}"
            self._audience.show(text, share)

    def finish(self) -> None:
        """The training is over; its last epoch has its line even if it was short."""
        self._end_epoch(last=True)

    def _end_epoch(self, last: bool = False) -> None:
        epoch, now = self._epoch, time.monotonic()
        if epoch is None:
            return
        if self._steps is None and not last:
            self._steps = self._last_step
        if last or now - self._printed >= LINE_EVERY_SECONDS:
            self._printed = now
            self._audience.tell(f"epoch {epoch.number + 1} of {self._epochs}: {epoch}")

    def _share(self, epoch: int, step: int) -> float:
        part = min(step / self._steps, 1.0) if self._steps else 0.0
        return (epoch + part) / self._epochs
