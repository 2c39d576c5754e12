"""Prefetching of batches in a thread while the step computes, as far ahead as needed.

    caller's thread:  read batch 1 -> start the reader -> use 1 -> take 2, 3, ... from queue

    reader's thread:  next(loader) -> copy to device (pinned, own stream) -> put into queue

The caller reads the first batch, because loaders and samplers draw their seeds then.
Drawn in another thread, they would mix with dropout's draws at random. In the first
pass the caller reads the second batch too. The global random states before and after it
are compared. If reading changes them, the order of draws is part of the result, and the
loader is left unchanged. So a run with a prefetcher has the same bits as a run without
it.
"""

from __future__ import annotations

import atexit
import dataclasses
import math
import random
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hasten.errors import require_real, require_whole
from hasten.machine.processes import running_time
from hasten.parts.data.access_pattern import with_merged_reads
from hasten.parts.data.collate import filled

# A thread that reads an iterator into a bounded queue and never outlives who takes from it.
#
# To hand an item over takes no lock and, as a rule, no system call of the taker. It is the waking
# of a thread that costs, tens of microseconds of the one who wakes, so the taker doesn't do it:
#
#     reader   queue full: naps for half of what the taker lately needed for an item, looks again
#     taker    takes what is there; rings for a reader that naps only once the queue is half empty
#
# So in a steady pace the reader finds by itself that there is room, while the taker is at work.
#
# The thread knows the queue and the iterator, not its owner, so an owner that is dropped is
# collected and its ``with`` block ends the thread. At exit the interpreter closes the queues still
# open before it takes its modules apart. An error waits in the queue behind the items that came
# before it.

PATIENCE_SECONDS = 30.0  # for the read that runs while we close; the thread ends when it returns
AT_EXIT_SECONDS = 2.0
SHORTEST_NAP, LONGEST_NAP = 0.001, 0.05  # seconds


class TakenItem(NamedTuple):
    """An item, and what could be seen when it was taken."""

    item: Any
    waited: float  # seconds until it was there
    depth: int  # items that were waiting, this one included
    room: int  # items that may wait, where memory allows no fewer
    read_seconds: float  # what reading and sending it took


class _Queue:
    """Fields that both threads read; each field has one writer, so none needs a lock.

    A value from the other thread may be a moment old. That errs on the safe side: to the
    reader the queue seems fuller than it is, and to the taker the reader seems still
    paused.
    """

    def __init__(self, room: int, bound: int) -> None:
        self.ready: SimpleQueue[tuple[Any, int, float] | None] = SimpleQueue()  # None: the end
        self.bell: SimpleQueue[None] = SimpleQueue()  # rung for a reader that naps
        self.bound = bound
        # Written by the reader:
        self.read_bytes, self.largest = 0, 0
        self.napping, self.finished = False, False
        self.error: BaseException | None = None
        # Written by the taker:
        self.room, self.taken_bytes, self.used_seconds = room, 0, 0.0
        self.closed = False

    def wait_for_room(self) -> bool:
        """Returns True when the next item may be read, False when the queue is closed."""
        while not self.closed and not self._has_room():
            self.napping = True
            with suppress(Empty):
                self.bell.get(timeout=min(max(self.used_seconds / 2, SHORTEST_NAP), LONGEST_NAP))
            self.napping = False
        return not self.closed

    def _has_room(self) -> bool:
        waiting = self.ready.qsize()
        if not waiting:
            return True  # one item may always wait, however large
        if waiting >= self.room:
            return False
        return self.read_bytes - self.taken_bytes + self.largest <= self.bound

    def by_memory(self) -> int:
        """Items that may wait."""
        return max(1, min(self.room, self.bound // self.largest if self.largest else self.room))

    def depth(self) -> int:
        """Items that wait, the end not counted."""
        return max(self.ready.qsize() - self.finished, 0)

    def put(self, item: Any, size: int, seconds: float) -> None:
        self.largest = max(self.largest, size)
        self.read_bytes += size
        self.ready.put((item, size, seconds))

    def end(self, error: BaseException | None) -> None:
        self.error = error
        self.ready.put(None)
        self.finished = True

    def close(self) -> None:
        """Stops the queue; waiting batches are dropped."""
        self.closed = True
        self.bell.put(None)
        self.drop()

    def drop(self) -> None:
        try:
            while True:
                self.ready.get_nowait()
        except Empty:
            self.ready.put(None)  # a taker in another thread finds the end


class ReadingThread:
    """Reads ``source`` until ``room`` items or ``bound`` bytes wait; use it as a ``with`` block.

    Args:
        source: read in the thread alone from now on; a generator is closed there at the end.
        send: applied to every item in the thread (a copy to a device).
        size: bytes of an item as it was read.
        room: items that may wait.
        bound: bytes that may wait.
    """

    def __init__(
        self,
        source: Iterator[Any],
        send: Callable[[Any], Any] | None,
        size: Callable[[Any], int],
        room: int,
        bound: int,
    ) -> None:
        self._queue = _Queue(room, bound)
        self._given = running_time()
        arguments = (self._queue, source, send, size, torch.is_grad_enabled())
        # A daemon: at exit Python waits for other threads before it would run our atexit hook.
        self._thread = threading.Thread(
            target=_read, args=arguments, name="hasten-read-ahead", daemon=True
        )

    def __enter__(self) -> ReadingThread:
        _open.add(self)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close(PATIENCE_SECONDS)

    def set_room(self, room: int) -> None:
        """Sets the maximum number of waiting items; a paused reader applies it when it wakes."""
        self._queue.room = room

    def take(self) -> TakenItem | None:
        """The next item, None at the end; raises what reading raised after earlier items."""
        queue = self._queue
        depth = queue.depth()
        requested_at = running_time()
        entry = queue.ready.get()  # doesn't even let go of the interpreter where something is there
        received_at = running_time()
        if entry is None:
            queue.ready.put(None)  # the end stays the end
            if queue.error is not None:
                raise queue.error
            return None
        item, size, seconds = entry
        queue.taken_bytes += size
        queue.used_seconds, self._given = requested_at - self._given, received_at
        room = queue.by_memory()
        if queue.napping and queue.ready.qsize() <= room // 2:
            queue.bell.put(None)
        return TakenItem(item, received_at - requested_at, depth, room, seconds)

    def close(self, patience: float) -> None:
        """Ends the thread and drops items that it read but were not taken."""
        self._queue.close()
        _open.discard(self)
        # The collector may run this in the reading thread itself, which can't wait for its own end.
        if self._thread is not threading.current_thread():
            self._thread.join(patience)
            self._queue.drop()  # what was put between the two


def _read(
    queue: _Queue,
    source: Iterator[Any],
    send: Callable[[Any], Any] | None,
    size: Callable[[Any], int],
    with_gradients: bool,
) -> None:
    error: BaseException | None = None
    try:
        with torch.set_grad_enabled(with_gradients):  # the mode belongs to a thread
            while queue.wait_for_room():
                began = running_time()
                try:
                    item = next(source)
                except StopIteration:
                    break
                sent = item if send is None else send(item)
                queue.put(sent, size(item), running_time() - began)
                del item, sent  # the queue's, or the taker's, and not held by a thread that waits
        if isinstance(source, Generator):
            source.close()
    except BaseException as caught:  # it belongs into the caller's step, whatever it is
        error = caught
    queue.end(error)


_open: weakref.WeakSet[ReadingThread] = weakref.WeakSet()


def _close_all() -> None:
    for reader in list(_open):
        reader.close(AT_EXIT_SECONDS)


atexit.register(_close_all)


# The pace of a reader and a user: how many batches have to wait so that a burst isn't felt.
#
# While the reader needs longer for a batch than the user, the queue between them loses what the
# difference is worth in batches. The deficit of time adds up over a burst, however many batches it
# has, and is paid back while reading is faster (the recursion of a waiting line, Lindley 1952):
#
#     deficit <- max(0, deficit + seconds to read a batch - seconds it was used)
#
# The worst deficit of the last some hundred batches, divided by the seconds that a batch is used,
# is the number of batches that must wait when such a burst begins. So a queue is long enough from
# the second burst on, also if the first one was hidden by chance, and stays so between bursts.

REMEMBERED = 512  # batches after which a burst is forgotten, at the earliest
NOTICEABLE_SECONDS = 1e-3  # a smaller deficit is the scheduler's, not the loader's
WEIGHT = 0.05  # of the newest batch in the mean time of use


class LookaheadController:
    """Two clocks, kept by whoever takes the batches."""

    def __init__(self, most: int) -> None:
        self.most = most  # batches that could wait at all: a reader too slow for ever owes no more
        self.use_seconds = 0.0  # mean
        self._deficit = self._worst = self._worst_before = 0.0
        self._noted = 0

    def note(self, read_seconds: float, use_seconds: float) -> None:
        """A batch was read in so long, and the one before it was used for so long."""
        mean = self.use_seconds
        self.use_seconds = mean + WEIGHT * (use_seconds - mean) if self._noted else use_seconds
        owed = self._deficit + read_seconds - use_seconds
        self._deficit = min(max(owed, 0.0), self.most * self.use_seconds)
        self._worst = max(self._worst, self._deficit)
        self._noted += 1
        if self._noted % REMEMBERED == 0:
            self._worst_before, self._worst = self._worst, self._deficit

    @property
    def wanted(self) -> int:
        """Batches that should wait; one more than the worst burst took, for it may begin late."""
        worst = max(self._worst, self._worst_before)
        if worst < NOTICEABLE_SECONDS or not self.use_seconds:
            return 1
        return min(math.ceil(worst / self.use_seconds) + 1, self.most)


# Copies to an accelerator beside its computing: pinned memory, a stream of their own, an event.
#
# ``send`` runs in the thread that reads ahead and returns at once; ``receive`` runs where the batch
# is used and lets the device, not the host, wait for the copy. A batch may be a tensor or any
# nesting of mappings, tuples, lists and dataclasses; everything else in it is handed on as it is.


class DeviceCopies:
    """The way of batches to one device; without streams it is a plain ``tensor.to(device)``."""

    def __init__(self, device: str | torch.device) -> None:
        self.device = torch.device(device)
        # Streams belong to one index, and the current one differs between threads: settle it here.
        if self.device.index is None and _is_accelerator(self.device):
            index = torch.accelerator.current_device_index()
            self.device = torch.device(self.device.type, index)
        self.stream = _stream(self.device)

    def send(self, batch: Any) -> tuple[Any, Any]:
        """The batch on the device, maybe still on its way, and the event of its arrival."""
        if self.stream is None:
            return each_tensor(batch, lambda t: t.to(self.device)), None
        with self.stream:
            sent = each_tensor(batch, self._send)
            return sent, self.stream.record_event()

    def receive(self, sent: tuple[Any, Any]) -> Any:
        """The batch, which work queued from now on finds arrived."""
        batch, arrival = sent
        if arrival is None:
            return batch
        current = torch.accelerator.current_stream(self.device)
        current.wait_event(arrival)

        def keep(tensor: Tensor) -> Tensor:
            # The memory is the side stream's: without this it could be reused while still read.
            if tensor.device == self.device:
                tensor.record_stream(current)
            return tensor

        return each_tensor(batch, keep)

    def _send(self, tensor: Tensor) -> Tensor:
        if tensor.device.type == "cpu" and not tensor.is_pinned():
            tensor = tensor.pin_memory()  # only from pinned memory does a copy not block the host
        return tensor.to(self.device, non_blocking=True)


def each_tensor(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same nesting with every tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return filled(value, {key: each_tensor(item, change) for key, item in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple takes its fields
        return type(value)(*(each_tensor(item, change) for item in value))
    if isinstance(value, tuple | list):
        return type(value)(each_tensor(item, change) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = (f.name for f in dataclasses.fields(value) if f.init)
        changed = {name: each_tensor(getattr(value, name), change) for name in fields}
        return dataclasses.replace(value, **changed)
    return value


def tensor_bytes(value: Any) -> int:
    """Bytes of all tensors in a batch."""
    total = 0

    def count(tensor: Tensor) -> Tensor:
        nonlocal total
        total += tensor.nbytes
        return tensor

    each_tensor(value, count)
    return total


def _is_accelerator(device: torch.device) -> bool:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator is not None and accelerator.type == device.type


def _stream(device: torch.device) -> Any:
    """Returns a second stream next to the computing one, or None if the device has none."""
    if not _is_accelerator(device):
        return None
    try:
        return torch.Stream(device=device)
    except (RuntimeError, NotImplementedError):
        return None


# The prefetcher.

MEMORY_BYTES = 1 << 30  # of batches that wait, where the user gives no bound
FULL_IN_A_ROW = 32  # batches taken from a full queue before it becomes shorter by one
NOTICEABLE_WAIT_SECONDS = 1e-4  # a shorter wait is the lock's, not the loader's


@dataclass
class PrefetchStatistics:
    """Measurements of the prefetcher: waiting, and the queue's fill level at each request."""

    batches: int = 0
    ready: int = 0  # batches that were there before they were asked for
    stall_seconds: float = 0.0  # time in which the caller waited for data, first batches included
    deepest: int = 0
    lookahead: int = 0  # as it is now
    left_alone: int = 0  # passes that were not read ahead, as reading draws random numbers


class SmartPrefetcher:
    """Reads any iterable of batches ahead: same order, same bits, less waiting.

    Args:
        lookahead: batches that may wait in the queue. It grows to the length of bursts of
            reading (``LookaheadController``) and while the caller has to wait. It shrinks
            when the queue stays full, but never below this.
        pattern_detection: merge the requests of a DataLoader in this process
            (``num_workers=0``) if its data set has ``read_range``; see
            :mod:`hasten.parts.data.access_pattern`.
        device: copy batches there on the way; None leaves them unchanged.
        max_lookahead: bound of the growth.
        memory_bytes: bound of the waiting tensors; None: 1 GiB. One batch may always wait.

    A data set may draw from torch's, numpy's or Python's global generator while it reads.
    This is detected by the second batch. A data set that does so only later needs a
    generator of its own.
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
        require_whole(lookahead=lookahead, max_lookahead=max_lookahead)
        if lookahead < 1 or max_lookahead < lookahead:
            raise ValueError(
                f"lookahead={lookahead} and max_lookahead={max_lookahead}: give at least 1, and a "
                "max_lookahead that isn't below lookahead"
            )
        if memory_bytes is not None:
            require_real(memory_bytes=memory_bytes)
        if memory_bytes is not None and memory_bytes < 1:
            raise ValueError(f"memory_bytes={memory_bytes}: give at least 1, or None for 1 GiB")
        self.lookahead, self.max_lookahead = lookahead, max_lookahead
        self.pattern_detection = pattern_detection
        self.memory_bytes = memory_bytes
        self.device = None if device is None else torch.device(device)
        self.statistics = PrefetchStatistics(lookahead=lookahead)
        self._full_in_a_row = 0
        self._pace = LookaheadController(max_lookahead)

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
        """Returns the loader's measured pace; ``ReadAhead.state_dict`` has the position."""
        return asdict(self.statistics)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues with the look-ahead of an earlier run, within today's bounds."""
        self.statistics = PrefetchStatistics(**state)
        within = min(max(self.statistics.lookahead, self.lookahead), self.max_lookahead)
        self.statistics.lookahead = within

    def note(self, taken: TakenItem, used_seconds: float) -> int:
        """Notes a taken batch, ``used_seconds`` after the last; returns the new look-ahead.

        It follows the bursts of reading. A measurable stall adds at least half to it. A queue
        that stayed full subtracts one, but never goes below the need of a burst.
        """
        statistics = self.statistics
        statistics.batches += 1
        statistics.ready += taken.depth > 0
        statistics.stall_seconds += taken.waited
        statistics.deepest = max(statistics.deepest, taken.depth)
        self._pace.note(taken.read_seconds, used_seconds)
        self._full_in_a_row = self._full_in_a_row + 1 if taken.depth >= taken.room else 0
        ahead = statistics.lookahead
        if taken.depth == 0 and taken.waited > NOTICEABLE_WAIT_SECONDS:
            ahead += max(1, ahead // 2)
        elif self._full_in_a_row == FULL_IN_A_ROW:
            self._full_in_a_row = 0
            ahead = max(ahead - 1, self.lookahead)
        statistics.lookahead = min(max(ahead, self._pace.wanted), self.max_lookahead)
        return statistics.lookahead


class ReadAhead:
    """A loader behind a prefetcher; counts the batches that the caller has taken."""

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
        for done in range(self.batch):
            if next(source, _END) is _END:
                raise ValueError(
                    f"the position to resume at is batch {self.batch} of an epoch, and the loader "
                    f"gives {done}; resume with the loader that was saved with"
                )
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
            began = running_time()
            batch = next(source, _END)
            if batch is _END:
                return
            sent = batch if copies is None else copies.send(batch)
            statistics = self.prefetcher.statistics
            statistics.batches += 1
            statistics.stall_seconds += running_time() - began
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
            yielded_at = running_time()
            yield from read
            while True:
                used = running_time() - yielded_at
                taken = reader.take()
                if taken is None:
                    return
                reader.set_room(prefetcher.note(taken, used))
                yielded_at = running_time()
                yield taken.item
                del taken  # the caller's alone, also while it waits for the next


_END = object()


def _random_states() -> tuple[bytes, Any, Any]:
    """The three generators that a data set can draw from without saying so."""
    numpy_state: Any = np.random.get_state(legacy=True)
    numpy_plain = (numpy_state[1].tobytes(), *numpy_state[2:])
    return torch.get_rng_state().numpy().tobytes(), numpy_plain, random.getstate()
