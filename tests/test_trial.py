"""What an arm's process tells beside its steps, and that two of one plan get along."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hasten.core.plan import Plan
from hasten.measure.trial import ENTRY, Trial
from hasten.measure.trial_process import compiled
from hasten.recipe.prepare import ready
from hasten.recipe.schema import recipe_from
from hasten.techniques.checkpoint import Checkpoints
from material import STDLIB

TRAINING = ("-m", "hasten.tune.training", '{"seed": 7}')
RECIPE = {
    **STDLIB,
    "max_steps": 6,
    "global_batch_size": 2,
}


@pytest.mark.parametrize("entry", [ENTRY, TRAINING], ids=["arm", "training"])
def test_two_processes_of_a_plan_that_saves_train_side_by_side_and_leave_nothing(
    entry: tuple[str, ...], tmp_path: Path
) -> None:
    recipe = recipe_from({**RECIPE, "output": str(tmp_path / "out")}, "test")
    ready(recipe, lambda text: None)
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe.to_yaml())
    plan, logs = Plan([Checkpoints(interval=1)]), [tmp_path / "a.log", tmp_path / "b.log"]
    with Trial(path, plan, {}, logs[0], entry) as one, Trial(path, plan, {}, logs[1], entry) as two:
        assert one.answer()["ready"]
        assert two.answer()["ready"]
        found = [trial.ask("steps", count=2)["steps"] for trial in (one, two)]
        assert list((tmp_path / "out").glob("arm-*"))
    assert [step["loss"] for step in found[0]] == [step["loss"] for step in found[1]]
    assert not list((tmp_path / "out").glob("arm-*"))


def test_compiling_is_counted_and_timed() -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    before, spent = compiled()
    fast = torch.compile(double, backend="eager", dynamic=False)
    fast(torch.ones(3))
    once, longer = compiled()
    assert once == before + 1
    assert longer > spent
    fast(torch.ones(3))
    assert compiled() == (once, longer)  # nothing new
    fast(torch.ones(5))
    assert compiled()[0] == once + 1  # another shape, compiled again
