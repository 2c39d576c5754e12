"""What a budget allows, and what it leaves out first."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hasten.errors import InputError
from hasten.measure.ablation import Kind
from hasten.measure.budget import BudgetPlan, Costs, fit_to_budget, require_budget, rounded_up
from hasten.recipe.yaml_reader import read_duration

NAMES = ("baseline", "again", "only a", "only b", "without a", "without b", "all")
KINDS: dict[str, Kind] = dict(
    zip(
        NAMES,
        ("baseline", "again", "single", "single", "leave-one-out", "leave-one-out", "all"),
        strict=True,
    )
)
COSTS = Costs(start=10.0, turns=(2.0,), look=1.0, finish=3.0)


def rest_of(kept: Sequence[str], builds: int, rounds: int) -> float:
    return COSTS.of(len(kept), rounds, looks=2, to_start=len(kept), builds=builds)


def chosen(left: float, builds: int = 2, rounds: int = 8) -> BudgetPlan:
    return fit_to_budget(
        NAMES, KINDS, {"only a": 0.5, "only b": 0.1}, builds, rounds, rest_of, left
    )


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


def test_enough_time_drops_nothing() -> None:
    assert chosen(left=1e6) == BudgetPlan(NAMES, 8, 2, ())


def test_variants_are_left_out_in_the_order_that_is_written_down() -> None:
    full = rest_of(NAMES, 2, 5)
    dropped = []
    for left in range(int(full), 30, -1):
        now = [text for text, _ in chosen(left).dropped]
        assert now[: len(dropped)] == dropped  # less time never brings one back
        dropped = now
    assert dropped == [
        "without a: no time for it",
        "without b: no time for it",
        "second builds: no time for them",
        "only b: no time for it",  # forecast to gain less than a
        "only a: no time for it",
        "baseline again: no time for it".replace("baseline ", ""),
    ]


def test_variants_that_have_not_run_lie_between_those_that_have() -> None:
    """Of a cumulative baseline and result have run; their mean would drop rows for nothing."""
    costs = Costs(start=0.0, turns=(8.0, 2.0), look=0.0, finish=0.0)
    rounds = [costs.of(variants, rounds=1, looks=0, to_start=0) for variants in (1, 2, 5)]
    assert rounds == pytest.approx([5.0, 10.0, 10.0 + 3 * 4.0])


@given(st.floats(40, 2000), st.integers(2, 30))
def test_what_is_chosen_fits_unless_nothing_is_left_to_drop(left: float, rounds: int) -> None:
    choice = chosen(left, rounds=rounds)
    assert {"baseline", "all"} <= set(choice.names)
    assert 2 <= choice.rounds <= rounds
    least = choice.names == ("baseline", "all") and choice.rounds == 2
    assert least or rest_of(choice.names, choice.builds, choice.rounds) <= left


def test_too_small_a_budget_names_the_time_needed() -> None:
    require_budget(60.0, spent=20.0, needed_seconds=40.0)
    with pytest.raises(InputError, match=r"60 s is too short: .* about 61 s"):
        require_budget(60.0, spent=20.0, needed_seconds=40.5)
