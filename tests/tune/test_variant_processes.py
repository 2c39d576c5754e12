"""Variants of real processes: records from the start, turns in slices, and who has whole ones."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hasten.core.plan import Plan
from hasten.machine.processes import LoadMeter
from hasten.measure import schedule
from hasten.measure.schedule import Turn, VariantProcess, run_round
from hasten.measure.workers import WorkerPool, WorkerSpec
from hasten.recipe.build import prepare_run
from hasten.recipe.schema import recipe_from
from hasten.techniques.feed import Prefetched
from sample_data import small

pytestmark = pytest.mark.waits


@pytest.fixture(scope="module")
def variants(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[VariantProcess]]:
    """Two plans' processes, built."""
    folder = tmp_path_factory.mktemp("variants")
    recipe = recipe_from(small(folder, plan=[], max_steps=99, cutoff_len=256), "test")
    prepare_run(recipe, lambda text: None)
    path = folder / "recipe.yaml"
    path.write_text(recipe.to_yaml())
    plans = [Plan([Prefetched(lookahead=4)]), Plan([])]
    with WorkerPool(folder) as pool:
        found = []
        for place, plan in enumerate(plans):
            given = {"recipe": str(path), "plan": plan.to_list()}
            found.append(VariantProcess(pool.start(WorkerSpec("recipe", given), f"worker-{place}")))
        for variant in found:
            variant.begin(0)
        yield found


def records(variant: VariantProcess, count: int) -> list[int]:
    """The tokens of its next steps."""
    return [step["tokens"] for step in variant.whole_turn(count)["steps"]]


def test_a_plan_begins_again_with_the_first_record(variants: list[VariantProcess]) -> None:
    variant = variants[0]
    variant.again()  # before the first step it is there already
    first = records(variant, 4)
    variant.again()
    again, on, later = records(variant, 2), records(variant, 2), records(variant, 1)
    assert len(set(first)) == 4
    assert [*again, *on] == first
    assert later[0] not in first


def test_plans_take_their_turns_in_slices(
    variants: list[VariantProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each trains its own records, in seconds that add up to no more than those of the round."""
    monkeypatch.setattr(schedule, "SLICE_SECONDS", 0.02)
    variants[1].again()
    expected = records(variants[1], 4)
    for variant in variants:
        variant.again()
    began = time.perf_counter()
    turns = list(run_round(dict(enumerate(variants)), [1] * 4, random.Random(0), LoadMeter(2)))
    took = time.perf_counter() - began
    steps: dict[int, list[dict]] = {0: [], 1: []}
    for place, turn in turns:
        assert isinstance(turn, Turn)
        steps[place] += turn.steps
    for own in steps.values():
        assert [step["tokens"] for step in own] == expected
    seconds = [step["step_seconds"] for own in steps.values() for step in own]
    assert 0 < sum(seconds) <= took
    assert records(variants[0], 1) == records(variants[1], 1)


def test_workers_on_an_accelerator_and_loops_have_whole_turns(tmp_path: Path) -> None:
    with WorkerPool(tmp_path, "cuda") as pool:
        worker = pool.start(WorkerSpec("recipe", {"recipe": "none", "plan": []}), "worker")
        assert not worker.can_slice
        worker.close(kill=True)
    with WorkerPool(tmp_path) as pool:
        worker = pool.start(WorkerSpec("loop", {"target": "m:f"}, slices=False), "worker")
        assert not worker.can_slice
        worker.close(kill=True)
