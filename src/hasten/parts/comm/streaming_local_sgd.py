"""Streaming local SGD: ranks train alone and send one weight fragment per step.

    step s      own optimizer step, then: receive fragment of s-1, send fragment s mod H

    step s+1    computes while it is sent, receives it, sends the next

With H fragments each weight is averaged every H steps, and a message has a full step to
arrive. H is the smallest number for which two limits hold. Sending takes at most two
thirds of a step, and encoding and decoding at most a twentieth. The mean arrives one
step late and is added as a difference, so the steps since then stay (see ``local_sgd``).

Changes of weights are sent in 4 bits, as in Streaming DiLoCo (Douillard et al.,
arXiv:2501.18512). That method sends large fragments rarely, with an outer momentum. This
one sends small fragments often, with a plain mean. If H is large with 4 bits, the drift
between two means costs more than coarser messages. Then signs and a mean magnitude are
sent: a quarter of the bytes, four times as often.

    stream = Stream(model.parameters(), codec=codec("int4"), fragments=2)
    for batch in batches:
        loss(model, batch).backward(); optimizer.step(); optimizer.zero_grad()
        stream.after_step()
    stream.synchronize()   # before saving or evaluating: one model
"""

from __future__ import annotations

import datetime
import itertools
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hasten.parts.comm.codecs import Codec
from hasten.parts.comm.codecs import codec as codec_of
from hasten.parts.comm.groups import FullDuplexWork, all_gather
from hasten.parts.comm.local_sgd import NUMBERS, TIMEOUT, Drift, LocalTraining

MOST = 64  # most fragments
USUAL, SHORTEST = "int4", "sign"  # codecs; the second one if the first needs too many fragments
MANY = 6  # most fragments with the first codec
TIMED_STEPS = 8  # steps before the choice; the fastest one is used
PROBES = (1 << 16, 1 << 19)  # bytes of two messages; latency cancels in the difference of times
LOOKS = 3  # measurements of each size; the fastest counts
BUSY = 0.67  # largest share of a step for sending a message
OWN = 0.05  # largest share of a step for encoding and decoding


@dataclass(frozen=True)
class _MessageInFlight:
    """A message that is being sent; the tensors must exist until it has arrived."""

    fragment: int
    rows: Tensor  # (ranks x bytes), flat
    message: Tensor
    work: FullDuplexWork
    sent: float
    back: list[float]  # time of the arrival of all messages; empty before


class Stream(LocalTraining):
    """Sends one fragment per step in the background.

    ``fragments`` None: their number is chosen from the link's speed. If ``codec`` is None
    too, it is int4, or signs if int4 needs many fragments. If only ``codec`` is None, it is
    int4.

    Raises:
        ValueError: a setting is impossible, or a weight isn't contiguous.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        codec: Codec | None = None,
        fragments: int | None = None,
        timeout: datetime.timedelta = TIMEOUT,
    ) -> None:
        check(fragments)
        self.codec: Codec = codec or codec_of(USUAL)
        self.fragments = fragments
        self._formats = [USUAL, SHORTEST] if codec is None else []
        super().__init__(Drift(list(parameters), fragments or 1, timeout))
        if not self.drift.anchor.is_cpu:  # on a device the time of arrival can't be measured
            self.hidden_seconds = None
        self._flight: _MessageInFlight | None = None
        self._moments: list[float] = []

    def _exchange(self, stop: bool) -> bool:
        if self.fragments is None:
            self._time()
            if self.fragments is None:
                return False
        moved: bool = self._receive()
        self._send(stop)
        return moved

    @property
    def predicted_bytes(self) -> float:
        """Returns the mean bytes that this rank sends to others per step, over all fragments."""
        sizes = [self.drift.message_bytes(k, self.codec) for k in range(len(self.drift.edges))]
        return (self.drift.size - 1) * sum(sizes) / len(sizes)

    @torch.no_grad()
    def _send(self, stop: bool) -> None:
        drift = self.drift
        fragment = self.exchanges % len(drift.edges)
        message = drift.message(fragment, self.codec, stop)
        rows = message.new_empty(drift.size * message.numel())
        sent, back = time.perf_counter(), list[float]()
        try:
            work = all_gather(rows, message, drift.group)
        except RuntimeError as error:
            raise drift.lost(error) from error
        if self.hidden_seconds is not None:
            work.on_arrival(lambda: back.append(time.perf_counter()))
        self._flight = _MessageInFlight(fragment, rows, message, work, sent, back)
        self.sent_bytes += (drift.size - 1) * message.numel()
        self.exchanges += 1
        self.message_bytes = message.numel()

    @torch.no_grad()
    def _receive(self) -> bool:
        flight, self._flight = self._flight, None
        if flight is None:
            return False
        drift, began = self.drift, time.perf_counter()
        try:
            flight.work.wait()
        except RuntimeError as error:
            raise drift.lost(error) from error
        ended = time.perf_counter()
        self.waited_seconds += ended - began
        if self.hidden_seconds is not None:
            self.hidden_seconds += min([began, *flight.back]) - flight.sent
        rows = flight.rows.view(drift.size, -1)
        self.stop = drift.apply_messages(rows, flight.fragment, self.codec) or self.stop
        return True

    def _time(self) -> None:
        """Chooses format and number of fragments after some steps, from rank 0's measurement."""
        self._moments.append(time.perf_counter())
        if len(self._moments) <= TIMED_STEPS:
            return
        quickest = min(b - a for a, b in itertools.pairwise(self._moments))
        small, large = map(min, zip(*(map(self._probe, PROBES) for _ in range(LOOKS)), strict=True))
        rate = (PROBES[1] - PROBES[0]) / max(large - small, 1e-9)
        kinds = [codec_of(name) for name in self._formats] or [self.codec]
        message_sizes = [self.drift.message_bytes(0, kind) for kind in kinds]
        codecs_in_limit = (
            i
            for i, total_bytes in enumerate(message_sizes)
            if needed(total_bytes, rate, quickest) <= MANY
        )
        index = next(codecs_in_limit, len(kinds) - 1)
        codec_seconds, numbers = self._own_seconds(kinds[index]), self.drift.anchor.numel()
        count = needed(message_sizes[index], rate, quickest, codec_seconds, numbers)
        choice = self.drift.anchor.new_tensor([index, count])
        self.drift.travel(dist.broadcast, choice, 0)
        index, count = (int(number) for number in choice.tolist())
        self.codec = kinds[index]
        self._cut(count)

    def _probe(self, size: int) -> float:
        """Returns the seconds of an all-gather of so many bytes of each rank."""
        device = self.drift.anchor.device
        message = torch.zeros(size, dtype=torch.uint8, device=device)
        rows = message.new_empty(self.drift.size * size)
        travel = self.drift.travel
        travel(dist.all_reduce, torch.zeros(1, device=device))  # all ranks begin together
        began = time.perf_counter()
        travel(all_gather, rows, message)
        rows[-1].item()  # waits for the device, which is part of the link's time
        return time.perf_counter() - began

    def _own_seconds(self, kind: Codec) -> float:
        """Returns this rank's seconds for encoding all weights and decoding all ranks' messages."""
        drift, took = self.drift, []
        tokens_before = list(drift.tokens)
        for _ in range(2):  # the first one allocates memory
            began = time.perf_counter()
            message = drift.message(0, kind)
            rows = message.new_zeros(drift.size * message.numel())  # nothing has moved
            drift.apply_messages(rows.view(drift.size, -1), 0, kind)
            drift.anchor[-1].item()  # waits for the device
            took.append(time.perf_counter() - began)
        drift.tokens = tokens_before
        return min(took)

    def _cut(self, fragments: int) -> None:
        tokens = self.drift.tokens[0]
        self.drift.cut(fragments)
        self.drift.count_step(tokens)
        self.fragments = fragments

    def state_dict(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "exchanges": self.exchanges,
            "fragments": self.fragments or 0,
            "codec": self.codec.name,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores fragments and codec that were chosen from the link's measurement."""
        if self.fragments is None and state["fragments"]:
            if self._formats:
                self.codec = codec_of(state.get("codec", USUAL))
            self._cut(state["fragments"])
        self.steps, self.exchanges = state["steps"], state["exchanges"]
        self.drift.reset()
        self._flight, self._dirty = None, False


def needed(
    total_bytes: int, rate: float, step_seconds: float, own_seconds: float = 0.0, numbers: int = 0
) -> int:
    """Returns the fewest fragments for which sending and coding stay within their limits.

    All weights together have messages of ``total_bytes``; ``rate`` is in bytes per second.
    ``own_seconds`` is the time to encode and decode all ``numbers`` weights. Fragments smaller
    than a chunk wouldn't save time.
    """
    travel = total_bytes / max(BUSY * rate * step_seconds, 1.0)
    work = min(own_seconds / max(OWN * step_seconds, 1e-9), numbers / NUMBERS)
    return max(1, min(MOST, math.ceil(max(travel, work))))


def check(fragments: int | None) -> None:
    """Raises ValueError for an impossible number of fragments."""
    if fragments is not None and not 1 <= fragments <= MOST:
        raise ValueError(f"fragments is {fragments}; 1 to {MOST} are possible")
