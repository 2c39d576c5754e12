"""Two threads and no lock: what is ready is taken without waking anybody."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hasten.parts.data.prefetch import ReadingThread
from waiting import until


def reading(source: Iterator[Any], room: int = 4, bound: int = 1 << 30) -> ReadingThread:
    return ReadingThread(source, None, lambda item: 8, room, bound)


class Bell:
    """Counts how often the reader is rung for, and lets it nap for ever."""

    def __init__(self, reader: ReadingThread) -> None:
        self.rung, self._rings = 0, reader._queue.bell
        reader._queue.bell = self  # type: ignore[assignment]

    def put(self, item: None) -> None:
        self.rung += 1
        self._rings.put(item)

    def get(self, timeout: float) -> None:
        self._rings.get()


@given(
    count=st.integers(0, 60),
    room=st.integers(1, 6),
    bound=st.integers(1, 60),
    slow=st.sampled_from([None, "reader", "taker"]),
)
def test_everything_arrives_in_order_whoever_is_slower(
    count: int, room: int, bound: int, slow: str | None
) -> None:
    def source() -> Iterator[int]:
        for number in range(count):
            if slow == "reader" and number % 20 == 7:
                time.sleep(0.002)
            yield number

    with reading(source(), room, bound) as reader:
        found = []
        while (taken := reader.take()) is not None:
            found.append(taken.item)
            assert 0 <= taken.depth <= room
            if slow == "taker" and taken.item % 20 == 7:
                time.sleep(0.002)
    assert found == list(range(count))


def test_a_reader_that_naps_is_rung_for_when_the_queue_is_half_empty_and_not_before() -> None:
    reader = reading(itertools.count(), room=6)
    bell = Bell(reader)
    with reader:
        assert until(lambda: reader._queue.napping)
        for _ in range(2):
            reader.take()
        assert bell.rung == 0  # four of six wait
        reader.take()
        assert bell.rung == 1
        assert until(lambda: reader._queue.ready.qsize() == 6)


def test_a_reader_finds_room_by_itself() -> None:
    with reading(itertools.count(), room=6) as reader:
        assert until(lambda: reader._queue.napping)
        reader.take()  # nobody rings
        assert until(lambda: reader._queue.ready.qsize() == 6)


def test_no_more_waits_than_there_is_room_for() -> None:
    with reading(itertools.count(), room=9, bound=20) as reader:
        for _ in range(50):
            reader.take()
            assert reader._queue.read_bytes - reader._queue.taken_bytes <= 20
        assert until(lambda: reader._queue.ready.qsize() == 2)
        reader.set_room(3)
        reader._queue.bound = 1 << 30  # second: the room of before holds nine
        assert until(lambda: reader._queue.ready.qsize() == 3)
        time.sleep(0.02)
        assert reader._queue.ready.qsize() == 3


def test_the_end_stays_the_end_and_an_error_stays_an_error() -> None:
    with reading(iter([1])) as reader:
        assert [reader.take() is None for _ in range(3)] == [False, True, True]

    def fails() -> Iterator[int]:
        yield 1
        raise OSError("lost")

    with reading(fails()) as reader:
        assert reader.take() is not None
        for _ in range(2):
            with pytest.raises(OSError, match="lost"):
                reader.take()


def test_a_closed_reader_holds_nothing_and_gives_nothing() -> None:
    items = [object() for _ in range(9)]
    with reading(iter(items)) as reader:
        assert until(lambda: reader._queue.napping)
    assert reader.take() is None
    assert reader._queue.ready.qsize() == 1  # the end


def test_a_taker_that_waits_is_let_go_when_the_reader_is_closed() -> None:
    go = threading.Event()

    def hangs() -> Iterator[int]:
        go.wait()
        yield 1

    found: list[Any] = []
    reader = reading(hangs())
    with reader:
        taker = threading.Thread(target=lambda: found.append(reader.take()))
        taker.start()
        reader.close(0.01)
        taker.join(60)
        assert found == [None]
        go.set()
