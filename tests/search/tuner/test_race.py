"""Races to a held-out loss on trainings that are made up: who is first, who doesn't arrive."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hasten.errors import InputError
from hasten.measure.workers import WorkerError
from hasten.tune.race import LOOKS, LossCurve, races
from hasten.tune.space import Point
from search.tuner.simulated import Clock

START, FAST, LOSSY, SLOW = (0,), (1,), (2,), (3,)
STEP = {START: 1.0, FAST: 0.5, LOSSY: 0.4, SLOW: 1.5}  # seconds of a look
LEARNS = {START: 1.0, FAST: 1.0, LOSSY: 0.3, SLOW: 1.0}  # nats from the first look to the last


class Track:
    """Trainings whose losses fall evenly from 3 by what their point learns."""

    def __init__(self, noise: float = 0.01) -> None:
        self.clock, self.noise, self.alive = Clock(), noise, 0
        self.fails: Callable[[Point, int], bool] = lambda point, look: False
        self.turns: list[tuple[Point, int]] = []

    def begin(self, point: Point, seed: int) -> Runner:
        self.alive += 1
        return Runner(self, point, seed)


class Runner:
    def __init__(self, track: Track, point: Point, seed: int) -> None:
        self.track, self.point, self.seconds, self.ended = track, point, 0.0, False
        self.draw = random.Random(f"{point} {seed}")

    def loss_at(self, look: int, patience: float) -> float:
        self.track.turns.append((self.point, look))
        took = STEP[self.point] * (1 + self.draw.gauss(0, self.track.noise))
        self.track.clock.now += min(took, patience)
        if took > patience or self.track.fails(self.point, look):
            raise WorkerError("killed")
        self.seconds += took
        return 3.0 - LEARNS[self.point] * look / LOOKS

    def end(self, at_once: bool = False) -> None:
        self.track.alive -= not self.ended
        self.ended = True


def raced(track: Track, leaders: list[Point], seconds: float = 1000.0, **more: object) -> dict:
    return races(track.begin, START, leaders, seconds, clock=track.clock, **more)  # type: ignore[arg-type]


def test_who_needs_half_the_time_to_the_loss_is_twice_as_fast() -> None:
    track = Track()
    found = raced(track, [FAST, SLOW])
    base, fast, slow = found["arms"]
    assert base["verdict"] == "baseline"
    assert fast["verdict"] == "helped"
    assert fast["ratio"]["median"] == pytest.approx(2.0, rel=0.05)
    assert fast["ratio"]["low"] > 1.8
    assert slow["verdict"].startswith("hurt")
    assert track.alive == 0


def test_a_fast_step_that_learns_less_does_not_win() -> None:
    _, lossy = raced(Track(), [LOSSY])["arms"]
    assert lossy["verdict"].startswith("failed: did not reach the loss of 2.1000")
    assert lossy["ratio"] is None


def test_the_target_is_what_the_start_has_before_its_last_look() -> None:
    assert raced(Track(), [FAST])["target_loss"] == pytest.approx(3.0 - (LOOKS - 1) / LOOKS)
    assert raced(Track(), [FAST], target=2.8)["target_loss"] == 2.8


def test_a_target_of_its_own_is_reached_by_the_start_whatever_the_seed() -> None:
    track = Track()
    rising: list[float] = []  # each race begins a tenth of a nat higher

    class Higher(Runner):
        def __init__(self, track: Track, point: Point, seed: int) -> None:
            super().__init__(track, point, seed)
            self.above = 0.1 * seed

        def loss_at(self, look: int, patience: float) -> float:
            found = super().loss_at(look, patience) + self.above
            if self.point == START and look == LOOKS - 1:
                rising.append(found)
            return found

    track.begin = lambda point, seed: Higher(track, point, seed)  # type: ignore[method-assign]
    found = raced(track, [FAST])
    assert len(rising) > 3
    assert found["target_loss"] == max(rising)
    assert found["arms"][0]["verdict"] == "baseline"
    assert found["arms"][1]["verdict"] == "helped"


def test_with_a_near_target_who_learns_less_but_faster_may_win() -> None:
    _, lossy = raced(Track(), [LOSSY], target=2.9)["arms"]
    expected = 1.0 / (0.4 * (0.1 / 0.03))  # a look's tenth of a nat against three looks and a third
    assert lossy["ratio"]["median"] == pytest.approx(expected, rel=0.1)


def test_a_target_that_the_start_does_not_reach_is_refused() -> None:
    with pytest.raises(InputError, match=r"target_loss: .* did not reach the loss of 1.0000"):
        raced(Track(), [FAST], target=1.0)


def test_all_take_turns_from_look_to_look() -> None:
    track = Track()
    raced(track, [FAST, SLOW], seconds=35.0)
    for look in range(LOOKS):
        turn = track.turns[3 * look : 3 * look + 3]
        assert {point for point, _ in turn} == {START, FAST, SLOW}
        assert {n for _, n in turn} == {look + 1}


@pytest.mark.parametrize("seconds", [5.0, 20.0, 40.0])
def test_too_few_races_prove_nothing_and_the_time_is_kept(seconds: float) -> None:
    track = Track()
    found = raced(track, [FAST], seconds=seconds)
    assert track.clock.now <= seconds
    assert found["arms"][1]["verdict"].startswith("undecided")
    assert track.alive == 0


def test_one_that_is_killed_is_told_and_the_others_race_on() -> None:
    track = Track()
    track.fails = lambda point, look: point == SLOW and look == 3
    _, fast, slow = raced(track, [FAST, SLOW])["arms"]
    assert slow["verdict"] == "failed: killed"
    assert fast["verdict"] == "helped"


def test_a_start_that_fails_is_a_sentence() -> None:
    track = Track()
    track.fails = lambda point, look: point == START
    with pytest.raises(InputError, match="the job as it is failed in the race: killed"):
        raced(track, [FAST])
    assert track.alive == 0


@given(
    st.lists(st.floats(0.1, 10), min_size=1, max_size=8),
    st.lists(st.floats(0.5, 4), min_size=8, max_size=8),
    st.floats(0.4, 4),
)
def test_the_time_to_a_target_lies_within_the_look_that_crosses_it(
    steps: list[float], losses: list[float], target: float
) -> None:
    seconds = [math.fsum(steps[: n + 1]) for n in range(len(steps))]
    curve = LossCurve(seconds, losses[: len(steps)])
    found = curve.until(target)
    crossed = [n for n, loss in enumerate(curve.losses) if loss <= target]
    assert (found is None) == (not crossed)
    if found is not None and crossed[0]:
        assert seconds[crossed[0] - 1] <= found <= seconds[crossed[0]] + 1e-9
