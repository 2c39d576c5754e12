"""The interval against the exact model; a slow place is named with its MB/s."""

from __future__ import annotations

import itertools
import math
import threading
import time
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
from hasten.parts.checkpoint.smart_checkpointer import DAY, SaveInterval, best_interval


def expected_seconds(work: float, cost: float, between: float, recovery: float) -> float:
    """Wall time for each second of work under Poisson failures: Daly 2006, equation 13."""
    return between * math.exp(recovery / between) * math.expm1((work + cost) / between) / work


@given(cost=st.floats(0.01, 20), between=st.floats(1000, 1e6), recovery=st.floats(0, 300))
def test_no_other_interval_is_noticeably_better(
    cost: float, between: float, recovery: float
) -> None:
    chosen = best_interval(cost, between, recovery) - cost
    found = expected_seconds(chosen, cost, between, recovery)
    others = [chosen * 1.02**k for k in range(-300, 300)]
    best = min(expected_seconds(w, cost, between, recovery) for w in others)
    assert found <= best * 1.01


def test_the_interval_is_measured_and_clamped() -> None:
    interval = SaveInterval()
    interval.blocked.extend([0.1, 0.1, 9.0])
    assert interval.seconds() == pytest.approx(best_interval(0.1, DAY, 30.0), rel=1e-3)
    interval.longest_loss = 60.0
    assert interval.seconds() == 60.0
    interval.writing = 100.0
    assert interval.seconds() == 200.0, "the writer must be able to follow"
    often = SaveInterval(between_failures=1.0, longest_loss=1e9)
    often.blocked.append(0.5)
    assert often.seconds() == 50.0, "saving never blocks more than 1 % of the time"


def test_failures_shorten_the_interval_and_survive_a_restart() -> None:
    first = SaveInterval()
    first.blocked.append(0.1)
    before = first.seconds()
    state = first.state_dict()
    again = SaveInterval()
    again.blocked.append(0.1)
    again.load_state_dict(state)
    for _ in range(9):
        again.restarted(5.0)
    assert again.failures == 9
    assert again.mean_between_failures == pytest.approx(DAY / 10, rel=1e-3)
    assert again.seconds() < before / 2.5
    assert again.state_dict()["recovery"] == 5.0


@pytest.mark.parametrize(
    "state",
    [
        *({}, {"failures": float("inf")}, {"failures": -1}, {"seen": float("nan")}),
        *({"recovery": -1.0}, {"failures": None}),
    ],
    ids=str,
)
def test_a_history_that_can_not_be_is_refused(state: dict[str, object]) -> None:
    interval = SaveInterval()
    known = {"failures": 2, "seen": 5.0, "recovery": 1.0}
    with pytest.raises(ValueError, match="history of failures"):
        interval.load_state_dict({**known, **state} if state else {})
    assert interval.failures == 0


@pytest.mark.parametrize("settings", [{"between_failures": 0}, {"longest_loss": -1}])
def test_a_time_that_is_none_is_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be above 0 seconds"):
        SaveInterval(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("every", [0, -1, "often", 2.5, True, None])
def test_an_interval_that_is_none_is_refused(every: object) -> None:
    with pytest.raises(ValueError, match="give 'dynamic' or a number of steps"):
        SaveInterval(every)  # type: ignore[arg-type]


class Clock:
    """Time that stands still between steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


def saves(rhythm: SaveInterval, clock: Clock, seconds: list[float]) -> tuple[list[int], int]:
    """The steps saved when step k takes ``seconds[k]``, and how often it was looked."""
    found, looks = [], 0
    for step, took in enumerate(seconds, start=1):
        clock.now += took
        if rhythm.looks(step):
            looks += 1
            due, rhythm.next_look = rhythm.decide(step, busy=False)
            if due:
                rhythm.last_save = clock.now
                found.append(step)
    return found, looks


def test_saves_come_after_the_intervals_seconds_with_few_looks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    rhythm = SaveInterval(longest_loss=100.0)
    rhythm.blocked.append(10.0)  # 1 % would be 1000 s; the user's 100 go before it
    found, looks = saves(rhythm, clock, [0.5] * 2000)
    apart = [b - a for a, b in itertools.pairwise(found)]
    assert set(apart) == {200}
    assert looks <= 35 * len(found)


def test_steps_that_become_slower_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    interval = SaveInterval(longest_loss=100.0)
    interval.blocked.append(10.0)
    found, _ = saves(interval, clock, [0.1] * 1000 + [5.0] * 60)
    late = [step for step in found if step > 1000]
    assert len(late) >= 2
    assert late[0] <= 1000 + 100 / 5 + 10


def test_a_number_of_steps_is_that() -> None:
    rhythm = SaveInterval(3)
    assert [step for step in range(1, 11) if rhythm.looks(step)] == [3, 6, 9]
    assert rhythm.decide(3, busy=True)[0]


def test_nothing_is_begun_while_a_save_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    rhythm = SaveInterval(longest_loss=1.0)
    rhythm.looks(1)
    clock.now += 50
    assert rhythm.decide(5, busy=True)[0] is False
    assert rhythm.decide(6, busy=False)[0] is True


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
    found.last = 4_000_000_000, 40.0
    assert found.due_warning() == ""
    found.last = 80_000_000, 40.0
    assert found.due_warning() == (
        "/there is slow: a checkpoint of 80.0 MB took 40.0 s, 2.0 MB/s; save less often, or to a "
        "faster folder"
    )
    assert found.due_warning() == "", "once"
    found.last = 80_000_000, 81.0
    assert "1.0 MB/s" in found.due_warning(), "again where it became twice as slow"


def test_training_that_waits_is_told_however_short_the_write() -> None:
    found = Slowness("s3://bucket/run")
    found.last = 3_000_000, 2.0
    assert "1.5 MB/s, and training waited 1.2 s for it; save less often" in found.due_warning(1.2)
    assert found.due_warning(1.2) == ""


@given(st.integers(0, 10**13), st.floats(0, 1e5), st.floats(0, 1e4))
def test_a_sentence_comes_only_where_one_of_both_is_slow(
    size: int, seconds: float, waited: float
) -> None:
    found = Slowness("x")
    found.last = size, seconds
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
    keeper.saver.writer = WatchedWriter(disk)
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
