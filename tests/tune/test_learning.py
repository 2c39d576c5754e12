"""Studies of hyper-parameters on trainings that are made up: what is given up, proven, resumed."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hasten.errors import InputError
from hasten.measure.record import ExperimentRecord
from hasten.measure.workers import WorkerError
from hasten.tune.learning_study import FEWEST_PAIRS, Learning, LearningResult
from hasten.tune.space import Dimension, Point, Space
from tune.simulated import Clock

RATES = (1e-4, 2e-4, 4e-4, 8e-4, 1.6e-3, 3.2e-3, 6.4e-3)
SPACE = Space(
    (
        Dimension("learning_rate", RATES, ordered=True),
        Dimension("warmup_share", (0.0, 0.03, 0.1), ordered=True),
    ),
    (1, 0),
)
Loss = Callable[[dict[str, Any]], float]


def bowl(s: dict[str, Any]) -> float:
    """Lowest at 1.6e-3 with a little warm-up; far from it by a third of a nat."""
    off = math.log2(s["learning_rate"] / 1.6e-3)
    return 2.0 + 0.03 * off * off + 2 * abs(s["warmup_share"] - 0.03)


class Trainings:
    """Trainings of ten seconds whose losses fall towards what ``loss`` of their settings says."""

    def __init__(self, loss: Loss = bowl, noise: float = 0.002, looks: int = 8) -> None:
        self.loss, self.noise, self.looks, self.clock = loss, noise, looks, Clock()
        self.begun: list[tuple[Point, int]] = []
        self.alive = 0
        self.fails: Callable[[Point, int], str | None] = lambda point, look: None

    def begin(self, point: Point, seed: int) -> Made:
        self.begun.append((point, seed))
        self.alive += 1
        return Made(self, point, seed)

    def study(
        self, budget: float = 1000.0, record: ExperimentRecord | None = None, **more: Any
    ) -> LearningResult:
        search = Learning(
            SPACE,
            self.begin,
            record or ExperimentRecord(),
            budget_seconds=budget,
            looks=self.looks,
            clock=self.clock,
            **more,
        )
        return search.run()


class Made:
    def __init__(self, of: Trainings, point: Point, seed: int) -> None:
        self.of, self.point, self.ended = of, point, False
        self.draw = random.Random(f"{point} {seed}").gauss(0, of.noise)
        self.draw += random.Random(seed).gauss(0, 0.02)  # a seed's own, the same for all points

    def loss_at(self, look: int, patience: float) -> float:
        took = 10.0 / self.of.looks
        self.of.clock.now += min(took, patience)
        if took > patience:
            raise WorkerError("no answer in time")
        if why := self.of.fails(self.point, look):
            raise WorkerError(why)
        last = self.of.loss(SPACE.settings(self.point)) + self.draw
        return last + 2.0 * (1 - look / self.of.looks)

    def end(self, at_once: bool = False) -> None:
        self.of.alive -= not self.ended
        self.ended = True


def test_the_best_values_are_found_and_proven_by_fresh_seeds() -> None:
    made = Trainings()
    found = made.study()
    assert found.better
    assert found.best is not None
    assert SPACE.settings(found.best)["learning_rate"] in (8e-4, 1.6e-3, 3.2e-3)
    assert len(found.pairs) >= FEWEST_PAIRS
    seeds = [p["seed"] for p in found.pairs]
    assert len(set(seeds)) == len(seeds)
    assert 0 not in seeds  # the search's own: the best was chosen by it
    assert made.alive == 0


def test_the_recipes_own_values_are_trained_first_and_nothing_twice() -> None:
    made = Trainings()
    found = made.study(most=10)
    assert made.begun[0] == (SPACE.start, 0)
    searched = [p for p, seed in made.begun if seed == 0]
    assert len(searched) == len(set(searched)) == len(found.rows) == 10
    assert found.ended == "10 trainings were done"


def test_what_is_worse_than_the_median_is_given_up_and_saves_its_time() -> None:
    made = Trainings()
    found = made.study()
    pruned = [r for r in found.rows if r["state"] == "pruned"]
    assert pruned
    assert all(2 < len(r["losses"]) < 8 and r["loss"] is None for r in pruned)
    assert all(r["seconds"] < 10 for r in pruned)
    finished = [r["loss"] for r in found.rows if r["state"] == "ok"]
    assert len(finished) >= 3  # so many must be over before any is given up


def test_values_that_make_no_difference_are_not_called_better() -> None:
    found = Trainings(loss=lambda s: 2.0, noise=0.01).study()
    assert not found.better or found.ratio is None or found.ratio.low < 1.005
    assert len(found.pairs) <= 6


@pytest.mark.parametrize(("studies", "most"), [(7, 1), pytest.param(20, 3, marks=pytest.mark.long)])
def test_a_false_better_is_rare_where_nothing_is_better(studies: int, most: int) -> None:
    """2.5 % of one-sided intervals, so many of them."""
    wrong = 0
    for seed in range(studies):
        made = Trainings(loss=lambda s: 2.0, noise=0.01)
        wrong += made.study(budget=300.0, seed=100 * seed).better
    assert wrong <= most


def test_every_point_of_a_small_space_is_tried_and_the_end_is_told() -> None:
    found = Trainings().study(budget=1e5)
    assert found.ended == "everything that may be tried was tried"
    assert len(found.rows) == len(SPACE.points())


def test_a_loss_that_is_no_number_fails_that_training_alone() -> None:
    def loss(s: dict[str, Any]) -> float:
        return math.nan if s["learning_rate"] > 1e-3 else bowl(s)

    found = Trainings(loss).study()
    bad = [r for r in found.rows if r["settings"]["learning_rate"] > 1e-3]
    assert bad
    assert {r["why"] for r in bad} == {"its eval loss is not a finite number"}
    assert found.best is not None
    assert SPACE.settings(found.best)["learning_rate"] < 1e-3


def test_a_job_that_fails_as_it_is_is_refused() -> None:
    made = Trainings()
    made.fails = lambda point, look: "ValueError: no such column"
    with pytest.raises(InputError, match=r"before any change: ValueError: no such column"):
        made.study()
    assert made.alive == 0


@pytest.mark.parametrize("budget", [5.0, 9.0, 60.0])
def test_a_budget_that_is_too_short_is_refused_after_two_looks(budget: float) -> None:
    made = Trainings()
    with pytest.raises(InputError, match=r"budget: .* is too short"):
        made.study(budget=budget)
    assert made.clock.now <= min(budget, 3.0)
    assert made.alive == 0


def test_the_budget_is_kept() -> None:
    for budget in (100.0, 150.0, 400.0):
        made = Trainings()
        found = made.study(budget=budget)
        assert made.clock.now <= budget
        assert found.unproven is None


def test_a_pair_that_fails_leaves_the_best_unproven() -> None:
    made = Trainings()
    made.fails = lambda point, look: "killed" if made.begun[-1][1] == 2 else None
    found = made.study()
    assert found.unproven == "a training of the pairs failed: killed"
    assert not found.better
    assert made.alive == 0


def test_a_study_that_was_killed_goes_on_and_trains_nothing_twice(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    whole = Trainings().study(most=12)
    made = Trainings()

    def killed(point: Point, look: int) -> str | None:
        if len(made.begun) == 8:
            raise KeyboardInterrupt
        return None

    made.fails = killed
    with ExperimentRecord(path, "key") as record, pytest.raises(KeyboardInterrupt):
        made.study(most=12, record=record)
    with path.open("ab") as file:
        file.write(b'{"event": "trained", "settings": {"lear')  # the line in which it was killed
    again = Trainings()
    with ExperimentRecord(path, "key") as record:
        found = again.study(most=12, record=record)
    assert len(found.rows) == 12
    assert found.rows[:7] == whole.rows[:7]
    searched = [p for p, seed in again.begun if seed == 0]
    assert len(searched) == 12 - 7
    assert found.better


def test_pairs_that_were_interrupted_are_gone_on_with(tmp_path: Path) -> None:
    path, made = tmp_path / "record.jsonl", Trainings()

    def killed(point: Point, look: int) -> str | None:
        if made.begun[-1][1] == 3:
            raise KeyboardInterrupt
        return None

    made.fails = killed
    with ExperimentRecord(path, "key") as record, pytest.raises(KeyboardInterrupt):
        made.study(most=8, record=record)
    again = Trainings()
    with ExperimentRecord(path, "key") as record:
        found = again.study(most=8, record=record)
    assert min(seed for _, seed in again.begun) == 3
    assert [p["seed"] for p in found.pairs] == list(range(1, len(found.pairs) + 1))
