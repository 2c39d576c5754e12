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
import random
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from hasten.errors import require_real, require_whole
from hasten.machine.processes import running_time
from hasten.parts.data.collate import filled

PATIENCE_SECONDS = 30.0  # for the read that runs while we close; the thread ends when it returns
AT_EXIT_SECONDS = 2.0
MEMORY_BYTES = 1 << 30  # of batches that wait
NOTICEABLE_WAIT_SECONDS = 1e-4  # a shorter wait is the queue's, not the loader's
_END = object()


@dataclass
class PrefetchStatistics:
    """Measurements of the prefetcher."""

    batches: int = 0
    ready: int = 0  # batches that were there before they were asked for
    stall_seconds: float = 0.0  # time in which the caller waited for data, first batches included
    lookahead: int = 0  # as it is now
    left_alone: int = 0  # passes that were not read ahead, as reading draws random numbers


class ReadingThread:
    """Reads ``source`` until ``room`` items or ``bound`` bytes wait; use it as a ``with`` block.

    The room grows by half whenever the taker has to wait.

    Args:
        source: read in the thread alone from now on; a generator is closed there at the end.
        send: applied to every item in the thread (a copy to a device).
        room: items that may wait, at first and at most.
        bound: bytes that may wait; one item always may.
    """

    def __init__(
        self,
        source: Iterator[Any],
        send: Callable[[Any], Any],
        room: tuple[int, int],
        bound: int,
    ) -> None:
        (self._room, self._most), self._bound = room, bound
        self._ready: deque[tuple[Any, int]] = deque()
        self._changed = threading.Condition()
        self._waiting_bytes = self._largest = 0
        self._error: BaseException | None = None
        self._over = False  # nothing more is read
        # A daemon: at exit Python waits for other threads before it would run our atexit hook.
        self._thread = threading.Thread(
            target=self._read,
            args=(source, send, torch.is_grad_enabled()),
            name="hasten-read-ahead",
            daemon=True,
        )

    def __enter__(self) -> ReadingThread:
        atexit.register(self.close, AT_EXIT_SECONDS)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def take(self, statistics: PrefetchStatistics) -> Any:
        """The next item, or `_END`; raises what reading raised after earlier items."""
        requested_at = running_time()
        with self._changed:
            is_ready = bool(self._ready)
            self._changed.wait_for(lambda: self._ready or self._over)
            if not self._ready:
                if self._error is not None:
                    raise self._error
                return _END
            item, size = self._ready.popleft()
            self._waiting_bytes -= size
            waited = running_time() - requested_at
            if not is_ready and waited > NOTICEABLE_WAIT_SECONDS:
                self._room = min(self._room + max(1, self._room // 2), self._most)
                statistics.lookahead = self._room
            self._changed.notify_all()
        statistics.batches += 1
        statistics.ready += is_ready
        statistics.stall_seconds += waited
        return item

    def close(self, patience: float = PATIENCE_SECONDS) -> None:
        """Ends the thread and drops items that it read but were not taken."""
        atexit.unregister(self.close)
        with self._changed:
            self._over = True
            self._ready.clear()
            self._changed.notify_all()
        # The collector may run this in the reading thread itself, which can't wait for its own end.
        if self._thread is not threading.current_thread():
            self._thread.join(patience)

    def _read(self, source: Iterator[Any], send: Callable[[Any], Any], gradients: bool) -> None:
        try:
            with torch.set_grad_enabled(gradients):  # the mode belongs to a thread
                while self._has_room() and (item := next(source, _END)) is not _END:
                    self._put(send(item), tensor_bytes(item))
                    del item  # the taker's, and not held by a thread that waits
            if isinstance(source, Generator):
                source.close()
        except BaseException as error:  # it belongs into the caller's step, whatever it is
            self._error = error
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def _has_room(self) -> bool:
        """Waits until the next item may be read; False when the reader is closed."""

        def is_free() -> bool:
            fits = self._waiting_bytes + self._largest <= self._bound
            return not self._ready or (len(self._ready) < self._room and fits)

        with self._changed:
            self._changed.wait_for(lambda: self._over or is_free())
            return not self._over

    def _put(self, item: Any, size: int) -> None:
        with self._changed:
            if not self._over:
                self._ready.append((item, size))
                self._waiting_bytes += size
                self._largest = max(self._largest, size)
                self._changed.notify_all()


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
    sizes: list[int] = []

    def count(tensor: Tensor) -> Tensor:
        sizes.append(tensor.nbytes)
        return tensor

    each_tensor(value, count)
    return sum(sizes)


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


class SmartPrefetcher:
    """Reads any iterable of batches ahead: same order, same bits, less waiting.

    Args:
        lookahead: batches that may wait in the queue. It grows by half whenever the caller has
            to wait, so a queue becomes as long as the bursts of reading need.
        pattern_detection: merge the requests of a DataLoader in this process
            (``num_workers=0``) if its data set has ``read_range``; see
            :class:`MergedReads`.
        device: copy batches there on the way; None leaves them unchanged.
        max_lookahead: bound of the growth.
        memory_bytes: bound of the waiting tensors. One batch may always wait.

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
        memory_bytes: int = MEMORY_BYTES,
    ) -> None:
        require_whole(lookahead=lookahead, max_lookahead=max_lookahead)
        if lookahead < 1 or max_lookahead < lookahead:
            raise ValueError(
                f"lookahead={lookahead} and max_lookahead={max_lookahead}: give at least 1, and a "
                "max_lookahead that isn't below lookahead"
            )
        require_real(memory_bytes=memory_bytes)
        if memory_bytes < 1:
            raise ValueError(f"memory_bytes={memory_bytes}: give at least 1")
        self.max_lookahead, self.memory_bytes = max_lookahead, memory_bytes
        self.pattern_detection = pattern_detection
        self.device = None if device is None else torch.device(device)
        self.statistics = PrefetchStatistics(lookahead=lookahead)

    def wrap(self, loader: Iterable[Any]) -> ReadAhead:
        """The same batches, read ahead; iterate over it once per epoch."""
        return ReadAhead(self, with_merged_reads(loader) if self.pattern_detection else loader)


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
        for sent in self._sent(source, (lambda batch: batch) if copies is None else copies.send):
            self.batch += 1
            yield sent if copies is None else copies.receive(sent)
        self.epoch, self.batch = self.epoch + 1, 0

    def _sent(self, source: Iterator[Any], send: Callable[[Any], Any]) -> Generator[Any]:
        """The first one or two batches are read in this thread, the others in the reader's."""
        statistics = self.prefetcher.statistics

        def read() -> Any:
            began = running_time()
            if (batch := next(source, _END)) is not _END:
                batch = send(batch)
                statistics.batches += 1
                statistics.stall_seconds += running_time() - began
            return batch

        batch = read()
        if self._draws is None and batch is not _END:
            yield batch
            before = _random_states()
            batch = read()
            self._draws = None if batch is _END else _random_states() != before
        if self._draws:
            statistics.left_alone += 1
            while batch is not _END:
                yield batch
                batch = read()
        elif batch is not _END:
            room = statistics.lookahead, self.prefetcher.max_lookahead
            with ReadingThread(source, send, room, self.prefetcher.memory_bytes) as reader:
                while batch is not _END:
                    yield batch
                    del batch  # the caller's alone, also while it waits for the next
                    batch = reader.take(statistics)


def _random_states() -> tuple[bytes, Any, Any]:
    """The three generators that a data set can draw from without saying so."""
    numpy_state: Any = np.random.get_state(legacy=True)
    numpy_plain = (numpy_state[1].tobytes(), *numpy_state[2:])
    return torch.get_rng_state().numpy().tobytes(), numpy_plain, random.getstate()


# Merged reads: examples that lie near to each other are read in one request.
#
# A store that charges per request (a disk, an object store) serves a range for the price
# of an example. Reads are near to each other if they are in order, strided, or shuffled
# within blocks. Then a read requests a range around its example and keeps the others. This
# ends when few of them are used. In any other order, examples are requested one by one.
# Bits and order never depend on it.

WATCHED = 16  # reads before anything is concluded from them
NEAR = 128  # examples that all of them lie within
RANGE = 64  # examples of a merged request, which begins at a multiple of it
WORTH = 4  # examples of a range that have to be used, and half as many of the one before
MOST_KEPT = 256  # examples


@runtime_checkable
class RangeStore(Protocol):
    """Examples that can be read as a range for the price of one request.

    ``read_range(i, i + 1)[0]`` is what ``store[i]`` is.
    """

    def __len__(self) -> int: ...
    def read_range(self, start: int, stop: int) -> Sequence[Any]: ...


class MergedReads:
    """A map-style data set over a store: any order, few requests where reads are near."""

    def __init__(self, store: RangeStore) -> None:
        self.store = store
        self._last: deque[int] = deque(maxlen=WATCHED)
        self._kept: dict[int, Any] = {}  # the oldest first
        self._merges, self._used = False, 0  # examples of ranges

    def __len__(self) -> int:
        return len(self.store)

    def __getitem__(self, index: int) -> Any:
        index = range(len(self))[index]  # counts from the end, raises IndexError
        if index in self._kept:
            self._used += 1
            return self._kept.pop(index)
        if self._merges and self._used < WORTH:
            self._merges = False
            self._last.clear()
        if not self._merges:
            near = set(self._last)
            self._merges = len(near) == WATCHED and max(near) - min(near) < NEAR
            self._last.append(index)
        if not self._merges:
            example: Any = self.store.read_range(index, index + 1)[0]
            return example
        start = index // RANGE * RANGE
        examples = self.store.read_range(start, min(start + RANGE, len(self)))
        self._kept |= {i: example for i, example in enumerate(examples, start) if i != index}
        for oldest in list(self._kept)[: max(len(self._kept) - MOST_KEPT, 0)]:
            del self._kept[oldest]
        self._used //= 2
        return examples[index - start]


def with_merged_reads(loader: Iterable[Any]) -> Iterable[Any]:
    """Returns the DataLoader over `MergedReads`, or ``loader`` if there is no gain.

    There is no gain without ``read_range``, without batches, or if the data set fetches
    whole batches by itself (``__getitems__``). Worker processes don't gain either, because
    each reads only its share of the order.
    """
    if not isinstance(loader, DataLoader):
        return loader
    torch_loader: Any = loader
    fetches_batches = getattr(torch_loader.dataset, "__getitems__", None) is not None
    gains = isinstance(torch_loader.dataset, RangeStore) and not fetches_batches
    if not gains or torch_loader.num_workers or torch_loader.batch_sampler is None:
        return torch_loader  # type: ignore[no-any-return]
    merged: Iterable[Any] = DataLoader(
        MergedReads(torch_loader.dataset),
        batch_sampler=torch_loader.batch_sampler,
        collate_fn=torch_loader.collate_fn,
        pin_memory=torch_loader.pin_memory,
        generator=torch_loader.generator,
    )
    return merged
