"""Buckets: their size, order, device and worker thread; numbers the host doesn't look at."""

from __future__ import annotations

import queue
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from hasten.parts.comm import methods
from hasten.parts.comm.buckets import BucketExchange
from hasten.parts.comm.collectives import WorkQueue
from hasten.parts.comm.compression_settings import CompressionSettings
from hasten.parts.comm.groups import _work
from hasten.parts.comm.link_model import bucket_bytes
from hasten.parts.comm.methods import BucketPart, OneRank
from hasten.parts.comm.topology import Link, Topology

PIECES = (BucketPart("a", (64, 64)), BucketPart("unused", (32, 64)), BucketPart("b", (100,)))
COMMUNICATIONS = ("none", "half", "int8", "int4", "topk", "powersgd")


def gradients(step: int) -> Tensor:
    flat = torch.randn(
        sum(p.numbers for p in PIECES), generator=torch.Generator().manual_seed(step)
    )
    flat[64 * 64 : 64 * 64 + 32 * 64] *= step % 2  # in every other step nobody uses this one
    return flat


def exchanged(method: str, bad: int | None, steps: int = 5) -> tuple[list[Tensor], Any]:
    """The means of some steps, one of which may have an infinite number; and the memory left."""
    travel = BucketExchange(CompressionSettings(method=method, minimum=0))
    found = []
    for step in range(steps):
        travel.begin()
        flat = gradients(step)
        if step == bad:
            flat[7] = torch.inf
        found.append(travel.send(flat, PIECES, OneRank(), travel.way)())
    return found, travel.state()


@pytest.mark.parametrize("method", COMMUNICATIONS)
@pytest.mark.parametrize("bad", [None, 2])
def test_what_is_not_looked_at_comes_out_the_same(
    method: str, bad: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, asked_memory = exchanged(method, bad)
    monkeypatch.setattr(methods, "may_read", lambda tensor: False)
    found, memory = exchanged(method, bad)
    for step, (one, other) in enumerate(zip(asked, found, strict=True)):
        if step == bad:
            assert not other.isfinite().all(), "the step must not count"
        else:
            assert torch.equal(one, other)
    assert memory["steps"] == asked_memory["steps"]
    for name, values in asked_memory["residual"].items():
        assert torch.equal(values, memory["residual"][name]), name


def two_hosts(link: Link) -> Topology:
    return Topology(((0,), (1,)), link, link, "planted")


def test_a_slow_link_without_delay_wants_small_buckets_and_delay_large_ones() -> None:
    quick = two_hosts(Link(1e-5, 12e6))
    slow = two_hosts(Link(0.02, 12e6))
    assert bucket_bytes(quick) == 2**20 < bucket_bytes(slow)


def test_a_job_runs_on_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda d: calls.append(str(d)))
    jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def job() -> torch.Tensor:
        calls.append(threading.current_thread().name)
        return torch.ones(1)

    for device in ("cuda:1", "cpu"):
        jobs.put((job, torch.futures.Future(), torch.device(device)))
    jobs.put(None)
    thread = threading.Thread(target=_work, args=(jobs,), name="buckets")
    thread.start()
    thread.join()
    assert calls == ["cuda:1", "buckets", "buckets"]


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


def test_factors_of_a_stack_are_those_of_each_expert_alone() -> None:
    """One column holds a matrix of rank 1; experts of one stack have no direction in common."""
    draw = torch.Generator().manual_seed(0)
    stack = torch.randn(6, 48, 1, generator=draw) @ torch.randn(6, 1, 32, generator=draw)
    pieces = (BucketPart("experts.down_proj", (6, 48, 32)),)
    method = methods.PowerSGDMean(rank=1)
    mean, left_out = method.local(stack.flatten(), None, pieces)
    assert mean is not None
    assert left_out is not None
    torch.testing.assert_close(mean.view_as(stack), stack, rtol=0.02, atol=0.02)
    assert left_out.norm() < 0.02 * stack.norm()
    alone = tuple(BucketPart(f"experts.{i}", (48, 32)) for i in range(6))
    assert method.sent_bytes(pieces, 2) == method.sent_bytes(alone, 2)
