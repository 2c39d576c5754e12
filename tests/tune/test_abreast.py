"""Turns in slices, on a machine that is made up and of real processes."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hasten.core.plan import Plan
from hasten.machine.processes import LoadMeter
from hasten.measure import schedule
from hasten.measure.schedule import SLICE_SECONDS, Turn, VariantProcess, run_round
from hasten.measure.workers import WorkerError, WorkerPool, WorkerSpec
from hasten.recipe.build import prepare_run
from hasten.recipe.schema import recipe_from
from hasten.techniques.feed import Prefetched
from sample_data import small
from tune.simulated import Machine, Simulated, of_values

SPACE = of_values({"batch": [1, 2, 4], "fused": [False, True]})


class Noting(Simulated):
    """Notes who works, and for how long at most."""

    notes: list[tuple[bool, float]]

    def run_for(self, seconds: float) -> dict[str, Any] | None:
        self.notes.append((self.settings["fused"], seconds))
        return super().run_for(seconds)


def test_slices_go_to_and_fro_and_are_the_longer_the_slower_one_is() -> None:
    machine = Machine(SPACE, lambda s: 1.0 if s["fused"] else 4.0, parts=True)
    notes = Noting.notes = []
    variants = {}
    for fused in (True, False):
        variants[fused] = VariantProcess(
            Noting(machine, {"batch": 1, "fused": fused}), clock=machine.clock
        )
        variants[fused].begin(2)
    found = dict(run_round(variants, 1, random.Random(0), LoadMeter(2)))
    seconds = [turn.steps[0]["step_seconds"] for turn in found.values() if isinstance(turn, Turn)]
    assert sorted(seconds) == pytest.approx([1.0, 4.0])
    who = [fused for fused, _ in notes]
    assert len(who) == 2 * round(1.0 / SLICE_SECONDS)
    assert who[::2] == [not w for w in who[1::2]]  # one slice of each
    assert who[1:-1:2] == who[2::2]  # the one who was last begins
    assert {seconds for fused, seconds in notes if fused} == {SLICE_SECONDS}
    assert {seconds for fused, seconds in notes if not fused} == {4 * SLICE_SECONDS}


def test_a_failure_ends_its_own_turn_alone() -> None:
    machine = Machine(SPACE, lambda s: 1.0)
    points = SPACE.points()[:3]
    variants = {p: VariantProcess(machine.start(p), clock=machine.clock) for p in points}
    for variant in variants.values():
        variant.begin(1)
    turns = dict(run_round(variants, 2, random.Random(0), LoadMeter(2)))
    assert set(turns) == set(points)
    assert all(isinstance(turn, Turn) and len(turn.steps) == 2 for turn in turns.values())
    bad = points[1]
    machine.seconds = lambda s: 1e6 if s == SPACE.settings(bad) else 1.0
    turns = dict(run_round(variants, 1, random.Random(0), LoadMeter(2)))
    assert {p: isinstance(t, WorkerError) for p, t in turns.items()} == {
        p: p == bad for p in points
    }


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


def test_plans_take_their_turns_in_slices(
    variants: list[VariantProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each trains its own records, in seconds that add up to no more than those of the round."""
    monkeypatch.setattr(schedule, "SLICE_SECONDS", 0.02)
    processes, draw, load = dict(enumerate(variants)), random.Random(0), LoadMeter(2)
    began = time.perf_counter()
    turns = [turn for _ in range(4) for turn in run_round(processes, 1, draw, load)]
    took = time.perf_counter() - began
    steps: dict[int, list[dict]] = {0: [], 1: []}
    for place, turn in turns:
        assert isinstance(turn, Turn)
        steps[place] += turn.steps
    tokens = [[step["tokens"] for step in own] for own in steps.values()]
    assert tokens[0] == tokens[1]
    assert len(set(tokens[0])) == 4
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
