"""Proposers and the belief behind hasten's own: what they try, what they never try."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from hasten.tune.samplers import (
    TRUST,
    ForecastProposer,
    PriorKnowledge,
    Proposer,
    TriedPoint,
    proposer_of,
)
from hasten.tune.space import SMALL, Dimension, Point, Space
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
    assert len(own.results) > 10


@pytest.mark.parametrize("culprit", range(6))
def test_a_single_culprit_of_failures_is_avoided_soon(culprit: int) -> None:
    """Every other switch gains 10 %: the best point has all but the one with which a run fails."""
    space = of_values({name: [False, True] for name in "abcdef"})
    own = ForecastProposer(space, PriorKnowledge(gain=lambda p: 0.1 * sum(p), noise=0.01), seed=1)
    own.tell(TriedPoint(space.start, "ok", 0.0))
    best = tuple(int(place != culprit) for place in range(6))
    while best not in own.results:
        assert len(own.results) <= 12
        point = own.ask()
        assert point is not None
        failed = TriedPoint(point, "failed")
        own.tell(failed if point[culprit] else TriedPoint(point, "ok", 0.1 * sum(point)))


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


def test_what_was_tried_in_an_earlier_start_is_not_met_again_on_the_way() -> None:
    space = of_values({f"k{n}": list(range(6)) for n in range(8)})
    own = ForecastProposer(space, PriorKnowledge(gain=lambda p: 0.01 * sum(p)))
    best = own.ask()
    assert best == (5,) * 8
    again = ForecastProposer(space, PriorKnowledge(gain=lambda p: 0.01 * sum(p)))
    again.tell(TriedPoint(best, "ok", 0.1))
    assert again.ask() != best


def test_predictions_are_those_of_a_bayesian_linear_regression() -> None:
    """Against the textbook formulas for weights (Bishop 2006, 3.50 to 3.59), in float64."""
    space = of_values({"a": [0, 1], "b": [0, 1]})
    own = ForecastProposer(space, PriorKnowledge())
    measured, new = {(0, 0): 0.0, (1, 0): 0.2, (0, 1): 0.1}, (1, 1)

    def forecast(point: Point) -> float:
        return 0.05 * sum(point)

    def row(p: Point) -> list[float]:
        return [float(p[0] == 0), float(p[0]), float(p[1] == 0), float(p[1]), forecast(p)]

    x, y = np.array([row(p) for p in measured]), np.array(list(measured.values()))
    means, variances, likelihoods = [], [], []
    for scale in (0.03, 0.3):
        prior = np.diag([scale**2] * 4 + [TRUST**2])
        start = np.array([0.0] * 4 + [1.0])  # the forecast has the weight 1, give or take TRUST
        precision = np.linalg.inv(prior) + x.T @ x / 0.02**2
        covariance = np.linalg.inv(precision)
        weights = covariance @ (np.linalg.inv(prior) @ start + x.T @ y / 0.02**2)
        means.append(row(new) @ weights)
        variances.append(np.array(row(new)) @ covariance @ row(new))
        whole = x @ prior @ x.T + 0.02**2 * np.eye(3)
        gap = y - x @ start
        likelihood = -0.5 * gap @ np.linalg.solve(whole, gap) - 0.5 * np.linalg.slogdet(whole)[1]
        likelihoods.append(likelihood)
    shares = np.exp(likelihoods) / np.exp(likelihoods).sum()
    mean = shares @ means
    variance = shares @ (np.array(variances) + np.square(means)) - mean**2
    found = own._predicted([new], forecast, measured, (0.03, 0.3), 0.02)
    assert found[0][0] == pytest.approx(mean, rel=1e-9)
    assert found[1][0] == pytest.approx(math.sqrt(variance + 0.02**2), rel=1e-9)


def test_a_sampler_of_optuna_begins_with_the_best_forecast() -> None:
    best = max(SPACE.points(), key=truth)
    for name in ("tpe", "gp", "genetic", "cmaes"):
        assert proposer_of(name, SPACE, PriorKnowledge(gain=truth)).ask() == best
