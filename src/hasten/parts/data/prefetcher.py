"""A prefetcher reads batches in a thread while the step computes, as far ahead as the stall asks.

    caller's thread:  read batch 1 -> start the reader -> use 1 -> take 2, 3, ... from the queue
    reader's thread:  next(loader) -> copy to the device (pinned, own stream) -> put into the queue

The first batch is read by the caller, because loaders and samplers draw their seeds then: drawn in
another thread, they would take turns with dropout by chance. In the first pass the second batch is
too, and the global random states before and after it are compared; where reading moves them, order
of draws is part of the result, and the loader is left as it is. So a run with a prefetcher has the
bits of the run without it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Generator, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from hasten.parts.data.access_pattern import with_merged_reads
from hasten.parts.data.device_copies import DeviceCopies, tensor_bytes
from hasten.parts.data.pace import Pace
from hasten.parts.data.reading_thread import ReadingThread, Taken

MEMORY_BYTES = 1 << 30  # of batches that wait, where the user gives no bound
FULL_IN_A_ROW = 32  # batches taken from a full queue before it becomes shorter by one
NOTICEABLE_SECONDS = 1e-4  # a shorter wait is the lock's, not the loader's


@dataclass
class Statistics:
    """What the prefetcher saw: waiting, and how full the queue was when a batch was asked for."""

    batches: int = 0
    ready: int = 0  # batches that were there before they were asked for
    stall_seconds: float = 0.0  # time in which the caller waited for data, first batches included
    deepest: int = 0
    lookahead: int = 0  # as it is now
    left_alone: int = 0  # passes that were not read ahead, as reading draws random numbers


class SmartPrefetcher:
    """Reads any iterable of batches ahead: same order, same bits, less waiting.

    Args:
        lookahead: batches that may wait in the queue; grows to what the bursts of reading take
            (:mod:`hasten.parts.data.pace`) and while the caller has to wait, and goes back when the
            queue stays full, never below this.
        pattern_detection: merge the requests of a DataLoader in this process (``num_workers=0``)
            whose data set has ``read_range``; see :mod:`hasten.parts.data.access_pattern`.
        device: copy batches there on the way; None leaves them where they are.
        max_lookahead: bound of the growth.
        memory_bytes: bound of the tensors that wait; None: 1 GiB. One batch may always wait.

    A data set that draws from torch's, numpy's or Python's global generator while it reads is
    recognised by the second batch; one that does so only later has to bring a generator of its own.
    """

    def __init__(
        self,
        lookahead: int = 4,
        pattern_detection: bool = True,
        *,
        device: str | torch.device | None = None,
        max_lookahead: int = 32,
        memory_bytes: int | None = None,
    ) -> None:
        if lookahead < 1 or max_lookahead < lookahead:
            raise ValueError(
                f"lookahead={lookahead} and max_lookahead={max_lookahead}: give at least 1, and a "
                "max_lookahead that isn't below lookahead"
            )
        if memory_bytes is not None and memory_bytes < 1:
            raise ValueError(f"memory_bytes={memory_bytes}: give at least 1, or None for 1 GiB")
        self.lookahead, self.max_lookahead = lookahead, max_lookahead
        self.pattern_detection = pattern_detection
        self.memory_bytes = memory_bytes
        self.device = None if device is None else torch.device(device)
        self.statistics = Statistics(lookahead=lookahead)
        self._full_in_a_row = 0
        self._pace = Pace(max_lookahead)

    def wrap(self, loader: Iterable[Any]) -> ReadAhead:
        """The same batches, read ahead; iterate over it once per epoch."""
        return ReadAhead(self, with_merged_reads(loader) if self.pattern_detection else loader)

    def settings(self) -> dict[str, Any]:
        """The arguments that build an equal prefetcher, as plain values."""
        return {
            "lookahead": self.lookahead,
            "pattern_detection": self.pattern_detection,
            "device": None if self.device is None else str(self.device),
            "max_lookahead": self.max_lookahead,
            "memory_bytes": self.memory_bytes,
        }

    def state_dict(self) -> dict[str, Any]:
        """What was learned of the loader's pace; the position is ``ReadAhead.state_dict``."""
        return asdict(self.statistics)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the look-ahead that an earlier run arrived at, within today's bounds."""
        self.statistics = Statistics(**state)
        within = min(max(self.statistics.lookahead, self.lookahead), self.max_lookahead)
        self.statistics.lookahead = within

    def note(self, taken: Taken, used_seconds: float) -> int:
        """A batch was taken, ``used_seconds`` after the one before; the look-ahead from now on.

        It follows the bursts of reading. A stall that could be measured adds at least half to it, a
        queue that stayed full takes one away, but not from what a burst would need.
        """
        seen = self.statistics
        seen.batches += 1
        seen.ready += taken.depth > 0
        seen.stall_seconds += taken.waited
        seen.deepest = max(seen.deepest, taken.depth)
        self._pace.note(taken.read_seconds, used_seconds)
        self._full_in_a_row = self._full_in_a_row + 1 if taken.depth >= taken.room else 0
        ahead = seen.lookahead
        if taken.depth == 0 and taken.waited > NOTICEABLE_SECONDS:
            ahead += max(1, ahead // 2)
        elif self._full_in_a_row == FULL_IN_A_ROW:
            self._full_in_a_row = 0
            ahead = max(ahead - 1, self.lookahead)
        seen.lookahead = min(max(ahead, self._pace.wanted), self.max_lookahead)
        return seen.lookahead


class ReadAhead:
    """A loader behind a prefetcher; knows how many of its batches the caller has taken."""

    def __init__(self, prefetcher: SmartPrefetcher, loader: Iterable[Any]) -> None:
        self.prefetcher, self.loader = prefetcher, loader
        self.epoch, self.batch = 0, 0  # consumed, not read
        self._skip = 0
        self._draws: bool | None = None  # whether reading a batch moves a global random state

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]  # TypeError where the loader has none

    def state_dict(self) -> dict[str, int]:
        """Epochs and batches that the caller has taken; what was only read ahead doesn't count."""
        return {"epoch": self.epoch, "batch": self.batch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """The next pass begins behind the batches that were taken; they are read and dropped.

        The loader's own order has to be that of the earlier pass (its seed or sampler's epoch).
        """
        self.epoch, self._skip = state["epoch"], state["batch"]

    def __iter__(self) -> Iterator[Any]:
        device = self.prefetcher.device
        copies = None if device is None else DeviceCopies(device)
        source = iter(self.loader)
        self.batch, self._skip = self._skip, 0
        for _ in range(self.batch):
            if next(source, _END) is _END:
                break
        for sent in self._sent(source, copies):
            self.batch += 1
            yield sent if copies is None else copies.receive(sent)
        self.epoch, self.batch = self.epoch + 1, 0

    def _sent(self, source: Iterator[Any], copies: DeviceCopies | None) -> Generator[Any]:
        """The first one or two batches in this thread, the others from the reader's."""
        read = list(self._here(source, copies, 1))
        if self._draws is None:
            yield from read
            before = _random_states()
            read = list(self._here(source, copies, 1))
            if not read:
                return
            self._draws = _random_states() != before
        if self._draws:
            self.prefetcher.statistics.left_alone += 1
            yield from read
            yield from self._here(source, copies, None)
        else:
            yield from self._ahead(source, copies, read)

    def _here(
        self, source: Iterator[Any], copies: DeviceCopies | None, count: int | None
    ) -> Iterator[Any]:
        while count is None or count > 0:
            began = time.perf_counter()
            batch = next(source, _END)
            if batch is _END:
                return
            sent = batch if copies is None else copies.send(batch)
            seen = self.prefetcher.statistics
            seen.batches += 1
            seen.stall_seconds += time.perf_counter() - began
            count = None if count is None else count - 1
            yield sent

    def _ahead(
        self, source: Iterator[Any], copies: DeviceCopies | None, read: list[Any]
    ) -> Iterator[Any]:
        """``read``, and behind it what the reader brings; it begins before ``read`` is used."""
        prefetcher = self.prefetcher
        room = prefetcher.statistics.lookahead
        bound = MEMORY_BYTES if prefetcher.memory_bytes is None else prefetcher.memory_bytes
        send = None if copies is None else copies.send
        with ReadingThread(source, send, tensor_bytes, room, bound) as reader:
            given = time.perf_counter()
            yield from read
            while True:
                used = time.perf_counter() - given
                taken = reader.take()
                if taken is None:
                    return
                reader.set_room(prefetcher.note(taken, used))
                given = time.perf_counter()
                yield taken.item
                del taken  # the caller's alone, also while it waits for the next


_END = object()


def _random_states() -> tuple[bytes, Any, Any]:
    """The three generators that a data set can draw from without saying so."""
    numpy_state: Any = np.random.get_state(legacy=True)
    numpy_plain = (numpy_state[1].tobytes(), *numpy_state[2:])
    return torch.get_rng_state().numpy().tobytes(), numpy_plain, random.getstate()
