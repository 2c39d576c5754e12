"""A thread that reads an iterator into a bounded queue and never outlives who takes from it.

The thread knows the queue and the iterator, not its owner, so an owner that is dropped is collected
and its ``with`` block ends the thread. At exit the interpreter closes the queues still open before
it takes its modules apart. An error waits in the queue behind the items that came before it.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple

import torch

PATIENCE_SECONDS = 30.0  # for the read that runs while we close; the thread ends when it returns
AT_EXIT_SECONDS = 2.0


class Taken(NamedTuple):
    """An item, and what could be seen when it was taken."""

    item: Any
    waited: float  # seconds until it was there
    depth: int  # items that were waiting, this one included
    room: int  # items that may wait, where memory allows no fewer
    read_seconds: float  # what reading and sending it took


class _Queue:
    """What both threads see; every field is written under ``changed``."""

    def __init__(self, room: int, bound: int) -> None:
        self.changed = threading.Condition()
        self.items: deque[tuple[Any, int, float]] = deque()  # (item, bytes, seconds to read)
        self.held_bytes, self.largest = 0, 0
        self.room, self.bound = room, bound
        self.error: BaseException | None = None
        self.finished, self.closed = False, False

    def wait_for_room(self) -> bool:
        """True when the next item may be read, False when nobody wants it any more."""
        with self.changed:
            self.changed.wait_for(lambda: self.closed or self._has_room())
            return not self.closed

    def _has_room(self) -> bool:
        if not self.items:
            return True  # one item may always wait, however large
        if len(self.items) >= self.room:
            return False
        return self.held_bytes + self.largest <= self.bound

    def by_memory(self) -> int:
        """Items that may wait; called under ``changed``."""
        return max(1, min(self.room, self.bound // self.largest if self.largest else self.room))

    def put(self, item: Any, size: int, seconds: float) -> None:
        with self.changed:
            self.items.append((item, size, seconds))
            self.held_bytes += size
            self.largest = max(self.largest, size)
            self.changed.notify_all()

    def end(self, error: BaseException | None) -> None:
        with self.changed:
            self.error, self.finished = error, True
            self.changed.notify_all()

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.items.clear()
            self.held_bytes = 0
            self.changed.notify_all()


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
        """Let so many items wait from now on."""
        if room == self._queue.room:  # nobody else writes it, so reading it needs no lock
            return
        with self._queue.changed:
            self._queue.room = room
            self._queue.changed.notify_all()

    def take(self) -> Taken | None:
        """The next item; None at the end.

        Raises whatever reading raised, once the items before it are taken.
        """
        queue = self._queue
        with queue.changed:
            depth = len(queue.items)
            began = time.perf_counter()
            queue.changed.wait_for(lambda: queue.items or queue.finished)
            waited = time.perf_counter() - began
            if not queue.items:
                if queue.error is not None:
                    raise queue.error
                return None
            item, size, seconds = queue.items.popleft()
            queue.held_bytes -= size
            room = queue.by_memory()
            queue.changed.notify_all()
        return Taken(item, waited, depth, room, seconds)

    def close(self, patience: float) -> None:
        """End the thread; what it read and nobody took is dropped."""
        self._queue.close()
        _open.discard(self)
        # The collector may run this in the reading thread itself, which can't wait for its own end.
        if self._thread is not threading.current_thread():
            self._thread.join(patience)


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
                began = time.perf_counter()
                try:
                    item = next(source)
                except StopIteration:
                    break
                sent = item if send is None else send(item)
                queue.put(sent, size(item), time.perf_counter() - began)
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
