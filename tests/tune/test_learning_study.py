"""Trainings of a recipe with other hyper-parameters: same tokens, same eval records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hasten.core.plan import Plan
from hasten.errors import InputError
from hasten.measure.recipe_experiment import ExperimentSubject, prepared
from hasten.measure.worker import RecipeJob
from hasten.progress import SilentProgress
from hasten.recipe.build import job_of
from hasten.recipe.prepared_data import prepare_data
from hasten.recipe.schema import load_recipe, recipe_from
from hasten.tune import learning_study
from hasten.tune.learning_study import learn
from hasten.tune.recipe_workers import RecipeWorkers
from hasten.tune.whole_trainings import RecipeTrainings
from sample_data import small

RECIPE = {
    "eval_data": 4,
    "cutoff_len": 128,
    "max_steps": 8,
    "global_batch_size": 4,
    "learning_rate": 1e-3,
    "warmup_steps": 1,
}


def subject(folder: Path, **changes: Any) -> ExperimentSubject:
    values = small(folder, **{**RECIPE, "output": str(folder), **changes})
    return prepared(recipe_from(values, "test"), SilentProgress())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("learning")


@pytest.fixture(scope="module")
def given(folder: Path) -> ExperimentSubject:
    return subject(folder)


@pytest.mark.slow
def test_the_space_holds_the_recipes_own_values_where_it_starts(given: ExperimentSubject) -> None:
    found = RecipeTrainings(given)
    settings = found.space.settings(found.space.start)
    assert settings == {"learning_rate": 1e-3, "warmup_share": 1 / 8, "global_batch_size": 4}
    by_name = {d.name: d.values for d in found.space.dimensions}
    assert by_name["learning_rate"][0] == pytest.approx(1e-3 / 8)
    assert by_name["learning_rate"][-1] == pytest.approx(8e-3)
    assert by_name["global_batch_size"] == (2, 4, 8)
    for values in by_name.values():
        assert list(values) == sorted(set(values))


def test_another_batch_trains_the_same_tokens(given: ExperimentSubject) -> None:
    found = RecipeTrainings(given)
    for batch, steps in ((2, 16), (4, 8), (8, 4)):
        changed = found.recipe_at(found.space.point({"global_batch_size": batch}))
        assert (changed.global_batch_size or 4, changed.max_steps) == (batch, steps)


def test_a_batch_that_whole_steps_dont_make_as_many_tokens_of_is_left_out(folder: Path) -> None:
    found = RecipeTrainings(subject(folder, max_steps=9))
    (batches,) = [d.values for d in found.space.dimensions if d.name == "global_batch_size"]
    assert batches == (2, 4)  # of 8 records four steps would be a ninth less


def test_warm_up_is_a_share_of_the_steps(given: ExperimentSubject) -> None:
    found = RecipeTrainings(given)
    share = found.space.settings(found.space.start)["warmup_share"]
    changed = found.recipe_at(found.space.point({"global_batch_size": 2, "warmup_share": share}))
    assert changed.warmup_steps == 2
    assert found.recipe_at(found.space.start).warmup_steps == 1


def test_a_training_that_ends_by_tokens_has_the_steps_of_its_own_order(folder: Path) -> None:
    given = subject(folder, max_steps=None, max_tokens=8000)
    found = RecipeTrainings(given)
    recipe = found.recipe_at(found.space.point({"global_batch_size": 2}))
    prepared_data = prepare_data(recipe, folder / "data")
    here = job_of(recipe, prepared_data, given.context, given.plan).schedule.total_steps
    assert found._steps_of(recipe) == here
    assert here > found._steps_of(given.recipe)


def test_only_narrows(given: ExperimentSubject) -> None:
    found = RecipeTrainings(given, ("learning_rate",))
    assert [d.name for d in found.space.dimensions] == ["learning_rate"]


def test_a_process_trains_as_the_same_session_here_does(
    given: ExperimentSubject, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = RecipeTrainings(given)
    found.looks = 2
    told: list[dict[str, Any]] = []
    real = RecipeWorkers.start

    def noting(workers: RecipeWorkers, plan: Plan, changes: dict[str, Any]) -> Any:
        told.append(changes)
        return real(workers, plan, changes)

    monkeypatch.setattr(RecipeWorkers, "start", noting)
    point = found.space.point({"learning_rate": 8e-3, "global_batch_size": 2})
    with found.opened(folder):
        process = found.begin(point, seed=5)
        losses = [process.loss_at(n, 200.0) for n in (1, 2)]
    (changes,) = told
    assert (changes["max_steps"], changes["seed"]) == (16, 5)
    recipe = load_recipe(folder / "recipe.yaml")
    recipe = recipe.model_copy(update={"plan": given.plan.to_list()})
    job = RecipeJob(recipe, changes, folder / "here")
    assert job.session.setup.job.seed == 5
    here = []
    for _ in range(2):
        job.handle("steps", {"count": 8})
        here.append(job.handle("evaluate", {})["eval_loss"])
    assert losses == pytest.approx(here, rel=1e-4)
    data = json.loads((folder / "data" / "index.json").read_text())
    assert prepare_data(given.recipe, folder / "data").note.key == given.data_key, data


class Pretended:
    """Losses that follow from the settings, without a process."""

    def __init__(self, job: RecipeTrainings, point: Any, seed: int) -> None:
        rate = job.space.settings(point).get("learning_rate", 1e-3)
        self.last = 3.0 + (0.2 if rate < 2e-3 else 0.0) + 0.001 * seed

    def loss_at(self, look: int, patience: float) -> float:
        return self.last + 1.0 / look

    def end(self, at_once: bool = False) -> None:
        pass


def test_a_recipe_is_studied_from_its_own_values_to_a_proven_recipe(
    given: ExperimentSubject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learning_study, "prepared", lambda recipe, audience: given)
    monkeypatch.setattr(RecipeTrainings, "begin", lambda self, p, seed: Pretended(self, p, seed))
    found = learn(given.recipe, 600, trials=12, fresh=True)
    assert found.better, str(found)
    assert "fresh seeds" in str(found)
    (found.folder / "x.yaml").write_text(found.text)
    recipe = load_recipe(found.folder / "x.yaml")
    assert recipe.learning_rate == found.settings["learning_rate"] > 2e-3
    assert recipe.seed == given.recipe.seed
    assert (found.folder / "best.yaml").read_text() == found.text
    assert "<svg" in (found.folder / "study.html").read_text()
    kept = json.loads((found.folder / "study.json").read_text())
    assert kept["study"] == "learning"
    assert kept["winner"]["ratio"]["low"] > 1
    again = learn(given.recipe, 600, trials=12)
    assert again.report == kept
    assert again.text == found.text


def test_where_nothing_is_better_the_recipe_stays(
    given: ExperimentSubject, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Flat(Pretended):
        def loss_at(self, look: int, patience: float) -> float:
            return 3.0 + 1.0 / look

    monkeypatch.setattr(learning_study, "prepared", lambda recipe, audience: given)
    monkeypatch.setattr(RecipeTrainings, "begin", lambda self, p, seed: Flat(self, p, seed))
    found = learn(given.recipe, 600, trials=4, fresh=True)
    assert not found.better
    assert "keep the values as they are" in str(found)
    (found.folder / "x.yaml").write_text(found.text)
    assert load_recipe(found.folder / "x.yaml").learning_rate == 1e-3


def test_bad_input_is_a_sentence(given: ExperimentSubject, folder: Path) -> None:
    with pytest.raises(InputError, match="no 'momentum' to learn"):
        learn(given.recipe, only=("momentum",))
    with pytest.raises(InputError, match="one other are 2"):
        learn(given.recipe, trials=1)
    with pytest.raises(InputError, match="hold some examples out"):
        RecipeTrainings(subject(folder, eval_data=0))
    with pytest.raises(InputError, match="too few to study"):
        RecipeTrainings(subject(folder, max_steps=2))
    with pytest.raises(InputError, match="can't read 'soon'"):
        learn(given.recipe, "soon")
    with pytest.raises(InputError, match="is no time"):
        learn(given.recipe, 0)
