"""The exam that every wire takes on two ranks, and those with a memory of their own on four."""

from __future__ import annotations

import math
from typing import Any

import pytest

from contract.wire_exam_jobs import APART, CASES, ON_FOUR, WIRES
from ranks import on_ranks

every = [pytest.param(2, wire, id=f"2 ranks-{wire}") for wire in WIRES]
every += [pytest.param(4, wire, id=f"4 ranks-{wire}", marks=pytest.mark.long) for wire in ON_FOUR]
wires = pytest.mark.parametrize(("ranks", "wire"), every)
cases = pytest.mark.parametrize("case", CASES)
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return on_ranks("contract.wire_exam_jobs:two", tmp_path_factory.mktemp("two"), 2)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return on_ranks("contract.wire_exam_jobs:four", tmp_path_factory.mktemp("four"), 4)


@pytest.fixture
def found(request: pytest.FixtureRequest, ranks: int) -> list[Any]:
    """What each rank saw; either run has the time of a test of its own."""
    seen: list[Any] = request.getfixturevalue({2: "two", 4: "four"}[ranks])
    return seen


@cases
@wires
def test_replicas_are_the_same_and_learn(
    found: list[Any], ranks: int, wire: str, case: str
) -> None:
    seen = [rank[wire][case] for rank in found]
    assert len(seen) == ranks
    assert all(s["weights"] == seen[0]["weights"] for s in seen)
    assert -1.0 not in seen[0]["weights"]
    for rank in seen:
        assert rank["acted"], rank["said"]
        assert all(map(math.isfinite, rank["losses"]))
    # An epoch is two steps, each of other examples.
    assert sum(sum(s["losses"][-2:]) for s in seen) < sum(sum(s["losses"][:2]) for s in seen)


@wires
def test_a_gradient_that_is_infinite_on_one_rank_costs_one_step(
    found: list[Any], ranks: int, wire: str
) -> None:
    skipped = [rank[wire]["infinite"]["skipped"] for rank in found]
    assert skipped == [0] * (ranks - 1) + [1] if wire in APART else skipped == [1] * ranks


@wires
def test_a_loss_scale_that_overflows_is_lowered_until_steps_count(
    found: list[Any], ranks: int, wire: str
) -> None:
    skipped = [rank[wire]["overflow"]["skipped"] for rank in found]
    assert all(0 < s < CASES["overflow"].steps for s in skipped)
    assert len(set(skipped)) == 1 or wire in APART


@wires
def test_a_run_that_ended_goes_on_with_what_each_rank_remembered(
    found: list[Any], ranks: int, wire: str
) -> None:
    for rank in found:
        seen = rank[wire]["resumed"]
        assert seen["same"]
        assert seen["rest"] == pytest.approx(seen["whole"], rel=0.1 if wire in APART else 0.05)
        assert seen["weights"] == found[0][wire]["resumed"]["weights"]
    owed = sum(rank[wire]["resumed"]["remembered"] for rank in found)
    assert (owed > 0) == (wire not in ("half", *APART))
