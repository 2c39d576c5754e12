"""Turns in slices: all see the same machine; background load counts for those who met it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from hasten.machine import processes
from hasten.machine.processes import Instant, LoadMeter
from hasten.measure.schedule import run_in_slices
from hasten.measure.workers import WorkerError


@dataclass
class Pretended:
    """A worker whose steps take ``pace`` seconds of a pretended clock."""

    pace: float
    dies_after: float = 1e9
    worked: float = 0.0
    ahead: float = 0.0

    def order(self, count: int) -> None:
        self.ahead = count * self.pace

    def go_on(self, seconds: float) -> str | None:
        self.worked += min(seconds, self.ahead)
        self.ahead -= seconds
        if self.worked > self.dies_after:
            raise WorkerError("it died")
        return "done" if self.ahead <= 1e-9 else None


def test_slower_workers_have_longer_slices_and_all_end_together() -> None:
    workers = {"fast": Pretended(0.1), "slow": Pretended(0.4), "middling": Pretended(0.2)}
    slices: list[str] = []
    found, failed = run_in_slices(workers, 10, 0.25, slices.append)
    assert found == dict.fromkeys(workers, "done")
    assert not failed
    assert {name: w.worked for name, w in workers.items()} == pytest.approx(
        {"fast": 1.0, "slow": 4.0, "middling": 2.0}
    )
    assert Counter(slices) == dict.fromkeys(workers, 4)
    assert slices[:3] == slices[3:6][::-1]  # who was last is first: a drift favours nobody


def test_one_that_fails_leaves_the_others_their_turn() -> None:
    workers = {"a": Pretended(0.1), "b": Pretended(0.1, dies_after=0.3)}
    found, failed = run_in_slices(workers, 10)
    assert found == {"a": "done"}
    assert str(failed["b"]) == "it died"
    assert workers["a"].worked == pytest.approx(1.0)


def test_background_load_is_put_down_to_those_in_whose_slices_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Others use one of two cores in every slice of b, and none in those of a."""

    def clock() -> Iterator[Instant]:
        wall = busy = ours = 0.0
        while True:
            yield Instant(wall, busy, ours)
            wall, busy, ours = wall + 0.1, busy + 0.1, ours + 0.1
            yield Instant(wall, busy, ours)
            wall, busy, ours = wall + 0.1, busy + 0.2, ours + 0.1

    instants = clock()
    monkeypatch.setattr(processes, "look", lambda tree: next(instants))
    meter = LoadMeter(cores=2)
    for name in "ab" * 4:
        meter.lap(name)
    assert meter.share("a") == pytest.approx(0.0)
    assert meter.share("b") == pytest.approx(0.5)
    assert meter.share("never") == 0.0
