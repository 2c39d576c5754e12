"""What is learnt from failures: who is suspected, who is cleared, and what is tried next."""

from __future__ import annotations

import itertools

import pytest

from hasten.tune.samplers import ForecastProposer, PriorKnowledge, TriedPoint
from hasten.tune.space import Dimension, Point, Space, of_values
from hasten.tune.surrogate import Failures, blamed_choice

SWITCHES = of_values({name: [False, True] for name in "abcdef"})
ALL = (1,) * 6


def without(*names: str) -> Point:
    return tuple(int(name not in names) for name in "abcdef")


def only(*names: str) -> Point:
    return tuple(int(name in names) for name in "abcdef")


SLOTS = Space(
    (
        Dimension("COMPILE", ("none", "compiled")),
        Dimension("compiled.bucket", (128, 256), ordered=True, needs=("COMPILE", "compiled")),
        Dimension("LAYERS", ("none", "fused")),
        Dimension("LOSS", ("none", "chunked")),
    ),
    (0, 0, 0, 0),
)


@pytest.mark.parametrize(
    ("why", "name"),
    [
        ("plan: compiled: nothing is left to compile", "compiled"),
        ("compiled: nothing is left to compile", "compiled"),
        ("plan: packed: another one", None),  # not a choice of this point
        ("RuntimeError: shapes differ", None),
        ("the process ended with code 1", None),
        ("", None),
        (None, None),
    ],
)
def test_a_message_that_begins_with_a_choice_blames_it(why: str | None, name: str | None) -> None:
    assert blamed_choice(why, {"COMPILE": "compiled", "LAYERS": "none", "COLLATE": 128}) == name


def test_before_any_failure_nothing_is_expected_to_fail() -> None:
    assert Failures(SWITCHES).chances(SWITCHES.points()).max() == 0.0


def test_what_failed_fails_again_and_the_start_never() -> None:
    found = Failures(SWITCHES)
    found.failed(ALL, None)
    again, start = found.chances([ALL, SWITCHES.start])
    assert again == pytest.approx(1.0)
    assert start == 0.0


def test_the_fewer_choices_are_shared_the_smaller_is_the_chance() -> None:
    found = Failures(SWITCHES)
    found.failed(ALL, None)
    chances = found.chances([without(*"abcdef"[:n]) for n in range(7)])
    assert all(more > less for more, less in itertools.pairwise(chances))


def test_without_the_one_that_is_named_there_is_no_risk() -> None:
    found = Failures(SLOTS)
    found.failed((1, 1, 1, 1), "compiled")
    lone, beside_one, beside_all, without_it = found.chances(
        [(1, 0, 0, 0), (1, 0, 1, 0), (1, 1, 1, 1), (0, 0, 1, 1)]
    )
    assert without_it == 0.0
    assert 0 < lone < beside_one < beside_all == pytest.approx(1.0)


def test_who_worked_elsewhere_is_cleared() -> None:
    found = Failures(SLOTS)
    found.failed((1, 0, 1, 0), "compiled")
    found.worked((1, 0, 0, 1))  # compiled by itself works, so it is the pair
    alone, pair = found.chances([(1, 0, 0, 0), (1, 0, 1, 1)])
    assert alone == 0.0
    assert pair == pytest.approx(1.0)


def test_a_knob_is_shared_under_its_own_technique_alone() -> None:
    """At index 0 it stands in every point, whether it matters there or not."""
    found = Failures(Space(SLOTS.dimensions, (1, 1, 0, 0)))  # compiled with the other bucket
    found.failed((1, 0, 0, 0), None)
    elsewhere, same = found.chances([(0, 0, 1, 0), (1, 0, 1, 0)])
    assert elsewhere == 0.0
    assert same == pytest.approx(1.0)


def test_when_all_are_cleared_the_failure_was_an_accident() -> None:
    found = Failures(SWITCHES)
    found.failed(only("a", "b"), None)
    found.worked(only("a", "b", "c"))
    assert found.chances([only("a", "b", "d")])[0] == 0.0


@pytest.mark.parametrize("culprit", "abcdef")
def test_a_single_culprit_is_found_by_what_still_fails(culprit: str) -> None:
    """Every other switch gains 10 %: the best point has all but the one with which a run fails."""
    own = ForecastProposer(
        SWITCHES, PriorKnowledge(gain=lambda p: 0.1 * sum(p), noise=0.01), seed=1
    )
    own.tell(TriedPoint(SWITCHES.start, "ok", 0.0))
    tried: list[Point] = []
    while without(culprit) not in tried:
        assert len(tried) < 10
        point = own.ask()
        assert point is not None
        tried.append(point)
        fails = point["abcdef".index(culprit)]
        own.tell(
            TriedPoint(point, "failed") if fails else TriedPoint(point, "ok", 0.1 * sum(point))
        )


def test_a_failure_does_not_discredit_the_forecast() -> None:
    """The first trial fails for one technique; the next is the forecast's best without it."""
    gains = {(1, 0): 0.01, (1, 1): 0.02, (2, 1): 0.5, (3, 1): 0.2}

    def gain(point: Point) -> float:
        return sum(gains.get((i, v), 0.0) for i, v in enumerate(point)) + 0.3 * point[0]

    own = ForecastProposer(SLOTS, PriorKnowledge(gain=gain))
    own.tell(TriedPoint(SLOTS.start, "ok", 0.0))
    first = own.ask()
    assert first == (1, 1, 1, 1)
    own.tell(TriedPoint(first, "failed", blamed="compiled"))
    assert own.ask() == (0, 0, 1, 1)
