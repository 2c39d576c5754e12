"""The processes that a tuner measures: what is told to real ones."""

from __future__ import annotations

from pathlib import Path

from hasten.core.plan import Plan
from hasten.recipe.schema import recipe_from
from hasten.run import ready
from hasten.search.tuner.runners import PlanRunner
from hasten.techniques.feed import Prefetched
from material import small


def test_a_plan_begins_again_with_the_first_record(tmp_path: Path) -> None:
    recipe = recipe_from(small(tmp_path, plan=[], max_steps=99, cutoff_len=512), "test")
    ready(recipe, lambda text: None)
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe.to_yaml())
    runner = PlanRunner(path, Plan([Prefetched(lookahead=4)]), {}, tmp_path / "log")
    try:
        runner.begin(600.0)
        runner.again()  # before the first step it is there already
        first = runner.steps(4, 60.0)
        runner.again()
        again, on = runner.steps(2, 60.0), runner.steps(2, 60.0)
        later = runner.steps(1, 60.0)
    finally:
        runner.end(at_once=True)
    items = [step.items for step in first]
    assert len(set(items)) == 4
    assert [step.items for step in (*again, *on)] == items
    assert later[0].items not in items
