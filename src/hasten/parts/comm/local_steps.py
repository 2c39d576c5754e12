"""Ranks train alone for some steps, then average their weights: local SGD, or DiLoCo.

    (1) every rank: ``every`` steps of its own optimizer on its own records
    (2) all ranks: exchange how far they have moved since (1), in few bits
    (3) the outer step: the mean itself, or Nesterov's momentum over such means

The mean is Local SGD (Stich, arXiv:1805.09767), the momentum DiLoCo (Douillard et al.,
arXiv:2311.08105; rate 0.7, momentum 0.9), which takes many outer steps to pay. Differences in 4
bits are from Streaming DiLoCo (arXiv:2501.18512). Optimizer state is each rank's own.

    local = LocalSteps(model.parameters(), every=20, codec=codec("int4"))
    for batch in batches:
        loss(model, batch).backward(); optimizer.step(); optimizer.zero_grad()
        local.after_step()
    local.settle()   # before saving or evaluating: one model
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hasten.parts.comm.drift import TIMEOUT, Drift
from hasten.parts.comm.full_duplex import all_gather

if TYPE_CHECKING:
    from hasten.parts.comm.codecs import Codec

OUTER = ("mean", "nesterov")


class LocalSteps:
    """Averages weights over ranks every ``every`` steps; ``codec`` None sends float32.

    ``stop`` is set, on all ranks after the same step, once one has asked for it.

    Raises:
        ValueError: a setting is impossible, or a weight doesn't lie in one piece.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        every: int = 20,
        outer: str = "mean",
        codec: Codec | None = None,
        rate: float = 0.7,
        momentum: float = 0.9,
        group: Any = None,
        timeout: datetime.timedelta = TIMEOUT,
    ) -> None:
        check(every, outer)
        self.every, self.outer, self.rate, self.momentum = every, outer, rate, momentum
        self.codec = None if codec is None or codec.name == "none" else codec
        self.drift = Drift(list(parameters), 1, group, timeout)
        self.velocity = torch.zeros_like(self.drift.anchor) if outer == "nesterov" else None
        self.steps = self.exchanges = self.message_bytes = 0
        self.stop = self._dirty = False
        self.waited_seconds = 0.0
        self.hidden_seconds: float | None = 0.0  # nothing runs beside an exchange
        self.sent_bytes = 0

    def after_step(self, tokens: float = 1.0, stop: bool = False) -> bool:
        """A step is done, with so many trained tokens on this rank; whether weights moved now.

        Every rank calls it after each step, a step that moved nothing included (with 0 tokens).

        Raises:
            DriftError: a rank has left, or its weights aren't finite.
        """
        self.steps += 1
        self._dirty = True
        self.drift.note(tokens)
        if self.steps % self.every:
            return False
        if self.drift.size == 1:
            self.stop = self.stop or stop
            return False
        self.exchanges += 1
        self.sent_bytes += self.predicted_bytes
        if self.codec is None:
            self._exact(stop)
        else:
            self._encoded(self.codec, stop)
        return True

    def settle(self) -> bool:
        """All ranks' weights become their float32 mean; whether anything was to be done."""
        if not self._dirty:
            return False
        self.drift.average()
        self._dirty = False
        return self.drift.size > 1

    @property
    def predicted_bytes(self) -> int:
        """What this rank sends to others in one exchange."""
        others = self.drift.size - 1
        if self.codec is not None:
            return others * self.drift.message_bytes(0, self.codec)
        return 2 * others * 4 * self.drift.numbers(0) // self.drift.size + others * 16

    @torch.no_grad()
    def _encoded(self, codec: Codec, stop: bool) -> None:
        drift = self.drift
        message = drift.message(0, codec, stop)
        rows = message.new_empty(drift.size * message.numel())
        began = time.perf_counter()
        drift.travel(all_gather, rows, message)
        self.waited_seconds += time.perf_counter() - began
        self.message_bytes = message.numel()
        wanted = drift.take(rows.view(drift.size, -1), 0, codec, self._outer)
        self.stop = self.stop or wanted

    @torch.no_grad()
    def _exact(self, stop: bool) -> None:
        """The same without a codec: a sum over ranks, and weights that are equal afterwards."""
        before = self.drift.anchor.clone() if self.velocity is not None else None
        began = time.perf_counter()
        self.stop = self.drift.average(stop) or self.stop
        self.waited_seconds += time.perf_counter() - began
        self.message_bytes = 4 * self.drift.numbers(0)
        if before is not None:  # the mean is where the outer step begins, not where it ends
            moved = self.drift.anchor - before
            self.drift.move(self._outer(moved) - moved)

    def _outer(self, mean: Tensor, start: int = 0) -> Tensor:
        """How far all move together: torch.optim.SGD(nesterov=True) over means as gradients.

        ``mean`` is of the weights from ``start`` on.
        """
        if self.velocity is None:
            return mean
        velocity = self.velocity[start : start + len(mean)]
        velocity.mul_(self.momentum).add_(mean)
        return mean.add(velocity, alpha=self.momentum).mul_(self.rate)

    def state_dict(self) -> dict[str, Any]:
        """After ``settle``: what goes on from there, the same on every rank."""
        state: dict[str, Any] = {"steps": self.steps, "exchanges": self.exchanges}
        return state if self.velocity is None else {**state, "velocity": self.velocity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from weights that were saved with this state and are in place already.

        Raises:
            ValueError: it is the state of another outer step or of other weights.
        """
        velocity = state.get("velocity")
        if (velocity is None) != (self.velocity is None):
            raise ValueError(f"the state is of another outer step than {self.outer!r}")
        if self.velocity is not None and velocity is not None:
            if velocity.numel() != self.velocity.numel():
                raise ValueError("the state is of other weights than these")
            self.velocity.copy_(velocity)
        self.steps, self.exchanges = state["steps"], state["exchanges"]
        self.drift.reset()
        self._dirty = False


def check(every: int, outer: str) -> None:
    """Refuse settings that are impossible."""
    if every < 1:
        raise ValueError(f"every is {every}; ranks average after at least 1 step")
    if outer not in OUTER:
        raise ValueError(f"outer is {outer!r}; it is one of {', '.join(OUTER)}")
