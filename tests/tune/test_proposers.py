"""Proposers and the belief behind hasten's own: what they try, what they never try."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from hasten.tune.samplers import (
    BEFORE,
    CLOSE,
    OF_MEDIAN,
    ForecastProposer,
    PriorKnowledge,
    Proposer,
    TriedPoint,
    proposer_of,
)
from hasten.tune.space import SMALL, Dimension, Point, Space
from hasten.tune.surrogate import PlanGaussianProcess, Posterior, expected_improvement
from tune.simulated import of_values

KNOBS = {"a": [0, 1, 2, 3], "b": [False, True], "c": ["x", "y", "z"], "d": [False, True]}
SPACE = of_values(KNOBS)
NAMES = ("auto", "tpe", "gp", "random", "genetic", "cmaes", "bandit")


def truth(point: Point) -> float:
    """Additive, with one pair that helps each other."""
    s = SPACE.settings(point)
    found = 0.08 * s["a"] + 0.1 * s["b"] + {"x": 0.0, "y": 0.15, "z": -0.1}[s["c"]]
    return found + (0.05 if s["b"] and s["d"] else -0.02 * s["d"])


def study(proposer: Proposer, trials: int, noise: float = 0.0) -> list[TriedPoint]:
    draw, found = random.Random(1), []
    proposer.tell(TriedPoint(SPACE.start, "ok", 0.0))
    for _ in range(trials):
        point = proposer.ask()
        if point is None:
            break
        found.append(TriedPoint(point, "ok", truth(point) + draw.gauss(0, noise)))
        proposer.tell(found[-1])
    return found


@pytest.mark.parametrize("name", NAMES)
def test_no_point_is_proposed_twice_nor_the_start(name: str) -> None:
    trials = 4 if name == "gp" else 12  # a fit takes seconds
    found = [t.point for t in study(proposer_of(name, SPACE, PriorKnowledge()), trials)]
    assert len(found) == len(set(found)) == trials
    assert SPACE.start not in found


@pytest.mark.parametrize("name", ["auto", "random", "genetic", "bandit"])
def test_when_every_point_was_tried_the_end_is_told(name: str) -> None:
    found = [t.point for t in study(proposer_of(name, SPACE, PriorKnowledge()), 60)]
    assert len(found) == len(set(found)) == len(SPACE.points()) - 1


@pytest.mark.parametrize("name", NAMES)
def test_what_the_space_refuses_is_never_proposed(name: str) -> None:
    space = Space(SPACE.dimensions, SPACE.start, lambda p: "no" if p[0] == 3 else None)
    proposer = proposer_of(name, space, PriorKnowledge())
    proposer.tell(TriedPoint(space.start, "ok", 0.0))
    for _ in range(4 if name == "gp" else 8):
        point = proposer.ask()
        assert point is not None
        assert point[0] < 3
        proposer.tell(TriedPoint(point, "failed"))


@pytest.mark.parametrize("name", ["auto", "random", "tpe", "bandit"])
def test_the_same_seed_proposes_the_same(name: str) -> None:
    runs = [
        [t.point for t in study(proposer_of(name, SPACE, PriorKnowledge(), seed=3), 12)]
        for _ in "ab"
    ]
    assert runs[0] == runs[1]


def test_hastens_own_finds_the_best_of_48_within_eight_noisy_trials() -> None:
    best = max(truth(p) for p in SPACE.points())
    for seed in range(5):
        tried = study(ForecastProposer(SPACE, PriorKnowledge(noise=0.01), seed), 8, noise=0.01)
        assert max(truth(t.point) for t in tried) > best + math.log(0.97)


def test_the_first_trial_follows_the_forecast() -> None:
    own = ForecastProposer(SPACE, PriorKnowledge(gain=truth))
    best = max(SPACE.points(), key=truth)
    assert own.ask() == best


def test_a_forecast_that_is_wrong_is_overruled_by_what_is_measured() -> None:
    own = ForecastProposer(SPACE, PriorKnowledge(gain=lambda p: -truth(p), noise=0.01))
    best = max(truth(p) for p in SPACE.points())
    tried = study(own, 20)
    assert max(truth(t.point) for t in tried) > best + math.log(0.97)


def test_of_points_that_promise_alike_the_one_that_takes_less_time_is_tried() -> None:
    first = ForecastProposer(SPACE, PriorKnowledge()).ask()
    assert first is not None
    cold = {first}
    own = ForecastProposer(SPACE, PriorKnowledge(effort=lambda p: 2.0 if p in cold else 1.0))
    assert own.ask() != first
    cold.clear()  # ready by now
    assert own.ask() == first
    dear = ForecastProposer(
        SPACE, PriorKnowledge(gain=truth, effort=lambda p: 2.0 if p[2] == 1 else 1.0)
    )
    best = max(SPACE.points(), key=truth)
    assert best[2] == 1
    tried = study(dear, 12)
    assert best in {t.point for t in tried}  # later, not never


def test_a_value_of_one_round_is_believed_less_than_one_of_three() -> None:
    lucky, rival = (1, 0, 0, 0), (0, 0, 1, 0)

    def believed(rounds: int) -> float:
        own = ForecastProposer(SPACE, PriorKnowledge(noise=0.1))
        own.tell(TriedPoint(SPACE.start, "ok", 0.0))
        own.tell(TriedPoint(lucky, "ok", 0.3, rounds=(0.3,) * rounds))
        own.tell(TriedPoint(rival, "ok", 0.3, rounds=(0.3,) * 3))
        seen, values, noises = own._measured()
        found = own._speed.after(seen, values, noises)([lucky, rival])
        return float(found.mean[0] - found.mean[1])

    assert believed(1) < believed(2) < believed(3)


def test_a_belief_weighs_each_value_by_its_own_noise() -> None:
    belief = PlanGaussianProcess(SPACE, noise=0.05)
    seen, values = [SPACE.start, (1, 1, 0, 0), (0, 0, 1, 1)], [0.0, 0.4, 0.2]
    usual = belief.after(seen, values)(seen)
    same = belief.after(seen, values, [0.05] * 3)(seen)
    assert np.array_equal(usual.mean, same.mean)
    doubtful = belief.after(seen, values, [0.05, 0.5, 0.05])(seen)
    assert abs(doubtful.mean[1] - 0.4) > abs(usual.mean[1] - 0.4)
    assert doubtful.deviation[1] > usual.deviation[1]


def test_what_is_predicted_to_exceed_memory_is_not_tried() -> None:
    def bytes_of(point: Point) -> float:
        return 1e9 * (1 + 2 * point[0])

    own = ForecastProposer(SPACE, PriorKnowledge(memory=bytes_of, limit=4e9, gain=truth))
    assert all(t.point[0] <= 1 for t in study(own, 60))


def test_after_one_trial_out_of_memory_the_like_of_it_is_left_alone() -> None:
    def memory(point: Point) -> float:
        return 1e9 * 2.0 ** point[0]

    own = ForecastProposer(SPACE, PriorKnowledge(gain=truth, limit=3e9))
    own.tell(TriedPoint(SPACE.start, "ok", 0.0, memory(SPACE.start)))
    failures = 0
    for _ in range(30):
        point = own.ask()
        if point is None:
            break
        if memory(point) > 3e9:
            failures += 1
            own.tell(TriedPoint(point, "out of memory"))
        else:
            own.tell(TriedPoint(point, "ok", truth(point), memory(point)))
    assert failures <= 2  # nothing was predicted beforehand: one to learn it, one at the edge
    assert len(own.told) > 10


@pytest.mark.parametrize("culprit", range(6))
def test_a_single_culprit_of_failures_is_avoided_soon(culprit: int) -> None:
    """Every other switch gains 10 %: the best point has all but the one with which a run fails."""
    space = of_values({name: [False, True] for name in "abcdef"})
    own = ForecastProposer(space, PriorKnowledge(gain=lambda p: 0.1 * sum(p), noise=0.01), seed=1)
    own.tell(TriedPoint(space.start, "ok", 0.0))
    best = tuple(int(place != culprit) for place in range(6))
    while best not in own.told:
        assert len(own.told) <= 12
        point = own.ask()
        assert point is not None
        failed = TriedPoint(point, "failed")
        own.tell(failed if point[culprit] else TriedPoint(point, "ok", 0.1 * sum(point)))


def test_the_promise_ends_when_all_is_known() -> None:
    own = ForecastProposer(SPACE, PriorKnowledge(noise=0.01))
    first = own.promise()
    study(own, 25)
    assert own.promise() < 0.1 * first


def test_the_belief_is_a_plain_gaussian_regression() -> None:
    """Against the textbook formula (Rasmussen and Williams 2006, 2.23 and 2.24) in float64."""
    space = of_values({"a": [0, 1], "b": [0, 1]})
    seen, values = [(0, 0), (1, 0), (0, 1)], [0.0, 0.2, 0.1]
    belief = PlanGaussianProcess(space, noise=0.02, aparts=(0.01,), scales=(0.1,))
    found = belief.after(seen, values)([(1, 1)])

    def posterior(share: float) -> tuple[float, float, float]:
        def kernel(p: Point, q: Point) -> float:
            same = [float(i == j) for i, j in zip(p, q, strict=True)]
            return 0.1**2 * (sum(same) + share**2 * same[0] * same[1])

        k = np.array([[kernel(p, q) for q in seen] for p in seen]) + (0.02**2 + 0.01**2) * np.eye(3)
        across = np.array([kernel((1, 1), q) for q in seen])
        y, inverse = np.array(values), np.linalg.inv(k)
        likelihood = -0.5 * y @ inverse @ y - 0.5 * np.linalg.slogdet(k)[1]
        spread = kernel((1, 1), (1, 1)) - across @ inverse @ across + 0.01**2
        return likelihood, across @ inverse @ y, math.sqrt(spread)

    each = [posterior(share) for share in (0.15, 0.4, 0.8)]
    shares = np.exp([likelihood for likelihood, _, _ in each])
    means, deviations = (np.array(column) for column in list(zip(*each, strict=True))[1:])
    mean = np.average(means, weights=shares)  # of a mixture (Hoeting et al. 1999, (3) and (4))
    square = np.average(deviations**2 + means**2, weights=shares)
    deviation = math.sqrt(square - mean**2)
    assert found.mean[0] == pytest.approx(mean, rel=1e-9)
    assert found.deviation[0] == pytest.approx(deviation, rel=1e-9)


def test_expected_improvement_is_the_mean_of_what_lies_above() -> None:
    draws = np.random.default_rng(0).normal(0.3, 0.2, 400_000)
    found = expected_improvement(Posterior(np.array([0.3]), np.array([0.2])), 0.4)
    assert found[0] == pytest.approx(np.maximum(draws - 0.4, 0).mean(), rel=0.01)


def test_a_conditional_decision_is_learnt_under_its_own_choice_alone() -> None:
    space = Space(
        (
            Dimension("way", ("none", "graph")),
            Dimension("bucket", (1, 2, 3), ordered=True, needs=("way", "graph")),
        ),
        (0, 0),
    )
    own = ForecastProposer(space, PriorKnowledge(noise=0.01))
    seen = []
    own.tell(TriedPoint(space.start, "ok", 0.0))
    while (point := own.ask()) is not None:
        seen.append(point)
        own.tell(TriedPoint(point, "ok", 0.1 * point[1]))
    assert sorted(seen) == [(1, 0), (1, 1), (1, 2)]


def test_in_a_space_too_large_to_look_at_whole_the_way_leads_up_from_a_sample() -> None:
    space = of_values({f"k{n}": list(range(6)) for n in range(8)})
    assert space.size > SMALL
    top = tuple((n + 2) % 6 for n in range(8))

    def gain(point: Point) -> float:
        return 0.2 - 0.01 * sum(abs(a - b) for a, b in zip(point, top, strict=True))

    own = ForecastProposer(space, PriorKnowledge(gain=gain))
    assert top not in space.points()
    assert own.ask() == top
    own.tell(TriedPoint(top, "ok", 0.0))
    second = own.ask()
    assert second not in (None, top)


def test_the_search_stays_about_the_best_as_long_as_something_is_expected_there() -> None:
    space = of_values({f"knob {n}": [0, 1, 2] for n in range(7)})
    best, middle = space.point({f"knob {n}": 1 for n in range(7)}), space.point({"knob 0": 1})
    own = ForecastProposer(space, PriorKnowledge(noise=0.01))
    own.tell(TriedPoint(space.start, "ok", 0.0))
    own.tell(TriedPoint(middle, "ok", 0.2, rounds=(0.2,)))
    own.tell(TriedPoint(best, "ok", 0.5, rounds=(0.5,)))
    for _ in range(4):
        point = own.ask()
        assert point is not None
        assert space.distance(point, best) <= CLOSE
        own.tell(TriedPoint(point, "ok", 0.4, rounds=(0.4,)))
    for point in space.points():  # all that is close was tried, and found wanting
        if 0 < space.distance(point, best) <= CLOSE:
            own.tell(TriedPoint(point, "ok", 0.3, rounds=(0.3,)))
    point = own.ask()
    assert point is not None
    assert space.distance(point, best) > CLOSE


def test_what_was_tried_in_an_earlier_start_is_not_met_again_on_the_way() -> None:
    space = of_values({f"k{n}": list(range(6)) for n in range(8)})
    own = ForecastProposer(space, PriorKnowledge(gain=lambda p: 0.01 * sum(p)))
    best = own.ask()
    assert best == (5,) * 8
    again = ForecastProposer(space, PriorKnowledge(gain=lambda p: 0.01 * sum(p)))
    again.tell(TriedPoint(best, "ok", 0.1))
    assert again.ask() != best


def test_rounds_that_stray_more_than_the_start_did_are_believed_less() -> None:
    def measured(spread: float) -> ForecastProposer:
        own = ForecastProposer(SPACE, PriorKnowledge(noise=0.005))
        own.tell(TriedPoint(SPACE.start, "ok", 0.0))
        for point in SPACE.points()[1:5]:
            value = truth(point)
            own.tell(TriedPoint(point, "ok", value, rounds=(value - spread, value, value + spread)))
        return own

    assert measured(0.0)._speed.noise < 0.005
    pooled = math.sqrt((8 * (OF_MEDIAN * 0.1) ** 2 + BEFORE * 0.005**2) / (8 + BEFORE))
    assert measured(0.1)._speed.noise == pytest.approx(pooled)


def test_a_noise_that_two_unlucky_rounds_have_shown_is_forgotten_when_trials_are_steady() -> None:
    own = ForecastProposer(SPACE, PriorKnowledge(noise=0.3))
    own.tell(TriedPoint(SPACE.start, "ok", 0.0))
    for point in SPACE.points()[1:11]:
        own.tell(TriedPoint(point, "ok", truth(point), rounds=(0.1, 0.13, 0.16)))
    assert own._speed.noise < 0.5 * 0.3
