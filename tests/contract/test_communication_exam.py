"""The exam that every communication takes on two ranks, and those with a memory of their own on
four.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

from contract.communication_exam_jobs import APART, CASES, COMMUNICATIONS, ON_FOUR
from ranks import on_ranks

every = [
    pytest.param(2, communication, id=f"2 ranks-{communication}")
    for communication in COMMUNICATIONS
]
every += [
    pytest.param(4, communication, id=f"4 ranks-{communication}", marks=pytest.mark.long)
    for communication in ON_FOUR
]
communications = pytest.mark.parametrize(("ranks", "communication"), every)
cases = pytest.mark.parametrize("case", CASES)
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return on_ranks("contract.communication_exam_jobs:two", tmp_path_factory.mktemp("two"), 2)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return on_ranks("contract.communication_exam_jobs:four", tmp_path_factory.mktemp("four"), 4)


@pytest.fixture
def found(request: pytest.FixtureRequest, ranks: int) -> list[Any]:
    """What each rank saw; either run has the time of a test of its own."""
    seen: list[Any] = request.getfixturevalue({2: "two", 4: "four"}[ranks])
    return seen


@cases
@communications
def test_replicas_are_the_same_and_learn(
    found: list[Any], ranks: int, communication: str, case: str
) -> None:
    seen = [rank[communication][case] for rank in found]
    assert len(seen) == ranks
    assert all(s["weights"] == seen[0]["weights"] for s in seen)
    assert -1.0 not in seen[0]["weights"]
    for rank in seen:
        assert rank["effective"], rank["said"]
        assert all(map(math.isfinite, rank["losses"]))
    # An epoch is two steps, each of other examples.
    assert sum(sum(s["losses"][-2:]) for s in seen) < sum(sum(s["losses"][:2]) for s in seen)


@communications
def test_a_gradient_that_is_infinite_on_one_rank_costs_one_step(
    found: list[Any], ranks: int, communication: str
) -> None:
    skipped = [rank[communication]["infinite"]["skipped"] for rank in found]
    assert skipped == [0] * (ranks - 1) + [1] if communication in APART else skipped == [1] * ranks


@communications
def test_a_loss_scale_that_overflows_is_lowered_until_steps_count(
    found: list[Any], ranks: int, communication: str
) -> None:
    skipped = [rank[communication]["overflow"]["skipped"] for rank in found]
    assert all(0 < s < CASES["overflow"].steps for s in skipped)
    assert len(set(skipped)) == 1 or communication in APART


@communications
def test_a_run_that_ended_goes_on_with_what_each_rank_remembered(
    found: list[Any], ranks: int, communication: str
) -> None:
    for rank in found:
        seen = rank[communication]["resumed"]
        assert seen["same"]
        assert seen["rest"] == pytest.approx(
            seen["whole"], rel=0.1 if communication in APART else 0.05
        )
        assert seen["weights"] == found[0][communication]["resumed"]["weights"]
    owed = sum(rank[communication]["resumed"]["remembered"] for rank in found)
    assert (owed > 0) == (communication not in ("half", *APART))
