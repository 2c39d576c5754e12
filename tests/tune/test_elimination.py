"""The final on a machine that is made up: who leads, who leaves, and what noise does to it."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from hasten.measure.elimination import FEWEST, MOST_ROUNDS, leading, ordered, surely_slower
from hasten.tune.bench import ReferencePair
from hasten.tune.space import Point
from tune.simulated import Machine, of_values

SPACE = of_values({"batch": [1, 2, 4, 8], "fused": [False, True], "dtype": ["fp32", "bf16"]})
ONE, TWO, THREE = (1,), (2,), (3,)


def seconds(s: dict[str, Any]) -> float:
    return (
        (1.0 + 1.0 / s["batch"]) * (0.8 if s["fused"] else 1) * (0.6 if s["dtype"] == "bf16" else 1)
    )


def raced(machine: Machine, points: list[Point]) -> dict[Point, tuple[float, ...]]:
    with ReferencePair(machine.start, SPACE.start, 2, steps=1, clock=machine.clock) as bench:
        bench.open(1e6)
        found = bench.side_by_side(dict.fromkeys(points, 0.0), 1e6)
    assert machine.alive == 0
    return found


def test_the_speed_of_a_round_is_not_that_of_a_point() -> None:
    """By medians of its own rounds the second would lead; in each round but one it is behind."""
    logs = {ONE: [2.0, 0.0, 0.9, 3.0, 0.1], TWO: [1.9, 1.0, 0.8, 2.9, 0.0]}
    assert leading(logs) == [ONE, TWO]


def test_more_rounds_lead_and_those_that_left_are_in_the_order_in_which_they_did() -> None:
    logs = {ONE: [0.9] * 4, TWO: [0.1] * 6, THREE: [0.2] * 6}
    assert leading(logs) == [THREE, TWO, ONE]
    assert leading({}) == []


@pytest.mark.parametrize("spread", [0.0, 0.02, 0.1])
def test_equals_are_seldom_sent_away_and_those_far_behind_always(spread: float) -> None:
    draw = random.Random(0)
    gone = [0, 0]
    for _ in range(200):
        machine = [draw.gauss(0, 0.3) for _ in range(8)]

        def rounds(value: float, machine: list[float] = machine) -> list[float]:
            return [value + m + draw.gauss(0, spread) for m in machine]

        found = surely_slower({ONE: rounds(1.0), TWO: rounds(1.0), THREE: rounds(0.6)})
        gone[0] += THREE in found
        gone[1] += len(set(found) - {THREE})
    assert gone[0] == 200
    assert gone[1] <= 16


def test_equals_have_all_the_rounds_in_most_finals() -> None:
    """Who is behind is asked after every round, so a chance per round adds up."""
    draw, early = random.Random(1), 0
    for _ in range(100):
        logs = {point: [draw.gauss(0, 0.1) for _ in range(40)] for point in (ONE, TWO)}
        early += any(surely_slower({p: own[:n] for p, own in logs.items()}) for n in range(4, 41))
    assert early <= 10


def test_nobody_leaves_after_a_few_rounds() -> None:
    few = {ONE: [1.0] * (FEWEST - 1), TWO: [0.0] * (FEWEST - 1)}
    assert surely_slower(few) == []
    assert surely_slower({p: [*logs, logs[0]] for p, logs in few.items()}) == [TWO]


def test_who_is_left_alone_ends_the_final() -> None:
    points = [SPACE.point({"batch": b, "dtype": "bf16"}) for b in (8, 2, 1)]
    machine = Machine(SPACE, seconds)
    found = raced(machine, points)
    assert {len(logs) for logs in found.values()} == {FEWEST}
    assert leading(found)[0] == points[0]


def test_those_that_stay_have_the_rounds_of_those_that_left() -> None:
    near = {"batch": 4}, {"batch": 8}  # 10 % apart
    points = [SPACE.point({**n, "fused": True, "dtype": "bf16"}) for n in near]
    points += [SPACE.point({"fused": True}), SPACE.point({"dtype": "bf16"})]
    machine = Machine(SPACE, seconds, noise=0.1)
    found = raced(machine, points)
    assert max(len(found[p]) for p in points[:2]) > max(len(found[p]) for p in points[2:])
    assert max(len(logs) for logs in found.values()) <= MOST_ROUNDS
    best = 0
    for seed in range(30):
        machine = Machine(SPACE, seconds, noise=0.1)
        machine.draw.seed(seed)
        best += leading(raced(machine, points))[0] == points[1]
    assert best >= 28


def test_of_equals_the_one_that_was_expected_to_be_the_best_leads() -> None:
    """The first of them is the luckiest; who is a standard error behind it is no equal."""
    noise = [0.02, -0.02] * 10
    logs = {ONE: [1.0] * 20, TWO: [0.998 + n for n in noise], THREE: [0.9 + n for n in noise]}
    assert leading(logs) == [ONE, TWO, THREE]
    wish = {ONE: 0.1, TWO: 0.2, THREE: 0.3}.__getitem__
    assert ordered(logs, wish) == [TWO, ONE, THREE]
    assert ordered(logs, lambda point: 0.0) == [ONE, TWO, THREE]
    few = {point: own[: FEWEST - 1] for point, own in logs.items()}
    assert ordered(few, wish) == leading(few)  # nothing can be said of them
    assert ordered({ONE: [1.0] * 9, TWO: [1.0] * 8}, wish) == [ONE, TWO]  # who has left is behind
    assert ordered({}, wish) == []


@pytest.mark.parametrize("uneven", [0.2, 1.0])
def test_finalists_are_compared_at_the_same_records(uneven: float) -> None:
    """What is in a step's records makes it longer; 3 % are seen, however long a warm-up was."""
    points = [SPACE.point({"batch": b}) for b in (2, 4, 8)]
    near = {2: 1.03, 4: 1.0, 8: 1.03}
    cold = {2: [9.0, 6.0, 4.0], 8: [6.0]}  # seconds of the first steps

    def seconds(s: dict[str, Any]) -> float:
        left = cold.get(s["batch"])
        return left.pop(0) if left else near.get(s["batch"], 1.5)

    machine = Machine(SPACE, seconds, content=lambda step: 1 + uneven * (step * 7 % 11) / 10)
    found = raced(machine, points)
    assert leading(found)[0] == points[1]
    first, other = (found[p] for p in (points[1], points[0]))
    assert [a - b for a, b in zip(first, other, strict=False)] == pytest.approx(
        [math.log(1.03)] * len(other)
    )


def test_a_finalist_that_dies_is_left_out_and_the_others_go_on() -> None:
    first, best = SPACE.settings(SPACE.start), {"batch": 8, "fused": True, "dtype": "bf16"}
    machine = Machine(SPACE, seconds)
    with ReferencePair(machine.start, SPACE.start, 2, clock=machine.clock) as bench:
        bench.open(1e6)
        points = [SPACE.point({**first, **change}) for change in ({"batch": 8}, best)]
        machine.fails = lambda s: "gone" if s == best else None
        found = bench.side_by_side({points[0]: 0.3, points[1]: 0.9}, 1e6)
    assert list(found) == points[:1]
    assert found[points[0]] == pytest.approx([0.3] * len(found[points[0]]))  # on its trial's level
    assert machine.alive == 0


def test_a_final_without_time_decides_nothing() -> None:
    machine = Machine(SPACE, seconds)
    with ReferencePair(machine.start, SPACE.start, 2, clock=machine.clock) as bench:
        bench.open(1e6)
        points = [p for p in SPACE.points() if p != SPACE.start][:3]
        assert bench.side_by_side(dict.fromkeys(points, 0.0), machine.clock.now + 12.0) == {}
    assert machine.alive == 0
