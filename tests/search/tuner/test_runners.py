"""The processes that a tuner measures: what is told to real ones."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hasten.core.plan import Plan
from hasten.measure import turns as turns_module
from hasten.measure.turns import Turns
from hasten.measure.workers import WorkerPool, WorkerSpec
from hasten.recipe.prepare import ready
from hasten.recipe.schema import recipe_from
from hasten.techniques.feed import Prefetched
from hasten.tune import runners as runners_module
from hasten.tune.runners import PlanRunner
from material import small

pytestmark = pytest.mark.waits


@pytest.fixture(scope="module")
def runners(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[PlanRunner]]:
    """Two plans' processes, built."""
    folder = tmp_path_factory.mktemp("runners")
    recipe = recipe_from(small(folder, plan=[], max_steps=99, cutoff_len=256), "test")
    ready(recipe, lambda text: None)
    path = folder / "recipe.yaml"
    path.write_text(recipe.to_yaml())
    plans = [Plan([Prefetched(lookahead=4)]), Plan([])]
    with WorkerPool(folder) as pool:
        found = []
        for place, plan in enumerate(plans):
            given = {"recipe": str(path), "plan": plan.to_list()}
            found.append(PlanRunner(pool.start(WorkerSpec("recipe", given), f"worker-{place}")))
        for runner in found:
            runner.begin(600.0)
        yield found
        for runner in found:
            runner.end(at_once=True)


def test_a_plan_begins_again_with_the_first_record(runners: list[PlanRunner]) -> None:
    runner = runners[0]
    runner.again()  # before the first step it is there already
    first = runner.steps(4, 60.0)
    runner.again()
    again, on = runner.steps(2, 60.0), runner.steps(2, 60.0)
    later = runner.steps(1, 60.0)
    items = [step.items for step in first]
    assert len(set(items)) == 4
    assert [step.items for step in (*again, *on)] == items
    assert later[0].items not in items


def test_plans_take_their_turns_abreast(
    runners: list[PlanRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each trains its own records, in seconds that add up to no more than those of the round."""
    monkeypatch.setattr(turns_module, "PART", 0.02)
    runners[1].again()
    records = [s.items for s in runners[1].steps(4, 60.0)]
    for runner in runners:
        runner.again()
    began = time.perf_counter()
    found = Turns(4, time.monotonic).round(runners, 4, time.monotonic() + 600.0, random.Random(0))
    took = time.perf_counter() - began
    assert len(found) == 4
    for place in range(2):
        assert [s.items for row in found for s in row[place]] == records
    seconds = [s.seconds for row in found for steps in row for s in steps]
    assert 0 < sum(seconds) <= took
    on = [runner.steps(1, 60.0)[0].items for runner in runners]
    assert on[0] == on[1]


class Halting:
    """A worker whose turn takes three parts: two of half a second and one of a quarter."""

    can_slice = True

    def __init__(self) -> None:
        self.now, self.left = 0.0, 1.25
        self.orders: list[tuple[str, dict[str, Any]]] = []

    def submit(self, op: str, **details: Any) -> None:
        self.orders.append((op, details))
        self.left = 1.25

    def run_for(self, seconds: float) -> dict[str, Any] | None:
        part = min(seconds, self.left)
        self.now, self.left = self.now + part, self.left - part
        steps = [{"tokens": n, "step_seconds": 9.0, "loss": 1.0} for n in (30, 20)]
        return None if self.left else {"steps": steps}

    def close(self, kill: bool = False) -> None: ...


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="processes can't be stopped")
def test_a_turn_in_parts_takes_as_long_as_its_parts_and_its_steps_have_one_rate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trial: Any = Halting()
    monkeypatch.setattr(runners_module.time, "perf_counter", lambda: trial.now)
    runner = PlanRunner(trial)
    assert runner.parts is runner
    for again in (True, False):
        if again:
            runner.again()
        runner.order(2)
        assert runner.go_on(0.5) is None
        trial.now += 100.0  # others' turns
        assert runner.go_on(0.5) is None
        found = runner.go_on(0.5)
        assert found is not None
        assert [(s.items, s.seconds) for s in found] == [(30, 0.75), (20, 0.5)]
        assert runner.pace == 0.625
    runner.end()
    assert trial.orders == [("steps", {"count": 2, "from_start": True}), ("steps", {"count": 2})]


def test_workers_on_an_accelerator_have_whole_turns(tmp_path: Path) -> None:
    with WorkerPool(tmp_path, "cuda") as pool:
        worker = pool.start(WorkerSpec("recipe", {"recipe": "none", "plan": []}), "worker")
        assert PlanRunner(worker).parts is None
        worker.close(kill=True)
