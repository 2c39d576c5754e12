"""A recipe's self-test finds a job that resumes well good, and a changed bit wherever it is."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from hasten.errors import FAILED, InputError
from hasten.machine.locks import only_run_in
from hasten.recipe.schema import Recipe, load_recipe
from hasten.training import fault_test as module
from hasten.training.fault_test import CheckFailedError, SelfTest, check_faults
from hasten.training.run import train
from sample_data import small


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "KILLS", 1)
    path = tmp_path / "recipe.yaml"
    path.write_text(Recipe(**small(tmp_path, plan=["packed"])).to_yaml())
    return path


@pytest.mark.slow
@pytest.mark.timeout(900)  # five processes start one after the other
def test_a_job_that_resumes_to_the_bit_passes_and_leaves_nothing(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check_faults(recipe, [], seed=5) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line[:17].split() for line in said[1:]] == [
        *(["ok", "undisturbed"], ["ok", "kills"]),
        *(["ok", "bit", "flip"], ["ok", "full", "disk"]),
    ]
    assert "killed after steps" in said[2]
    assert not (tmp_path / "run" / "faults").exists()


def test_a_resumed_run_that_differs_in_one_bit_is_told_with_the_step(
    recipe: Path, tmp_path: Path
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    test = SelfTest(load_recipe(recipe, []), place, random.Random(1))

    def here(output: Path, limit: int | None = None) -> str:
        train(load_recipe(output.with_suffix(".yaml")), tell=lambda text: None)
        return ""

    test._train = here  # type: ignore[method-assign]  # a process of its own takes seconds to start
    test.undisturbed()
    truth = test._truth
    assert truth is not None
    output = place / "undisturbed"
    test._compare(output)
    wrong = [*truth.losses]
    wrong[4] += 1e-12
    test._truth = replace(truth, losses=wrong)
    test._repeats = lambda: ""  # type: ignore[method-assign]
    with pytest.raises(CheckFailedError, match="loss of step 5 differs"):
        test._compare(output)
    name, content = next(iter(truth.model.items()))
    test._truth = replace(truth, model={name: content[:-1] + bytes([content[-1] ^ 1])})
    with pytest.raises(CheckFailedError, match="saved model differs in model"):
        test._compare(output)


def test_a_job_that_cannot_train_fails_at_once_and_what_happened_stays(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check_faults(recipe, ["max_examples=4", "eval_data=3", "cutoff_len=4"]) == FAILED
    said = capsys.readouterr().out
    assert "FAIL undisturbed" in said
    assert "exit code" in said
    assert (tmp_path / "run" / "faults").is_dir()


def test_a_folder_that_is_not_of_the_test_is_not_touched(recipe: Path, tmp_path: Path) -> None:
    mine = tmp_path / "run" / "faults"
    mine.mkdir(parents=True)
    (mine / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="move it away"):
        check_faults(recipe, [])
    assert (mine / "notes.txt").read_text() == "mine"


def test_two_self_tests_in_one_folder_do_not_meet(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with only_run_in(tmp_path / "run"), pytest.raises(InputError, match="in use by process"):
        check_faults(recipe, [])
    assert not (tmp_path / "run" / "faults").exists()
