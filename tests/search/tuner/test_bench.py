"""The bench on a machine that is made up: what a trial cut short tells, and a start that dies."""

from __future__ import annotations

from typing import Any

import pytest

from hasten.evidence.record import Record
from hasten.search.tuner.bench import Bench, OutOfTimeError, RunnerFailedError, Step
from hasten.search.tuner.proposers import Tried
from hasten.search.tuner.space import Point, of_values
from hasten.search.tuner.study import Search
from search.tuner.simulated import Machine, Simulated

SPACE = of_values({"batch": [1, 2, 4], "fused": [False, True]})
HUNGRY = {"batch": 4, "fused": True}
KILLED = "the process ended with code -9: killed, most likely for want of memory"


class Crowded(Machine):
    """The start's process is killed as soon as the hungry one works beside it."""

    def __init__(self) -> None:
        super().__init__(SPACE, lambda s: 2.0)
        self.hungry = 0

    def start(self, point: Point) -> Simulated:
        self.started.append(point)
        self.alive += 1
        return Victim(self, self.space.settings(point))


class Victim(Simulated):
    machine: Crowded

    def __init__(self, machine: Crowded, settings: dict[str, Any]) -> None:
        super().__init__(machine, settings)
        self.dead = False
        machine.hungry += settings == HUNGRY

    def steps(self, count: int, patience: float) -> list[Step]:
        first = self.settings == SPACE.settings(SPACE.start)
        self.dead = self.dead or (first and self.machine.hungry > 0)
        if self.dead:
            raise RunnerFailedError(KILLED)
        return super().steps(count, patience)

    def end(self, at_once: bool = False) -> None:
        if not self.ended and self.settings == HUNGRY:
            self.machine.hungry -= 1
        super().end(at_once)


class InOrder:
    """The hungry one first, then all others."""

    def __init__(self) -> None:
        first = SPACE.point(HUNGRY)
        self.left = [first, *(p for p in SPACE.points() if p not in (first, SPACE.start))]

    def ask(self) -> Point | None:
        return self.left.pop(0) if self.left else None

    def tell(self, tried: Tried) -> None:
        pass


def test_a_start_that_is_killed_beside_a_trial_is_started_anew_for_the_next_one() -> None:
    machine = Crowded()
    with Bench(machine.start, SPACE.start, 2, steps=2, clock=machine.clock) as bench:
        search = Search(
            SPACE,
            lambda noise, memory: InOrder(),
            bench,
            Record(),
            budget_seconds=2000.0,
            clock=machine.clock,
        )
        study = search.run()
    states = {tuple(r["settings"].values()): r["state"] for r in study.rows}
    assert states.pop(tuple(HUNGRY.values())) == "out of memory"
    assert set(states.values()) == {"ok"}
    assert len(states) == 4
    (row,) = [r for r in study.rows if r["state"] != "ok"]
    assert row["why"] == f"the start's process failed beside it: {KILLED}"
    assert machine.started.count(SPACE.start) == 3  # the start, it against itself, it anew
    assert machine.alive == 0


def test_rounds_that_were_over_count_though_the_time_ends_in_the_next_one() -> None:
    machine = Machine(SPACE, lambda s: 2.0)
    with Bench(machine.start, SPACE.start, 2, steps=2, clock=machine.clock) as bench:
        bench.open(100.0)
        began = machine.clock.now
        one = bench.measure((1, 0), began + 1000.0, rounds=1)
        whole = machine.clock.now - began
        found = bench.measure((1, 0), machine.clock.now + whole + 3.0)
    assert (one.state, len(one.logs)) == ("ok", 1)
    assert found.state == "ok"
    assert 1 <= len(found.logs) < 3
    assert machine.alive == 0


@pytest.mark.parametrize("seed", range(6))
def test_a_process_that_was_cut_off_is_not_asked_again(seed: int) -> None:
    """It would answer its earlier order, and its steps would be taken for those of another turn."""
    machine = Machine(SPACE, lambda s: 2.0)
    with Bench(machine.start, SPACE.start, 2, steps=2, seed=seed, clock=machine.clock) as bench:
        bench.open(100.0)
        with pytest.raises(OutOfTimeError):
            bench.measure((1, 0), machine.clock.now + 5.0 + 3 * 2.0 + 5.0)  # in its second turn
        assert bench.measure((1, 0), machine.clock.now + 1000.0).state == "ok"
    assert machine.alive == 0


def test_noise_needs_two_rounds() -> None:
    machine = Machine(SPACE, lambda s: 2.0)
    with Bench(machine.start, SPACE.start, 2, steps=2, clock=machine.clock) as bench:
        bench.open(100.0)
        with pytest.raises(OutOfTimeError):
            bench.noise(machine.clock.now + 5.0 + 3 * 2.0 + 8.0 + 1.0)
