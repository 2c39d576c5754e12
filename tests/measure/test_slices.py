"""Turns in slices: all see the same machine; background load counts for those who met it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from hasten.machine import processes
from hasten.machine.processes import Instant, LoadMeter
from hasten.measure import schedule
from hasten.measure.schedule import Turn, VariantProcess, run_round
from hasten.measure.workers import WorkerError

PACES = {"fast": 0.1, "slow": 0.4, "middling": 0.2}


class Pretended:
    """A worker whose steps take ``pace`` seconds of a simulated clock."""

    can_slice = True

    def __init__(self, pace: float, slices: list[float], dies_after: float = 1e9) -> None:
        self.pace, self.slices, self.dies_after = pace, slices, dies_after
        self.worked = self.ahead = 0.0

    def ready(self, timeout: float) -> dict[str, Any]:
        return {}

    def request(self, op: str, timeout: float, **arguments: Any) -> dict[str, Any]:
        return self.steps(arguments["count"])

    def steps(self, count: int) -> dict[str, Any]:
        return {"steps": [{"tokens": 1, "step_seconds": self.pace}] * count}

    def submit(self, op: str, **arguments: Any) -> None:
        self.ahead = arguments["count"] * self.pace

    def run_for(self, seconds: float) -> dict[str, Any] | None:
        self.slices.append(self.pace)
        self.worked += min(seconds, self.ahead)
        self.ahead -= seconds
        if self.worked > self.dies_after:
            raise WorkerError("it died")
        return self.steps(10) if self.ahead <= 1e-9 else None

    def close(self, kill: bool = False) -> None: ...


def round_of(workers: dict[str, Pretended]) -> dict[str, Turn | WorkerError]:
    """A round of ten steps of each."""
    variants = {name: VariantProcess(worker) for name, worker in workers.items()}
    for variant in variants.values():
        variant.begin(2)
    return dict(run_round(variants, [10], random.Random(0), LoadMeter(2)))


def test_slower_workers_have_longer_slices_and_all_end_together() -> None:
    slices: list[float] = []
    workers = {name: Pretended(pace, slices) for name, pace in PACES.items()}
    found = round_of(workers)
    assert all(isinstance(turn, Turn) and len(turn.steps) == 10 for turn in found.values())
    assert {name: w.worked for name, w in workers.items()} == pytest.approx(
        {"fast": 1.0, "slow": 4.0, "middling": 2.0}
    )
    assert Counter(slices) == dict.fromkeys(PACES.values(), 4)
    assert slices[:3] == slices[3:6][::-1]  # who was last is first: a drift favours nobody


def test_one_that_fails_leaves_the_others_their_turn() -> None:
    workers = {"a": Pretended(0.1, []), "b": Pretended(0.1, [], dies_after=0.3)}
    found = round_of(workers)
    assert isinstance(found["a"], Turn)
    assert str(found["b"]) == "it died"
    assert workers["a"].worked == pytest.approx(1.0)


def test_a_worker_that_works_on_and_on_in_its_slices_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "LEAST_TIMEOUT", 0.2)
    worker = Pretended(1e-3, [])
    variant = VariantProcess(worker, clock=lambda: worker.worked)
    variant.begin(2)
    worker.pace = 1.0  # a thousand times slower now
    variant.begin_slices(10)
    with pytest.raises(WorkerError, match="no answer within 0 s: it hangs"):
        variant.go_on(0.3)


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
    monkeypatch.setattr(processes, "read_clocks", lambda tree: next(instants))
    meter = LoadMeter(cores=2)
    for name in "ab" * 4:
        meter.lap(name)
    assert meter.share("a") == pytest.approx(0.0)
    assert meter.share("b") == pytest.approx(0.5)
    assert meter.share("never") == 0.0
