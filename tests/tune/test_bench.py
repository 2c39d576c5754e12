"""The bench on a machine that is made up: what a trial cut short tells, and a start that dies."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hasten.machine.processes import LoadMeter
from hasten.measure.record import ExperimentRecord
from hasten.measure.schedule import OutOfTimeError, VariantProcess
from hasten.measure.workers import WorkerError
from hasten.tune.bench import PASSES, ReferencePair, turn_steps
from hasten.tune.samplers import Proposer
from hasten.tune.space import Point
from hasten.tune.study import Search
from tune.simulated import Machine, Simulated, of_values, step

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

    def steps(self, count: int, timeout: float) -> list[dict[str, Any]]:
        first = self.settings == SPACE.settings(SPACE.start)
        self.dead = self.dead or (first and self.machine.hungry > 0)
        if self.dead:
            raise WorkerError(KILLED)
        return super().steps(count, timeout)

    def close(self, kill: bool = False) -> None:
        if not self.ended and self.settings == HUNGRY:
            self.machine.hungry -= 1
        super().close(kill)


class HungryFirst(Proposer):
    def ask(self) -> Point | None:
        first = SPACE.point(HUNGRY)
        return super().ask() if first in self.told else first


def test_a_start_that_is_killed_beside_a_trial_is_started_anew_for_the_next_one() -> None:
    machine = Crowded()
    with ReferencePair(machine.start, SPACE.start, 2, steps=2, clock=machine.clock) as bench:
        search = Search(
            SPACE,
            lambda noise, memory: HungryFirst(SPACE),
            bench,
            ExperimentRecord(),
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
    with ReferencePair(machine.start, SPACE.start, 2, steps=2, clock=machine.clock) as bench:
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
    with ReferencePair(
        machine.start, SPACE.start, 2, steps=2, seed=seed, clock=machine.clock
    ) as bench:
        bench.open(100.0)
        with pytest.raises(OutOfTimeError):
            bench.measure((1, 0), machine.clock.now + 5.0 + 3 * 2.0 + 5.0)  # in its second turn
        assert bench.measure((1, 0), machine.clock.now + 1000.0).state == "ok"
    assert machine.alive == 0


def test_a_start_that_waited_for_imports_is_no_measure_of_later_ones() -> None:
    machine = Machine(SPACE, lambda s: 2.0, start=60.0)
    with ReferencePair(machine.start, SPACE.start, 2, steps=2, clock=machine.clock) as bench:
        bench.open(1e6)
        assert bench.start_seconds == pytest.approx(60.0 + 3 * 2.0)
        machine.start_seconds = 1.0  # the next ones are forked
        bench.noise(1e6)
        assert bench.start_seconds == pytest.approx(1.0 + 3 * 2.0)


def test_noise_needs_two_rounds() -> None:
    machine = Machine(SPACE, lambda s: 2.0)
    with ReferencePair(machine.start, SPACE.start, 2, steps=2, clock=machine.clock) as bench:
        bench.open(100.0)
        with pytest.raises(OutOfTimeError):
            bench.noise(machine.clock.now + 5.0 + 3 * 2.0 + 8.0 + 1.0)


def fast(s: dict[str, Any]) -> float:
    return 4.0 / s["batch"] / (2.0 if s["fused"] else 1.0)


def test_a_point_that_is_far_better_stays_and_the_next_are_measured_beside_it() -> None:
    best, near = SPACE.point({"batch": 4, "fused": True}), SPACE.point({"batch": 4, "fused": False})
    machine = Machine(SPACE, fast)
    with ReferencePair(machine.start, SPACE.start, 2, steps=2, clock=machine.clock) as bench:
        bench.open(1e6)
        assert bench.measure(best, 1e6).value == pytest.approx(math.log(8.0))
        machine.seconds = lambda s: 1e5 if s == SPACE.settings(SPACE.start) else fast(s)
        found = bench.measure(near, 1e6)
        assert found.value == pytest.approx(math.log(4.0))  # over the start's, all the same
        assert found.seconds < 100.0
        assert machine.alive == 1
    assert machine.started == [SPACE.start, best, near]
    assert machine.alive == 0


@pytest.mark.parametrize(("load", "rounds"), [(0.1, 1), (0.5, 3)])
def test_a_round_that_others_disturbed_does_not_decide_by_itself(
    monkeypatch: pytest.MonkeyPatch, load: float, rounds: int
) -> None:
    """Else a lucky one puts a point in the start's place, and all later ones are wrong by it."""
    monkeypatch.setattr(LoadMeter, "share", lambda *seen: load)
    best, worst = SPACE.point({"batch": 4, "fused": True}), SPACE.point({"batch": 2})
    machine = Machine(SPACE, fast)
    with ReferencePair(machine.start, SPACE.start, 2, steps=2, clock=machine.clock) as bench:
        bench.open(1e6)
        assert len(bench.measure(best, 1e6).logs) == rounds
        assert len(bench.measure(worst, 1e6, best=math.log(8.0)).logs) == rounds


def test_a_point_that_needs_more_memory_does_not_stay() -> None:
    best, near = SPACE.point({"batch": 4, "fused": True}), SPACE.point({"batch": 4, "fused": False})
    machine = Machine(SPACE, fast, memory=lambda s: 1e9 * s["batch"])
    with ReferencePair(machine.start, SPACE.start, 2, steps=2, clock=machine.clock) as bench:
        bench.open(1e6)
        bench.measure(best, 1e6)
        machine.seconds = lambda s: 100.0 if s == SPACE.settings(SPACE.start) else fast(s)
        assert bench.measure(near, 1e6).seconds > 200.0  # a turn of the start


@pytest.mark.parametrize(
    ("seconds", "turns"),
    [(2.0, [1] * 4), (0.3, [1] * 8), (0.01, [2] * 8)],
)
def test_a_round_has_short_turns_and_the_more_steps_where_they_are_short(
    seconds: float, turns: list[int]
) -> None:
    machine = Machine(SPACE, lambda s: seconds)
    counts = []

    class Counted(Simulated):
        def steps(self, count: int, timeout: float) -> list[dict[str, Any]]:
            counts.append(count)
            return super().steps(count, timeout)

    def start(point: Point) -> Simulated:
        machine.alive += 1
        return Counted(machine, SPACE.settings(point))

    with ReferencePair(start, SPACE.start, 2, steps=2, clock=machine.clock) as bench:
        bench.open(1e6)
        assert bench.measure((1, 0), 1e6, rounds=1).state == "ok"
    assert counts[-len(turns) :] == turns
    assert counts[-len(turns) - 1] == 1  # the last of the warm-up


def test_when_the_one_that_stays_dies_it_is_started_anew_and_else_the_start() -> None:
    machine = Machine(SPACE, fast)
    best, near = SPACE.point({"batch": 4, "fused": True}), SPACE.point({"batch": 4, "fused": False})
    with ReferencePair(machine.start, SPACE.start, 2, steps=2, clock=machine.clock) as bench:
        bench.open(1e6)
        assert bench.measure(best, 1e6).state == "ok"
        for starts_again in (True, False):
            bench.close(kill=True)  # as after a failure beside a point
            if not starts_again:
                machine.fails = lambda s: "gone" if s == SPACE.settings(best) else None
            found = bench.measure(near, 1e6)
            assert found.value == pytest.approx(math.log(4.0))
        assert bench.rate == pytest.approx(100.0 / 4.0)  # still the start's
    assert machine.alive == 0


def test_the_noise_is_measured_no_longer_than_is_given_to_it() -> None:
    machine = Machine(SPACE, lambda s: 2.0, noise=0.1)
    with ReferencePair(machine.start, SPACE.start, 2, steps=2, clock=machine.clock) as bench:
        bench.open(1e6)
        before = machine.clock.now
        assert bench.noise(1e6, enough=before) > 0.005
        short = machine.clock.now - before
        before = machine.clock.now
        assert bench.noise(1e6) > 0.005
        assert short < machine.clock.now - before


@pytest.mark.parametrize(
    ("seconds", "count"), [(0.01, 16), (0.1, 12), (0.3, 4), (0.8, 3), (2.0, 2), (60.0, 2)]
)
def test_a_turn_is_neither_too_short_to_tell_nor_longer_than_it_must_be(
    seconds: float, count: int
) -> None:
    assert length([99.0, seconds, seconds], steps=4) == count
    assert length([60.0] * 2, steps=4, together=4) == 4
    assert length([60.0] * 2, steps=1) == 1


def length(warm: list[float], **design: int) -> int:
    """The steps of a round after a warm-up whose steps took so many seconds."""
    machine = Machine(SPACE, lambda s: 1.0)
    variant = VariantProcess(machine.start(SPACE.start))
    variant.warm = [step(1.0, seconds) for seconds in warm]
    return ReferencePair(machine.start, SPACE.start, 2, **design)._length(variant)


@pytest.mark.parametrize("seed", range(8))
def test_a_machine_that_slows_down_steadily_slows_both_alike(seed: int) -> None:
    machine = Machine(SPACE, lambda s: 0.5 * (1 + machine.clock.now / 60))
    with ReferencePair(machine.start, SPACE.start, 2, seed=seed, clock=machine.clock) as bench:
        bench.open(1e6)
        found = bench.measure((1, 0), 1e6)
    assert [abs(log) < 2e-4 for log in found.logs] == [True] * 3


@given(st.integers(1, 16), st.integers(1, 5))
def test_passes_deal_all_steps_of_a_round_and_part_none_that_belong_together(
    units: int, together: int
) -> None:
    machine = Machine(SPACE, lambda s: 1.0)
    pair = ReferencePair(machine.start, SPACE.start, 2, together=together)
    passes = pair._passes(together * units)
    assert sum(passes) == together * units
    assert all(n >= together and n % together == 0 for n in passes)
    assert len(passes) == min(PASSES, units)  # as many as there can be
    assert max(passes) - min(passes) <= together


def test_both_do_the_same_records_in_each_turn() -> None:
    """Steps take 0.5 to 1.5 s by their records; a point's ratio is known all the same."""
    lengths = (0.5, 1.5, 0.8, 1.2, 1.0, 0.7, 1.3)
    machine = Machine(
        SPACE, lambda s: 1.2 if s["batch"] == 1 else 1.0, content=lambda step: lengths[step % 7]
    )
    with ReferencePair(machine.start, SPACE.start, 2, clock=machine.clock) as bench:
        bench.open(1e6)
        for _ in range(3):  # the one that stays is further in the data every time
            found = bench.measure(SPACE.point({"batch": 2}), 1e6)
            assert found.logs == pytest.approx([math.log(1.2)] * 3)


@pytest.mark.parametrize(("seconds", "steps"), [(0.01, 4), (0.3, 4), (0.4, 3), (1.0, 1), (60.0, 1)])
def test_a_turn_of_the_duel_takes_about_a_second_of_the_start(seconds: float, steps: int) -> None:
    assert turn_steps(4, seconds) == steps
    assert turn_steps(4, seconds, together=4) == 4  # no exchange of ranks is parted
