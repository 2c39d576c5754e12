"""Works run in the order of the calls; one that is dropped is finished, and its error is told."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from hasten.parts.comm.collectives import WorkQueue


def after(gate: threading.Event, seen: list[int], number: int) -> Any:
    def run() -> Tensor:
        gate.wait(10)
        seen.append(number)
        return torch.tensor(float(number))

    return run


def fails() -> Tensor:
    raise RuntimeError("a rank has ended")


def test_works_are_begun_at_once_and_done_in_their_order() -> None:
    queue, gate, seen = WorkQueue(), threading.Event(), list[int]()
    works = [queue.put(after(gate, seen, number)) for number in range(3)]
    assert not any(work.is_completed() for work in works)
    gate.set()
    assert works[2].wait()
    assert seen == [0, 1, 2]
    assert works[1].result().item() == 1
    queue.wait_all()
    assert all(work.is_completed() for work in works)


def test_a_work_that_is_dropped_is_finished_first() -> None:
    queue, gate, seen = WorkQueue(), threading.Event(), list[int]()
    threading.Timer(0.05, gate.set).start()
    queue.put(after(gate, seen, 7))
    assert seen == [7]


def test_an_error_is_told_once_by_wait_or_else_by_the_next_call() -> None:
    queue = WorkQueue()
    work = queue.put(fails)
    with pytest.raises(RuntimeError, match="has ended"):
        work.wait()
    queue.wait_all()
    queue.put(fails)
    with pytest.raises(RuntimeError, match="has ended"):
        queue.put(fails)
    queue.put(fails)
    with pytest.raises(RuntimeError, match="has ended"):
        queue.wait_all()
    queue.wait_all()
