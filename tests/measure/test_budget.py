"""What a budget allows, what it leaves out first, and that it leaves out no variant."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hasten.cli.demo import DESIGN, TECHNIQUES
from hasten.core.plan import Plan
from hasten.errors import InputError
from hasten.measure.ablation import plans_of
from hasten.measure.budget import GRACE, rounded_up
from hasten.recipe.shorthands import catalogue
from hasten.recipe.yaml_reader import read_duration
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
@pytest.mark.parametrize("step", [0.05, 0.5, 1.0, 2.0, 3.0])
def test_all_seven_rows_come_while_two_short_rounds_of_them_fit(step: float, gain: float) -> None:
    machine = Machine(cumulative(step, gain), start_seconds=1 + step / 4, first_step=1.5)
    found = rows(machine)
    assert len(found) == 7
    assert len(set(found.values())) == 1
    assert machine.now <= BUDGET * (1 + GRACE)


def test_a_slow_machine_has_fewer_rounds_before_it_has_fewer_rows() -> None:
    counts = []
    for step in (0.2, 1.5, 3.0, 4.0):
        found, _ = measured_on(Machine(cumulative(step)), PLANS, KINDS, DESIGN)
        assert len(found.variants) == 7
        counts.append(found.design["rounds"] * found.design["steps"])
    assert counts[0] == DESIGN.rounds * DESIGN.steps
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] >= 1


def test_where_a_round_of_all_rows_takes_20_seconds_there_are_several() -> None:
    step = 20 / DESIGN.steps / sum(1 / 1.3**n for n in range(7))
    assert set(rows(Machine(cumulative(step))).values()) <= set(range(5, DESIGN.rounds + 1))


def test_where_every_turn_takes_10_seconds_turns_are_shortened_first() -> None:
    machine = Machine(lambda techniques: 10 / DESIGN.steps)
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
    machine = Machine(cumulative(2.0), import_seconds=70.0)
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


@pytest.mark.parametrize("step", [6.0, 10.0, 15.0, 30.0])
def test_rows_without_time_are_named_and_those_that_stay_have_rounds(step: float) -> None:
    machine = Machine(lambda techniques: step, start_seconds=step)
    found, _ = measured_on(machine, PLANS, KINDS, DESIGN)
    left_out = [name for name in PLANS if f"{name}: no time for it" in found.design["dropped"]]
    assert left_out
    assert [v.plan for v in found.variants] == [PLANS[n] for n in PLANS if n not in left_out]
    assert {next(iter(PLANS)), list(PLANS)[-1]}.isdisjoint(left_out)
    assert all(variant.rounds for variant in found.variants)
    assert machine.now <= BUDGET * (1 + GRACE)


def test_a_machine_that_stops_in_the_first_round_leaves_a_baseline_without_rounds() -> None:
    machine = Machine(cumulative(1.0), slows=lambda now: 1e4 if now > 12 else 1.0)
    found, _ = measured_on(machine, PLANS, KINDS, DESIGN)
    assert [(variant.name, variant.rounds) for variant in found.variants] == [("baseline", [])]
    assert math.isclose(machine.now, BUDGET * (1 + GRACE), rel_tol=0.1)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("20m", 1200), ("2h", 7200), ("1h30m", 5400), ("1.5 h", 5400), ("45", 45)],
)
def test_a_budget_is_written_as_people_write_times(text: str, seconds: float) -> None:
    assert read_duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "m", "-5m", "20x", "soon", "1..2h", "0s", "1h nonsense", "inf"]
)
def test_a_budget_that_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="budget"):
        read_duration(text)


@given(st.integers(1, 10**6))
def test_whole_seconds_are_read_as_they_are(seconds: int) -> None:
    assert read_duration(f"{seconds}s") == seconds


def test_a_time_needed_is_never_rounded_down() -> None:
    assert [rounded_up(s) for s in (41.2, 90, 91, 3601)] == ["42 s", "90 s", "2 min", "1 h 01 min"]
