"""The number a loss is multiplied by before backward, so that fp16 gradients don't vanish.

fp16 has 5 bits of exponent: what is below 6e-8 becomes zero, and small gradients are. Multiplied
loss gives multiplied gradients (Micikevicius et al., arXiv:1710.03740, section 3.2), which are
divided again before their norm is taken. The scale begins high and is halved by every step whose
gradients overflow; the step is thrown away. After so many good steps in a row it is doubled.

    scale = LossScale()
    (loss * scale.value).backward()
    scale.unscale(gradients)
    finite = bool(torch.isfinite(norm_of(gradients)))
    scale.judge(finite)                # the same answer on every rank, or scales drift apart
    if finite: optimizer.step()
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class LossScale:
    """A dynamic loss scale; ``searching`` tells a step lost to the scale from a failure."""

    def __init__(
        self,
        initial: float = 65536.0,
        growth: float = 2.0,
        backoff: float = 0.5,
        interval: int = 2000,
    ) -> None:
        if not initial >= 1 or not growth > 1 or not 0 < backoff < 1 or interval < 1:
            raise ValueError(
                f"a loss scale begins at 1 or more, grows by more than 1 and backs off by less "
                f"than 1 after 1 step or more: initial {initial}, growth {growth}, backoff "
                f"{backoff}, interval {interval}"
            )
        self.value = float(initial)
        self.growth, self.backoff, self.interval = growth, backoff, interval
        self.searching = False  # the last step overflowed, and a lower scale may still help
        self.skipped = 0  # steps that were not finite, in all
        self._good = 0  # finite steps since the scale last changed

    def unscale(self, gradients: Sequence[Tensor]) -> None:
        """Divide the gradients, in place; an infinite one stays infinite."""
        if gradients and self.value != 1.0:
            torch._foreach_mul_(list(gradients), 1.0 / self.value)

    def judge(self, finite: bool) -> None:
        """Once per step: whether its gradients were finite on all ranks."""
        if finite:
            self.searching = False
            self._good += 1
            if self._good >= self.interval:  # a resumed run may have a shorter one
                # Beyond float32's own range the product with the loss could not be finite.
                self.value, self._good = min(self.value * self.growth, 2.0**120), 0
            return
        # At a scale of 1 the overflow is the gradients' own: no lower scale is tried.
        self.searching = self.value > 1.0
        self.value, self._good = max(self.value * self.backoff, 1.0), 0
        self.skipped += 1

    def state_dict(self) -> dict[str, Any]:
        """Scale and progress; the settings are the plan's."""
        return {"value": self.value, "good": self._good, "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = float(state["value"])
        self._good, self.skipped = int(state["good"]), int(state["skipped"])
