"""Arms of real processes: records from the start, turns in slices, and who has whole ones."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hasten.core.plan import Plan
from hasten.machine.processes import LoadMeter
from hasten.measure import schedule
from hasten.measure.schedule import ArmProcess, Turn, run_round
from hasten.measure.workers import WorkerPool, WorkerSpec
from hasten.recipe.build import prepare_run
from hasten.recipe.schema import recipe_from
from hasten.techniques.feed import Prefetched
from sample_data import small

pytestmark = pytest.mark.waits


@pytest.fixture(scope="module")
def arms(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ArmProcess]]:
    """Two plans' processes, built."""
    folder = tmp_path_factory.mktemp("arms")
    recipe = recipe_from(small(folder, plan=[], max_steps=99, cutoff_len=256), "test")
    prepare_run(recipe, lambda text: None)
    path = folder / "recipe.yaml"
    path.write_text(recipe.to_yaml())
    plans = [Plan([Prefetched(lookahead=4)]), Plan([])]
    with WorkerPool(folder) as pool:
        found = []
        for place, plan in enumerate(plans):
            given = {"recipe": str(path), "plan": plan.to_list()}
            found.append(ArmProcess(pool.start(WorkerSpec("recipe", given), f"worker-{place}")))
        for arm in found:
            arm.begin(0)
        yield found


def records(arm: ArmProcess, count: int) -> list[int]:
    """The tokens of its next steps."""
    return [step["tokens"] for step in arm.whole_turn(count)["steps"]]


def test_a_plan_begins_again_with_the_first_record(arms: list[ArmProcess]) -> None:
    arm = arms[0]
    arm.again()  # before the first step it is there already
    first = records(arm, 4)
    arm.again()
    again, on, later = records(arm, 2), records(arm, 2), records(arm, 1)
    assert len(set(first)) == 4
    assert [*again, *on] == first
    assert later[0] not in first


def test_plans_take_their_turns_in_slices(
    arms: list[ArmProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each trains its own records, in seconds that add up to no more than those of the round."""
    monkeypatch.setattr(schedule, "SLICE_SECONDS", 0.02)
    arms[1].again()
    expected = records(arms[1], 4)
    for arm in arms:
        arm.again()
    began = time.perf_counter()
    turns = list(run_round(dict(enumerate(arms)), [1] * 4, random.Random(0), LoadMeter(2)))
    took = time.perf_counter() - began
    steps: dict[int, list[dict]] = {0: [], 1: []}
    for place, turn in turns:
        assert isinstance(turn, Turn)
        steps[place] += turn.steps
    for own in steps.values():
        assert [step["tokens"] for step in own] == expected
    seconds = [step["step_seconds"] for own in steps.values() for step in own]
    assert 0 < sum(seconds) <= took
    assert records(arms[0], 1) == records(arms[1], 1)


def test_workers_on_an_accelerator_and_loops_have_whole_turns(tmp_path: Path) -> None:
    with WorkerPool(tmp_path, "cuda") as pool:
        worker = pool.start(WorkerSpec("recipe", {"recipe": "none", "plan": []}), "worker")
        assert not worker.can_slice
        worker.close(kill=True)
    with WorkerPool(tmp_path) as pool:
        worker = pool.start(WorkerSpec("loop", {"target": "m:f"}, slices=False), "worker")
        assert not worker.can_slice
        worker.close(kill=True)
