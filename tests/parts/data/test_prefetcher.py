"""Reading ahead changes when a batch is read, and nothing else."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import traceback
from collections import UserDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from hasten.parts.data.prefetch import DeviceCopies, SmartPrefetcher, each_tensor, tensor_bytes
from waiting import until


def readers() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "hasten-read-ahead"]


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    gc.collect()
    assert until(lambda: not readers())


class Counted:
    """A loader of numbers that says how far it has been read, and when there is no more."""

    def __init__(self, count: int, fails_at: int | None = None) -> None:
        self.count, self.fails_at, self.read = count, fails_at, 0
        self.ended = False

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.read, self.ended = 0, False
        for i in range(self.count):
            if i == self.fails_at:
                raise OSError(f"example {i} can't be read")
            self.read += 1
            yield torch.tensor([i])
        self.ended = True


@given(st.integers(0, 40), st.integers(1, 6), st.integers(1, 3), st.integers(1, 100))
def test_order_and_number_are_those_of_the_loader_in_every_epoch(
    count: int, lookahead: int, epochs: int, memory_bytes: int
) -> None:
    wrapped = SmartPrefetcher(lookahead, memory_bytes=memory_bytes).wrap(Counted(count))
    for _ in range(epochs):
        assert [int(b) for b in wrapped] == list(range(count))


def test_a_shuffled_loader_and_dropout_draw_the_same_numbers_as_without() -> None:
    def draws(wrap: Callable[[Any], Any]) -> list[torch.Tensor]:
        torch.manual_seed(5)
        data = TensorDataset(torch.arange(60))
        loader = wrap(DataLoader(data, batch_size=4, shuffle=True))
        seen = []
        for _ in range(3):
            for (batch,) in loader:
                seen += [batch, torch.rand(3)]
        return seen

    prefetcher = SmartPrefetcher()
    for mine, plain in zip(draws(prefetcher.wrap), draws(lambda x: x), strict=True):
        assert torch.equal(mine, plain)
    assert not prefetcher.statistics.left_alone


def test_a_data_set_that_draws_from_the_global_generator_keeps_its_turns() -> None:
    class Noisy(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            return self.tensors[0][index] + torch.rand(1)

    def draws(wrap: Callable[[Any], Any]) -> list[torch.Tensor]:
        torch.manual_seed(5)
        loader = wrap(DataLoader(Noisy(torch.zeros(24)), batch_size=4))
        return [x for batch in loader for x in (batch, torch.rand(1))]

    prefetcher = SmartPrefetcher()
    for mine, plain in zip(draws(prefetcher.wrap), draws(lambda x: x), strict=True):
        assert torch.equal(mine, plain)
    assert prefetcher.statistics.left_alone == 1


def test_it_reads_ahead_as_far_as_it_was_told_and_no_further() -> None:
    loader = Counted(50)
    batches = iter(SmartPrefetcher(3, max_lookahead=3).wrap(loader))  # a stall would make it grow
    for _ in range(3):
        next(batches)
    assert until(lambda: loader.read == 6)
    time.sleep(0.05)
    assert loader.read == 6


@pytest.mark.waits
def test_a_burst_is_hidden_once_the_look_ahead_has_grown_to_its_length() -> None:
    def loader() -> Iterator[int]:
        for number in range(200):
            time.sleep(0.12 if number % 40 == 20 else 0.001)
            yield number

    prefetcher = SmartPrefetcher(1, max_lookahead=16)
    late: list[int] = []
    began = time.perf_counter()
    for number in prefetcher.wrap(loader()):
        if time.perf_counter() - began > 0.03:
            late.append(number)
        time.sleep(0.02)  # six of these are a burst
        began = time.perf_counter()
    assert late
    assert not [number for number in late if number > 150]  # the last of five bursts
    assert 6 <= prefetcher.statistics.lookahead <= 16


def test_a_reader_that_is_always_slower_gets_no_more_room_than_there_is() -> None:
    prefetcher = SmartPrefetcher(4, max_lookahead=12)
    lengths = []
    for _ in prefetcher.wrap(time.sleep(0.002) for _ in range(20)):
        lengths.append(prefetcher.statistics.lookahead)
    assert lengths == sorted(lengths)
    assert {*lengths} <= {4, 6, 9, 12}
    assert lengths[-1] == 12


def test_an_error_arrives_in_the_step_that_needed_the_batch_with_its_traceback() -> None:
    taken: list[int] = []
    batches = iter(SmartPrefetcher(4).wrap(Counted(20, fails_at=7)))
    with pytest.raises(OSError, match="example 7") as caught:
        taken.extend(int(batch) for batch in batches)
    assert taken == list(range(7))
    assert 'raise OSError(f"example {i}' in "".join(traceback.format_tb(caught.value.__traceback__))


def test_a_break_an_error_of_the_caller_and_the_collector_end_the_thread() -> None:
    wrapped = SmartPrefetcher(2).wrap(Counted(100))
    for batch in wrapped:
        if batch == 5:
            assert readers()
            break
    assert not readers()

    def fails() -> None:
        for batch in wrapped:
            if batch == 5:
                raise KeyError("step")

    with pytest.raises(KeyError):
        fails()
    assert not readers()
    batches = iter(wrapped)
    circle: list[Any] = [batches]
    circle.append(circle)
    for _ in range(4):
        next(batches)
    del batches, circle
    gc.collect()
    assert until(lambda: not readers())  # the reader itself may be the one who collects


LEAVING = """
import os
from hasten.parts.data.prefetch import SmartPrefetcher

endings = ["", "raise SystemExit(0)", "batches = None"]
while endings:  # each in a fork, which ends as an interpreter does
    child = os.fork()
    if child == 0:
        batches = iter(SmartPrefetcher().wrap(range(10**9)))
        [next(batches) for _ in range(5)]
        exec(endings[0])
        break
    print(endings.pop(0), "ends with", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_pass_in_progress_does_not_keep_the_interpreter_from_leaving() -> None:
    found = subprocess.run(
        [sys.executable, "-c", LEAVING], capture_output=True, text=True, timeout=240
    )
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout.count(" ends with 0") == 3


def test_the_state_is_what_was_taken_and_a_new_pass_goes_on_behind_it() -> None:
    first = SmartPrefetcher(8).wrap(Counted(20))
    for batch in first:
        if batch == 8:
            state = first.state_dict()
            break
    assert state == {"epoch": 0, "batch": 9}
    again = SmartPrefetcher(2).wrap(Counted(20))
    again.load_state_dict(state)
    assert [int(b) for b in again] == list(range(9, 20))
    assert again.state_dict() == {"epoch": 1, "batch": 0}
    assert [int(b) for b in again] == list(range(20))


def test_length_passes_through_where_there_is_one() -> None:
    data = TensorDataset(torch.arange(10))
    assert len(SmartPrefetcher().wrap(DataLoader(data, batch_size=3))) == 4
    with pytest.raises(TypeError):
        len(SmartPrefetcher().wrap(Counted(3)))


def test_statistics_tell_ready_batches_from_stalls() -> None:
    loader = Counted(12)
    prefetcher = SmartPrefetcher(4, max_lookahead=4)
    for number, _ in enumerate(prefetcher.wrap(loader)):
        # The next one lies in the queue once the one behind it is read.
        assert until(lambda n=number: n == 0 or loader.read >= n + 3 or loader.ended)
    seen = prefetcher.statistics
    assert seen.batches == 12
    assert seen.ready == 10  # all but the first two, which the caller reads
    assert seen.stall_seconds > 0


def test_the_mode_of_gradients_goes_along() -> None:
    def modes() -> Iterator[bool]:
        for _ in range(6):
            yield torch.is_grad_enabled()

    with torch.no_grad():
        assert list(SmartPrefetcher().wrap(modes())) == [False] * 6


@pytest.mark.parametrize(
    "wrong", [{"lookahead": 0}, {"lookahead": 9, "max_lookahead": 8}, {"memory_bytes": 0}]
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="give at least 1"):
        SmartPrefetcher(**wrong)


def test_every_tensor_of_a_nesting_is_changed_and_all_else_kept() -> None:
    from hasten.core.job import MicroBatch, WorkCounts

    one = torch.ones(2, dtype=torch.int64)
    batch = (MicroBatch({"a": one, "lengths": (3, 4)}, WorkCounts(1, 2, 3, 4)), [one, "text"])
    assert tensor_bytes(batch) == 32
    changed = each_tensor(batch, lambda t: t + 1)
    assert changed[0].inputs["a"].tolist() == [2, 2]
    assert changed[0].inputs["lengths"] == (3, 4)
    assert changed[0].counts == batch[0].counts
    assert changed[1][1] == "text"


def test_a_mapping_keeps_its_class_and_attributes() -> None:
    batch = UserDict({"x": torch.ones(2)})
    batch.tag = "kept"  # type: ignore[attr-defined]
    changed = each_tensor(batch, lambda t: t + 1)
    assert (type(changed), changed.tag) == (UserDict, "kept")
    assert (batch["x"].tolist(), changed["x"].tolist()) == ([1, 1], [2, 2])


def test_a_position_that_the_loader_has_not_is_refused() -> None:
    ahead = SmartPrefetcher().wrap([1, 2, 3])
    ahead.load_state_dict({"epoch": 0, "batch": 3})
    assert list(ahead) == []
    ahead.load_state_dict({"epoch": 0, "batch": 4})
    with pytest.raises(ValueError, match="batch 4 of an epoch, and the loader gives 3"):
        list(ahead)


def test_on_a_processor_a_copy_is_the_tensor_itself() -> None:
    copies = DeviceCopies("cpu")
    one = torch.ones(3)
    assert copies.receive(copies.send({"x": one}))["x"] is one


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_on_an_accelerator_the_batches_arrive_whole() -> None:
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    sent = [torch.randn(1 << 20) for _ in range(20)]
    for mine, plain in zip(SmartPrefetcher(device=kind).wrap(sent), sent, strict=True):
        assert torch.equal((mine * 2).cpu(), plain * 2)
