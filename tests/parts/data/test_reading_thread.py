"""A thread that reads ahead: order, room, errors, and its end."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hasten.parts.data.prefetch import _END, PrefetchStatistics, ReadingThread
from waiting import until


def reading(source: Iterator[Any], room: int = 4, bound: int = 1 << 30) -> ReadingThread:
    return ReadingThread(source, lambda item: item, (room, room), bound)


def taken(reader: ReadingThread) -> Any:
    return reader.take(PrefetchStatistics())


@given(
    count=st.integers(0, 60),
    room=st.integers(1, 6),
    slow=st.sampled_from([None, "reader", "taker"]),
)
def test_everything_arrives_in_order_whoever_is_slower(
    count: int, room: int, slow: str | None
) -> None:
    def source() -> Iterator[int]:
        for number in range(count):
            if slow == "reader" and number % 20 == 7:
                time.sleep(0.002)
            yield number

    with reading(source(), room) as reader:
        found = []
        while (item := taken(reader)) is not _END:
            found.append(item)
            assert len(reader._ready) <= room
            if slow == "taker" and item % 20 == 7:
                time.sleep(0.002)
    assert found == list(range(count))


def test_a_reader_finds_room_by_itself() -> None:
    with reading(itertools.count(), room=6) as reader:
        assert until(lambda: len(reader._ready) == 6)
        taken(reader)
        assert until(lambda: len(reader._ready) == 6)


def test_no_more_waits_than_there_is_room_for() -> None:
    numbers = (torch.tensor(number) for number in itertools.count())  # of 8 bytes
    with reading(numbers, room=9, bound=20) as reader:
        for _ in range(50):
            taken(reader)
            assert len(reader._ready) <= 2
        assert until(lambda: len(reader._ready) == 2)
        time.sleep(0.05)
        assert len(reader._ready) == 2


def test_the_end_stays_the_end_and_an_error_stays_an_error() -> None:
    with reading(iter([1])) as reader:
        assert [taken(reader) is _END for _ in range(3)] == [False, True, True]

    def fails() -> Iterator[int]:
        yield 1
        raise OSError("lost")

    with reading(fails()) as reader:
        assert taken(reader) == 1
        for _ in range(2):
            with pytest.raises(OSError, match="lost"):
                taken(reader)


def test_a_closed_reader_holds_nothing_and_gives_nothing() -> None:
    items = [object() for _ in range(9)]
    with reading(iter(items)) as reader:
        assert until(lambda: len(reader._ready) == 4)
    assert taken(reader) is _END
    assert not reader._ready


def test_a_taker_that_waits_is_let_go_when_the_reader_is_closed() -> None:
    go = threading.Event()

    def hangs() -> Iterator[int]:
        go.wait()
        yield 1

    found: list[Any] = []
    reader = reading(hangs())
    with reader:
        taker = threading.Thread(target=lambda: found.append(taken(reader)))
        taker.start()
        reader.close(0.01)
        taker.join(60)
        assert found == [_END]
        go.set()
