"""Turns in slices, on a machine that is made up and of real processes."""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hasten.core.plan import Plan
from hasten.machine.processes import LoadMeter
from hasten.measure import schedule
from hasten.measure.schedule import SLICE_SECONDS, OutOfTimeError, Turn, VariantProcess, run_round
from hasten.measure.workers import WorkerError, WorkerPool, WorkerSpec
from hasten.recipe.build import prepare_run
from hasten.recipe.schema import recipe_from
from hasten.techniques.feed import Prefetched
from hasten.tune.bench import ReferencePair
from hasten.tune.space import Point
from sample_data import small
from tune.simulated import Machine, Simulated, of_values

SPACE = of_values({"batch": [1, 2, 4], "fused": [False, True]})
KILLED = "the process ended with code -9: killed, most likely for want of memory"


def unsteady(seed: int) -> Callable[[float], float]:
    """A machine that is up to twice as slow, for a second and a half at a time."""
    return lambda now: 1.0 + random.Random(f"{seed} {int(now / 1.5)}").random()


@pytest.mark.parametrize("ratio", [1.0, 0.4])
def test_turns_in_parts_share_what_slows_the_machine_within_a_step(ratio: float) -> None:
    off: dict[bool, list[float]] = {True: [], False: []}
    for parts, seed in itertools.product(off, range(10)):
        machine = Machine(
            SPACE, lambda s: ratio if s["fused"] else 1.0, slow=unsteady(seed), parts=parts
        )
        with ReferencePair(machine.start, SPACE.start, 2, steps=2, clock=machine.clock) as bench:
            bench.open(1e6)
            found = bench.measure((0, 1), 1e6, rounds=3)
        off[parts] += [log + math.log(ratio) for log in found.logs]
        assert machine.alive == 0
    inexact, exact = (statistics.fmean(x * x for x in off[parts]) ** 0.5 for parts in (False, True))
    assert exact < inexact / 2


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
    found = dict(run_round(variants, [1], random.Random(0), LoadMeter(2)))
    rates = [turn.rate for turn in found.values() if isinstance(turn, Turn)]
    assert sorted(rates) == pytest.approx([25.0, 100.0])
    who = [fused for fused, _ in notes]
    assert len(who) == 2 * round(1.0 / SLICE_SECONDS)
    assert who[::2] == [not w for w in who[1::2]]  # one slice of each
    assert who[1:-1:2] == who[2::2]  # the one who was last begins
    assert {seconds for fused, seconds in notes if fused} == {SLICE_SECONDS}
    assert {seconds for fused, seconds in notes if not fused} == {4 * SLICE_SECONDS}


def test_every_second_pass_has_the_order_backwards_and_a_failure_ends_its_own_turns_alone() -> None:
    machine = Machine(SPACE, lambda s: 1.0)
    points = SPACE.points()[:3]
    variants = {p: VariantProcess(machine.start(p), clock=machine.clock) for p in points}
    for variant in variants.values():
        variant.begin(1)
    turns = list(run_round(variants, [1, 2], random.Random(0), LoadMeter(2)))
    order = [point for point, _ in turns]
    assert set(order[:3]) == set(points)
    assert order[3:] == order[2::-1]
    assert [len(t.steps) for _, t in turns if isinstance(t, Turn)] == [1] * 3 + [2] * 3
    bad = order[1]
    machine.seconds = lambda s: 1e6 if s == SPACE.settings(bad) else 1.0
    turns = list(run_round(variants, [1, 1], random.Random(0), LoadMeter(2)))
    assert [point for point, _ in turns].count(bad) == 1
    assert [isinstance(t, WorkerError) for p, t in turns if p == bad] == [True]
    assert len(turns) == 5


class Brittle(Machine):
    """The fused one's process dies at the second part of its turn, or the start's beside it."""

    def __init__(self, victim: dict[str, Any]) -> None:
        super().__init__(SPACE, lambda s: 1.0, parts=True)
        self.victim, self.harm = victim, True

    def start(self, point: Point) -> Simulated:
        self.started.append(point)
        self.alive += 1
        settings = self.space.settings(point)
        return (Dying if settings == self.victim else Simulated)(self, settings)


class Dying(Simulated):
    machine: Brittle

    def run_for(self, seconds: float) -> dict[str, Any] | None:
        beside = any(self.machine.space.settings(p)["fused"] for p in self.machine.started)
        if self.machine.harm and beside and self.worked:
            raise WorkerError(KILLED)
        return super().run_for(seconds)


@pytest.mark.parametrize("seed", range(4))
def test_who_dies_within_its_turn_leaves_the_other_at_the_end_of_its_own(seed: int) -> None:
    fused = SPACE.point({"batch": 1, "fused": True})
    machine = Brittle(SPACE.settings(fused))
    with ReferencePair(
        machine.start, SPACE.start, 2, steps=2, seed=seed, clock=machine.clock
    ) as bench:
        bench.open(1e6)
        found = bench.measure(fused, 1e6)
        assert (found.state, found.why) == ("out of memory", KILLED)
        assert bench.measure((1, 0), 1e6).state == "ok"  # by the same start, with nothing to say
    assert machine.started.count(SPACE.start) == 1
    assert machine.alive == 0


@pytest.mark.parametrize("seed", range(4))
def test_of_a_start_that_dies_within_its_turn_it_is_said_and_another_is_started(seed: int) -> None:
    fused = SPACE.point({"batch": 1, "fused": True})
    machine = Brittle(SPACE.settings(SPACE.start))
    with ReferencePair(
        machine.start, SPACE.start, 2, steps=2, seed=seed, clock=machine.clock
    ) as bench:
        bench.open(1e6)
        assert bench.measure(fused, 1e6).why == f"the start's process failed beside it: {KILLED}"
        machine.harm = False
        assert bench.measure((1, 0), 1e6).state == "ok"
    assert machine.started.count(SPACE.start) == 2
    assert machine.alive == 0


@pytest.mark.parametrize("left", [8.05, 8.6, 9.3])
def test_time_that_ends_within_a_part_ends_both_and_the_next_one_has_its_own(left: float) -> None:
    machine = Machine(SPACE, lambda s: 1.0, parts=True)
    with ReferencePair(machine.start, SPACE.start, 2, steps=2, clock=machine.clock) as bench:
        bench.open(1e6)
        deadline = machine.clock.now + left
        with pytest.raises(OutOfTimeError):
            bench.measure((1, 0), deadline)
        assert machine.clock.now == pytest.approx(deadline)
        assert bench.measure((1, 0), 1e6).state == "ok"
    assert machine.alive == 0


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
