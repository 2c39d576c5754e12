"""The rule of the margin against planted truths, scipy's formula by hand, and its own advice."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hasten.errors import InputError
from hasten.measure.significance import non_inferiority


def test_the_upper_end_is_students_by_hand() -> None:
    without, with_ = [2.0, 2.1, 1.9, 2.2], [2.01, 2.12, 1.9, 2.19]
    logs = [math.log(b / a) for a, b in zip(without, with_, strict=True)]
    half = 2.353363 * statistics.stdev(logs) / 2  # t(0.95, 3), from a table
    found = non_inferiority(without, with_, 0.01)
    assert found.upper == pytest.approx(math.exp(statistics.fmean(logs) + half), rel=1e-6)


@pytest.mark.parametrize(
    ("change", "word"), [(-0.05, "not worse"), (0.0, "not worse"), (0.05, "worse")]
)
def test_a_clear_truth_is_told(change: float, word: str) -> None:
    draw = random.Random(1)
    without = [2 + draw.gauss(0, 0.1) for _ in range(6)]
    with_ = [v * math.exp(change + draw.gauss(0, 0.003)) for v in without]
    assert non_inferiority(without, with_, 0.01).verdict == word


def test_a_technique_at_the_margin_is_called_not_worse_in_one_of_twenty_at_most() -> None:
    draw, wrong, tries = random.Random(2), 0, 1500
    for _ in range(tries):
        with_ = [1.01 * math.exp(draw.gauss(0, 0.01)) for _ in range(5)]
        wrong += non_inferiority([1.0] * 5, with_, 0.01).verdict == "not worse"
    assert wrong / tries < 0.065


def test_too_few_seeds_are_told_how_many_more() -> None:
    found = non_inferiority([2.0, 2.0, 2.0], [2.02, 1.98, 2.0], 0.01)
    assert found.verdict == "undecided"
    assert found.more is not None
    assert found.more > 0


def test_one_pair_says_nothing() -> None:
    found = non_inferiority([2.0], [1.0], 0.01)
    assert (found.verdict, found.upper) == ("undecided", math.inf)


losses = st.floats(0.01, 20)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(losses, losses), min_size=2, max_size=8), st.floats(0.001, 0.5))
def test_the_verdict_follows_from_the_interval(
    pairs: list[tuple[float, float]], margin: float
) -> None:
    found = non_inferiority([a for a, _ in pairs], [b for _, b in pairs], margin)
    assert found.upper >= found.ratio * (1 - 1e-12)
    assert (found.verdict == "not worse") == (math.log(found.upper) < math.log1p(margin))


@pytest.mark.parametrize(
    ("without", "with_", "margin"),
    [([], [], 0.01), ([1.0], [1.0, 2.0], 0.01), ([1.0], [math.nan], 0.01), ([1.0], [1.0], 0.0)],
)
def test_impossible_input_is_refused(
    without: list[float], with_: list[float], margin: float
) -> None:
    with pytest.raises(InputError):
        non_inferiority(without, with_, margin)
