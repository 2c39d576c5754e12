"""A place that takes checkpoints slowly is named with its MB/s, once."""

from __future__ import annotations

import itertools
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fault_kit import EVERY, build
from hasten import SmartCheckpointer
from hasten.parts.checkpoint.format import Disk
from hasten.parts.checkpoint.saver import LONG, SLOW, WAITED, CheckpointWriter, Saver, Slowness


class SlowDisk(Disk):
    """Each piece takes a while by its own clock, and training waits for all of it."""

    def __init__(self) -> None:
        self.seconds, self.waited_for = 0.0, threading.Event()

    def write(self, descriptor: int, block: memoryview) -> None:
        assert self.waited_for.wait(60)
        self.seconds += 0.5
        super().write(descriptor, block)


class WatchedWriter(CheckpointWriter):
    """Lets the disk go on once somebody waits for it."""

    def __init__(self, disk: SlowDisk) -> None:
        super().__init__()
        self.disk = disk

    def wait(self) -> None:
        if self._thread is not None:
            self.disk.waited_for.set()
        super().wait()
        self.disk.waited_for.clear()


def by_clock(monkeypatch: pytest.MonkeyPatch, now: Callable[[], float]) -> None:
    """Saves are timed by ``now``."""
    clock = SimpleNamespace(perf_counter=now)
    monkeypatch.setattr("hasten.parts.checkpoint.saver.time", clock)


def test_a_long_write_is_told_with_its_rate_and_a_fast_one_is_not() -> None:
    found = Slowness("/there")
    assert found.due_warning() == ""
    found.wrote(4_000_000_000, 40.0)
    assert found.due_warning() == ""
    found.wrote(80_000_000, 40.0)
    assert found.due_warning() == (
        "/there is slow: a checkpoint of 80.0 MB took 40.0 s, 2.0 MB/s; save less often, or to a "
        "faster folder"
    )
    assert found.due_warning() == "", "once"
    found.wrote(80_000_000, 81.0)
    assert "1.0 MB/s" in found.due_warning(), "again where it became twice as slow"


def test_training_that_waits_is_told_however_short_the_write() -> None:
    found = Slowness("s3://bucket/run")
    found.wrote(3_000_000, 2.0)
    assert "1.5 MB/s, and training waited 1.2 s for it; save less often" in found.due_warning(1.2)
    assert found.due_warning(1.2) == ""


@given(st.integers(0, 10**13), st.floats(0, 1e5), st.floats(0, 1e4))
def test_a_sentence_comes_only_where_one_of_both_is_slow(
    size: int, seconds: float, waited: float
) -> None:
    found = Slowness("x")
    found.wrote(size, seconds)
    known = size > 0 and seconds > 0
    due = known and (waited >= WAITED or (seconds >= LONG and size / seconds < SLOW))
    assert bool(found.due_warning(waited)) == due


@pytest.mark.filterwarnings("error")
def test_a_save_that_waits_for_the_one_before_says_what_the_disk_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SlowDisk()
    by_clock(monkeypatch, lambda: disk.seconds)
    model, optimizer = build()
    keeper = SmartCheckpointer(EVERY, folder=tmp_path, compression=False)
    keeper.saver = Saver(tmp_path, 3, False, disk=disk)
    keeper.saver._writer = WatchedWriter(disk)
    keeper.protect(model=model, optimizer=optimizer)
    keeper.save(1)
    with pytest.warns(UserWarning, match=r"took \d\.\d s, \d\.\d MB/s, and training waited \d\.\d"):
        keeper.save(2)
    keeper.save(3)  # it isn't said again
    keeper.close()
    assert len(keeper.alarms) == 1
    assert str(tmp_path) in keeper.alarms[0]


def test_a_disk_that_keeps_up_is_not_mentioned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = itertools.count()
    by_clock(monkeypatch, lambda: next(ticks) / 1000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        saver = Saver(tmp_path, compression=False)
        for step in (1, 2, 3):
            saver.save(step, {"w": torch.ones(100)}, {})
            saver.wait_for_writer()
        saver.close()
    assert saver.alarms == []
