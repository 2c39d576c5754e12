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

PATIENCE_SECONDS = 30.0  # longest wait of ``close`` for a read in progress
AT_EXIT_SECONDS = 2.0  # the same at the program's end
MEMORY_BYTES = 1 << 30  # default bound of the bytes of waiting batches
NOTICEABLE_WAIT_SECONDS = 1e-4  # a shorter wait is caused by the queue, not by the loader
_END = object()  # marks the end of the batches


@dataclass
class PrefetchStatistics:
    """Measurements of the prefetcher."""

    batches: int = 0
    ready: int = 0  # batches that were already in the queue when the caller requested them
    stall_seconds: float = 0.0  # time in which the caller waited for data, first batches included
    lookahead: int = 0  # current length of the queue
    left_alone: int = 0  # passes without prefetching, because reading draws random numbers


class ReadingThread:
    """Reads ``source`` into a queue of ``room`` items or ``bound`` bytes; use it in a ``with``.

    The queue grows by half whenever the caller of ``take`` has to wait.

    Args:
        source: iterator; the thread alone reads it, and closes a generator at the end.
        send: applied to every item in the thread (a copy to a device).
        room: length of the queue: (at first, at most).
        bound: most bytes in the queue; one item is always allowed.
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
        self._over = False  # True: nothing more is read
        # A daemon, because Python waits for other threads before it runs the atexit hook.
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
        """Returns the next item, or `_END`; raises an error of reading after the earlier items."""
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
        """Ends the thread and drops the items in the queue."""
        atexit.unregister(self.close)
        with self._changed:
            self._over = True
            self._ready.clear()
            self._changed.notify_all()
        # The garbage collector may call this in the thread itself, which can't join itself.
        if self._thread is not threading.current_thread():
            self._thread.join(patience)

    def _read(self, source: Iterator[Any], send: Callable[[Any], Any], gradients: bool) -> None:
        try:
            with torch.set_grad_enabled(gradients):  # each thread has its own mode
                while self._has_room() and (item := next(source, _END)) is not _END:
                    self._put(send(item), tensor_bytes(item))
                    del item  # otherwise this thread would keep its memory while it waits
            if isinstance(source, Generator):
                source.close()
        except BaseException as error:  # ``take`` raises it in the caller's thread
            self._error = error
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def _has_room(self) -> bool:
        """Waits until the next item may be read; returns False if the reader was closed."""

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


# Copies to an accelerator in parallel with computation: pinned memory, a second stream, an event.
#
# ``send`` runs in the reading thread and returns at once. ``receive`` runs where the batch is used;
# the device, not the host, waits for the copy. A batch may be a tensor or any nesting of mappings,
# tuples, lists and dataclasses; other objects in it are unchanged.


class DeviceCopies:
    """Copies batches to one device; on a device without streams by ``tensor.to(device)``."""

    def __init__(self, device: str | torch.device) -> None:
        self.device = torch.device(device)
        # A stream belongs to one device, and each thread has its own current device: fix it here.
        if self.device.index is None and _is_accelerator(self.device):
            index = torch.accelerator.current_device_index()
            self.device = torch.device(self.device.type, index)
        self.stream = _stream(self.device)

    def send(self, batch: Any) -> tuple[Any, Any]:
        """Starts to copy a batch; returns its tensors on the device and the event of the end."""
        if self.stream is None:
            return each_tensor(batch, lambda t: t.to(self.device)), None
        with self.stream:
            sent = each_tensor(batch, self._send)
            return sent, self.stream.record_event()

    def receive(self, sent: tuple[Any, Any]) -> Any:
        """Returns the batch; work queued on the current stream from now on waits for the copy."""
        batch, arrival = sent
        if arrival is None:
            return batch
        current = torch.accelerator.current_stream(self.device)
        current.wait_event(arrival)

        def keep(tensor: Tensor) -> Tensor:
            # Otherwise the copying stream could reuse the memory while this stream reads it.
            if tensor.device == self.device:
                tensor.record_stream(current)
            return tensor

        return each_tensor(batch, keep)

    def _send(self, tensor: Tensor) -> Tensor:
        if tensor.device.type == "cpu" and not tensor.is_pinned():
            tensor = tensor.pin_memory()  # a copy from other memory would block the host
        return tensor.to(self.device, non_blocking=True)


def each_tensor(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Returns the same nesting with ``change`` applied to every tensor."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return filled(value, {key: each_tensor(item, change) for key, item in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple
        return type(value)(*(each_tensor(item, change) for item in value))
    if isinstance(value, tuple | list):
        return type(value)(each_tensor(item, change) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = (f.name for f in dataclasses.fields(value) if f.init)
        changed = {name: each_tensor(getattr(value, name), change) for name in fields}
        return dataclasses.replace(value, **changed)
    return value


def tensor_bytes(value: Any) -> int:
    """Returns the bytes of all tensors in a batch."""
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
        """Returns an iterable of the loader's batches, read ahead; iterate once per epoch."""
        return ReadAhead(self, with_merged_reads(loader) if self.pattern_detection else loader)


class ReadAhead:
    """A loader behind a prefetcher; counts the batches that the caller has taken."""

    def __init__(self, prefetcher: SmartPrefetcher, loader: Iterable[Any]) -> None:
        self.prefetcher, self.loader = prefetcher, loader
        self.epoch, self.batch = 0, 0  # position of the caller, not of the reader
        self._skip = 0
        self._draws: bool | None = None  # True if reading a batch draws global random numbers

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]  # TypeError where the loader has none

    def state_dict(self) -> dict[str, int]:
        """Returns the epochs and batches that the caller has taken, without those read ahead."""
        return {"epoch": self.epoch, "batch": self.batch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Sets the position; the next pass reads and drops the batches before it.

        The loader must have the order of the saved pass (by its seed or its sampler's epoch).
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
        """Yields sent batches: the first one or two read in this thread, the others ahead."""
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
                    del batch  # otherwise it would take memory while the next one is awaited
                    batch = reader.take(statistics)


def _random_states() -> tuple[bytes, Any, Any]:
    """Returns the states of the three global generators, from which a data set can draw."""
    numpy_state: Any = np.random.get_state(legacy=True)
    numpy_plain = (numpy_state[1].tobytes(), *numpy_state[2:])
    return torch.get_rng_state().numpy().tobytes(), numpy_plain, random.getstate()


# Merged reads: one request reads several neighbouring examples.
#
# On a disk or an object store a range costs about as much as one example. Reads are close together
# if they are in order, strided, or shuffled within blocks. Then a read requests the range around
# its example, and the other examples are stored for later reads. If few of them are used, this
# ends. In any other order, examples are requested one by one. Results never depend on it.

WATCHED = 16  # last reads, by which merging begins
NEAR = 128  # examples among which all watched reads must lie
RANGE = 64  # examples of a merged request, which begins at a multiple of it
# Uses of stored examples below which merging ends; counted with half of the uses before.
WORTH = 4
MOST_KEPT = 256  # examples that are stored


@runtime_checkable
class RangeStore(Protocol):
    """Examples that can be read as a range for the price of one request.

    ``read_range(i, i + 1)[0]`` is what ``store[i]`` is.
    """

    def __len__(self) -> int: ...
    def read_range(self, start: int, stop: int) -> Sequence[Any]: ...


class MergedReads:
    """A map-style data set over a store, with fewer requests if reads are close together."""

    def __init__(self, store: RangeStore) -> None:
        self.store = store
        self._last: deque[int] = deque(maxlen=WATCHED)
        self._kept: dict[int, Any] = {}  # stored examples by index, the oldest first
        self._merges, self._used = False, 0  # state of merging, and uses of stored examples

    def __len__(self) -> int:
        return len(self.store)

    def __getitem__(self, index: int) -> Any:
        index = range(len(self))[index]  # accepts negative indices, raises IndexError
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
