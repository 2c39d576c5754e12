"""Buckets on their way through a step, and what they leave in memory once the step counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hasten.parts.comm.error_feedback import Memory, Pieces, numbers
from hasten.parts.comm.exchange import FIRST, Ranks
from hasten.parts.comm.gradients import give_back, offered
from hasten.parts.comm.hosts import Hosts
from hasten.parts.comm.settings import Settings
from hasten.parts.comm.ways import Dense, Way

DDP_STEPS = 2  # DDP lays its buckets anew after the first


class Travel:
    """``begin`` a step, ``send`` each bucket.

    ``asks``: a step counts only if it was ``confirmed``; otherwise one does whose gradients were
    finite on all ranks.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.way, self._dense = settings.way(settings.momentum), Dense()
        self._memory = Memory()
        self.steps = 0  # begun
        self.buckets: list[Pieces] = []  # of the step
        self.scale: Callable[[], float] = lambda: 1.0  # of the loss
        self.quiet = False  # nothing is to be compressed, whatever the method
        self.attached = self.asks = self.confirmed = self.spoiled = False

    @property
    def compresses(self) -> bool:
        """Whether the step under way, or the last one, is past the dense start."""
        start = max(self._settings.dense_steps, DDP_STEPS if self.attached else 0)
        return self.steps > start and self._settings.method != "none" and not self.quiet

    def begin(self) -> None:
        self.settle()
        self.steps += 1
        self.spoiled = self.confirmed = False
        self.buckets = []

    def settle(self) -> None:
        """What the last step left counts, or is forgotten; may be called again."""
        counted = not self.spoiled and (self.confirmed or not self.asks)
        self._memory.settle(counted)
        self.way.settle(counted)

    def send(self, buffer: Tensor, pieces: Pieces, ranks: Ranks, way: Way) -> Callable[[], Tensor]:
        """Send a bucket; what is returned waits for its mean and puts it into ``buffer``.

        NaN fills it on every rank if a number of any rank wasn't finite.
        """
        self.buckets.append(pieces)
        try:
            return self._sent_on(buffer, pieces, ranks, way)
        except RuntimeError as error:
            raise ranks.failed(error) from error

    def _sent_on(
        self, buffer: Tensor, pieces: Pieces, ranks: Ranks, way: Way
    ) -> Callable[[], Tensor]:
        way = self.way_of(pieces, way) if self.compresses else self._dense
        scale = self.scale() if way.feedback else 1.0
        as_it_is = scale == 1.0 and (way is self._dense or _readable(buffer))
        flat = buffer if as_it_is else buffer.float().div_(scale)
        residual: Tensor | None = None
        held: dict[int, Tensor] = {}
        if way.feedback:
            residual, held = offered(self._memory.kept(pieces, buffer.device), flat, pieces)
        finish = way.start(flat, residual, pieces, ranks)

        def done() -> Tensor:
            try:
                mean, left = finish()
            except Exception as error:
                raise ranks.failed(error) from error
            if mean is None:
                buffer.fill_(torch.nan)
            else:
                buffer.copy_(mean if scale == 1.0 else mean.mul_(scale))
            if mean is None or not _fits(buffer):
                self.spoiled = True
            elif left is not None:
                give_back(left, held, pieces)
                self._memory.leave(pieces, left)
            return buffer

        return done

    def send_between(
        self, buffer: Tensor, pieces: Pieces, hosts: Hosts, way: Way
    ) -> Callable[[], Tensor]:
        """The same where only hosts are to exchange it compressed."""
        owner = hosts.owner(len(self.buckets))
        self.buckets.append(pieces)
        within = hosts.within.all_reduce(buffer.div_(hosts.within.world), FIRST)

        def done() -> Tensor:
            try:
                within.wait()
                if hosts.within.rank == owner:
                    self._sent_on(buffer, pieces, hosts.across, way)()
                hosts.within.give(buffer, owner)
            except Exception as error:
                raise hosts.within.failed(error) from error
            if not bool(buffer.isfinite().all()):  # waits for the device
                self.spoiled = True
            return buffer

        return done

    def way_of(self, pieces: Pieces, compressing: Way) -> Way:
        """What takes a bucket once compression has begun: small ones aren't worth it."""
        small = numbers(pieces) < self._settings.minimum
        return self._dense if small or self.quiet else compressing

    def state(self) -> dict[str, Any]:
        self.settle()
        return {
            "method": self._settings.method,
            "steps": self.steps,
            "residual": self._memory.state(),
            "way": self.way.state(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from there.

        Raises:
            ValueError: it is of another method.
        """
        if state["method"] != self._settings.method:
            raise ValueError(
                f"the memory is of {state['method']} and this compressor's method is "
                f"{self._settings.method}"
            )
        self.steps = int(state["steps"])
        self._memory.load(state["residual"])
        self.way.load(state["way"])


def _readable(buffer: Tensor) -> bool:
    """Formats that codecs read; fp16 is widened."""
    return buffer.dtype in (torch.float32, torch.bfloat16)


def _fits(buffer: Tensor) -> bool:
    """Whether an fp16 gradient holds its mean; waits for the device."""
    return buffer.dtype is not torch.float16 or bool(buffer.isfinite().all())
