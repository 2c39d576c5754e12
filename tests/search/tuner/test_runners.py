"""The processes that a tuner measures: what is told to real ones."""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

import pytest

from hasten.core.plan import Plan
from hasten.recipe.schema import recipe_from
from hasten.run import ready
from hasten.search.tuner.runners import PlanRunner
from hasten.search.tuner.turns import Turns
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


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked")
def test_plans_take_their_turns_abreast(tmp_path: Path) -> None:
    """Each trains its own records, in seconds that add up to those of the round."""
    recipe = recipe_from(small(tmp_path, plan=[], max_steps=99, cutoff_len=512), "test")
    ready(recipe, lambda text: None)
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe.to_yaml())
    plans = [Plan([]), Plan([Prefetched(lookahead=4)])]
    runners = [
        PlanRunner(path, plan, {}, tmp_path / f"log-{place}", stoppable=True)
        for place, plan in enumerate(plans)
    ]
    turns = Turns(4, time.monotonic)
    deadline = time.monotonic() + 600.0
    try:
        for runner in runners:
            runner.begin(600.0)
            runner.again()
        records = [s.items for s in runners[0].steps(4, 60.0)]
        runners[0].again()
        began = time.perf_counter()
        found = turns.round(runners, 4, deadline, random.Random(0))
        took = time.perf_counter() - began
        on = [runner.steps(1, 60.0)[0].items for runner in runners]
    finally:
        for runner in runners:
            runner.end(at_once=True)
    assert len(found) == 4
    for place in range(2):
        assert [s.items for row in found for s in row[place]] == records
    seconds = [s.seconds for row in found for steps in row for s in steps]
    assert 0 < sum(seconds) <= took
    assert on[0] == on[1]


def test_ranks_that_wait_for_a_link_and_what_is_not_called_stoppable_have_whole_turns(
    tmp_path: Path,
) -> None:
    for ranks, stoppable in ((2, True), (1, False)):
        runner = PlanRunner(tmp_path, Plan([]), {}, tmp_path / "l", ranks, stoppable=stoppable)
        runner.end(at_once=True)
        assert runner.parts is None
