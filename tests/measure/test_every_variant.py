"""A budget that leaves no variant out: on any machine all rows, with fewer rounds and steps."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hasten.cli.demo import DESIGN, TECHNIQUES
from hasten.core.plan import Plan
from hasten.measure.ablation import plans_of
from hasten.measure.budget import GRACE
from hasten.recipe.shorthands import catalogue
from hasten.report.build import report_of
from hasten.report.schema import read_report
from measure.machines import Machine, measured_on

PLANS, KINDS = plans_of(Plan.from_list(TECHNIQUES, catalogue()), "cumulative")
BUDGET = DESIGN.budget_seconds or 0.0
HEAD: dict[str, Any] = {"title": "t", "command": "c", "hardware": {}, "versions": {}}


def cumulative(baseline: float, gain: float = 1.3) -> Any:
    """Seconds of a step: each technique makes it faster by that factor."""
    return lambda techniques: baseline / gain**techniques


def rows(machine: Machine, memory: int = 10_000) -> dict[str, int]:
    """Rounds of each row that the report shows."""
    found, events = measured_on(machine, PLANS, KINDS, DESIGN, memory)
    report = read_report(report_of(found.variants, recipe={"seed": 0}, design=found.design, **HEAD))
    assert not any(e["event"] == "dropped" for e in events), events
    assert [variant["name"] for variant in report["variants"]] == list(PLANS)
    for variant in report["variants"]:
        assert variant["ratio"]["median"] is not None
        assert variant["verdict"] in ("baseline", "helped", "undecided", "no effect", "hurt") or (
            variant["verdict"].startswith("undecided")
        )
    return {variant["name"]: len(variant["rounds"]) for variant in report["variants"]}


@pytest.mark.parametrize("gain", [1.0, 1.3, 2.0])
@pytest.mark.parametrize("step", [0.05, 0.5, 1.0, 2.0, 4.0, 7.0, 10.0])
def test_all_seven_rows_come_on_any_machine(step: float, gain: float) -> None:
    machine = Machine(cumulative(step, gain), start_seconds=1 + step / 4, first_step=1.5)
    found = rows(machine)
    assert len(found) == 7
    assert len(set(found.values())) == 1
    assert machine.now <= BUDGET * (1 + GRACE)


def test_a_slow_machine_has_fewer_rounds_and_never_fewer_rows() -> None:
    counts = []
    for step in (0.2, 1.5, 3.0, 8.0):
        machine = Machine(cumulative(step))
        counts.append(next(iter(rows(machine).values())))
    assert counts[0] == DESIGN.rounds
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] >= 1


def test_where_a_round_of_all_rows_takes_20_seconds_there_are_several() -> None:
    step = 20 / DESIGN.steps / sum(1 / 1.3**n for n in range(7))
    assert set(rows(Machine(cumulative(step))).values()) <= set(range(5, DESIGN.rounds + 1))


def test_where_every_turn_takes_20_seconds_turns_are_shortened_first() -> None:
    machine = Machine(lambda techniques: 20 / DESIGN.steps)
    found, _ = measured_on(machine, PLANS, KINDS, DESIGN)
    assert found.design["steps"] == 1
    assert {len(variant.rounds) for variant in found.variants} == {found.design["rounds"]}
    assert found.design["rounds"] >= 2
    assert len(found.variants) == 7
    # and there was time to compare quality
    assert all(variant.eval_data for variant in found.variants)


@pytest.mark.parametrize("slower", [1.5, 3.0])
def test_a_machine_that_becomes_slower_after_the_start_still_shows_all_rows(slower: float) -> None:
    machine = Machine(cumulative(2.0), slows=lambda now: slower if now > 60 else 1.0)
    assert len(rows(machine)) == 7


def test_a_first_step_that_takes_long_is_not_taken_for_a_slow_machine() -> None:
    machine = Machine(cumulative(0.5), first_step=12.0)
    found, _ = measured_on(machine, PLANS, KINDS, DESIGN)
    assert found.design["steps"] == DESIGN.steps
    assert found.design["rounds"] == DESIGN.rounds


def test_the_imports_of_the_first_process_are_not_taken_for_those_of_all() -> None:
    machine = Machine(cumulative(7.0), import_seconds=70.0)
    assert len(rows(machine)) == 7


@pytest.mark.parametrize("memory", [350, 250, 150])
@pytest.mark.parametrize("step", [0.3, 1.0])
def test_variants_that_memory_does_not_hold_together_come_one_after_the_other(
    memory: int, step: float
) -> None:
    """As on a GPU, whose workers can't be stopped within a request."""
    machine = Machine(cumulative(step), start_seconds=6.0, cuts=False)
    found = rows(machine, memory)
    assert len(found) == 7
    assert min(found.values()) >= 1
    assert machine.most_alive <= max(memory // 100, 1)
    assert machine.now <= BUDGET * (1 + GRACE)


def test_a_variant_that_fails_keeps_its_row() -> None:
    machine = Machine(cumulative(0.5), fails={3: "no memory"})
    found, _ = measured_on(machine, PLANS, KINDS, DESIGN)
    assert [variant.failed for variant in found.variants].count("no memory") == 1
    assert sum(bool(variant.rounds) for variant in found.variants) == 6


def test_where_two_rounds_of_two_variants_do_not_fit_nothing_is_measured_and_it_is_said() -> None:
    machine = Machine(lambda techniques: 60.0)
    found, _ = measured_on(machine, PLANS, KINDS, DESIGN)
    assert not any(variant.rounds for variant in found.variants)
    (why,) = found.design["dropped"]
    assert why.startswith("two rounds of the baseline and the whole plan take about ")
    assert machine.now < BUDGET  # it is known after two starts


def test_what_is_hopeless_does_not_fit_into_the_budget_and_its_grace() -> None:
    """Two rounds of the usual turns, of the baseline and the whole plan."""
    for step in (3.0, 6.0, 9.0, 12.0, 15.0, 20.0, 30.0):
        machine = Machine(lambda techniques, step=step: step, start_seconds=step)
        found, _ = measured_on(machine, PLANS, KINDS, DESIGN)
        began = 2 * (2 * step)  # two starts and warm-ups
        two = 2 * 2 * DESIGN.steps * step
        if began + two <= BUDGET:
            assert all(variant.rounds for variant in found.variants), step
        if any(text.startswith("two rounds") for text in found.design["dropped"]):
            assert began + two > BUDGET


def test_a_machine_that_stops_in_the_first_round_says_that_no_round_ended() -> None:
    machine = Machine(cumulative(1.0), slows=lambda now: 1e4 if now > 12 else 1.0)
    found, _ = measured_on(machine, PLANS, KINDS, DESIGN)
    assert not any(variant.rounds for variant in found.variants)
    assert found.design["dropped"][0].startswith("not a single round of all variants ended within")
    assert math.isclose(machine.now, BUDGET * (1 + GRACE), rel_tol=0.1)
