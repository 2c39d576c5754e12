"""A thread that reads an iterator into a bounded queue and never outlives who takes from it.

To hand an item over takes no lock and, as a rule, no system call of the taker. It is the waking of
a thread that costs, tens of microseconds of the one who wakes, so the taker doesn't do it:

    reader   queue full: naps for half of what the taker lately needed for an item, looks again
    taker    takes what is there; rings for a reader that naps only once the queue is half empty

So in a steady pace the reader finds by itself that there is room, while the taker is at work.

The thread knows the queue and the iterator, not its owner, so an owner that is dropped is collected
and its ``with`` block ends the thread. At exit the interpreter closes the queues still open before
it takes its modules apart. An error waits in the queue behind the items that came before it.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import torch

PATIENCE_SECONDS = 30.0  # for the read that runs while we close; the thread ends when it returns
AT_EXIT_SECONDS = 2.0
SHORTEST_NAP, LONGEST_NAP = 0.001, 0.05  # seconds


class Taken(NamedTuple):
    """An item, and what could be seen when it was taken."""

    item: Any
    waited: float  # seconds until it was there
    depth: int  # items that were waiting, this one included
    room: int  # items that may wait, where memory allows no fewer
    read_seconds: float  # what reading and sending it took


class _Queue:
    """What both threads see; each field has one writer, so none needs a lock.

    What one thread reads of the other may be a moment old. That errs on the safe side: the reader
    believes the queue fuller than it is, the taker believes that the reader still naps.
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
        """True when the next item may be read, False when nobody wants it any more."""
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
        """Nobody takes any more; what waits is dropped."""
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
        self._given = time.perf_counter()
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
        """Let so many items wait from now on; a reader that naps sees it when it wakes."""
        self._queue.room = room

    def take(self) -> Taken | None:
        """The next item; None at the end.

        Raises whatever reading raised, once the items before it are taken.
        """
        queue = self._queue
        depth = queue.depth()
        asked = time.perf_counter()
        found = queue.ready.get()  # doesn't even let go of the interpreter where something is there
        given = time.perf_counter()
        if found is None:
            queue.ready.put(None)  # the end stays the end
            if queue.error is not None:
                raise queue.error
            return None
        item, size, seconds = found
        queue.taken_bytes += size
        queue.used_seconds, self._given = asked - self._given, given
        room = queue.by_memory()
        if queue.napping and queue.ready.qsize() <= room // 2:
            queue.bell.put(None)
        return Taken(item, given - asked, depth, room, seconds)

    def close(self, patience: float) -> None:
        """End the thread; what it read and nobody took is dropped."""
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
