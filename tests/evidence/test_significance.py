"""p-values against scipy, Holm's correction against its definition and against simulation."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from hasten.errors import InputError
from hasten.measure.significance import (
    MOST_ROUNDS,
    holm,
    noise_floor,
    p_beyond,
    p_value,
    rounds_needed,
)
from hasten.measure.statistics import DOUBT, Interval, paired_ratio, verdict

RATIOS = st.lists(st.floats(min_value=0.5, max_value=2.0), min_size=2, max_size=12)
CHANCES = st.lists(st.floats(min_value=0, max_value=1), max_size=9)


def ratio_of(ratios: list[float]) -> Interval:
    return paired_ratio([1.0] * len(ratios), ratios)


def drawn(mean: float, sigma: float, rounds: int, seed: int = 0) -> list[float]:
    """Rounds with exactly this mean and deviation of their logarithms."""
    z = np.random.default_rng(seed).normal(size=rounds)
    z = (z - z.mean()) / z.std(ddof=1)
    return list(np.exp(mean + sigma * z))


def test_the_p_value_is_scipys_one_sample_test_of_the_logs() -> None:
    ratios = [1.02, 1.05, 0.99, 1.04, 1.01, 1.03]
    expected = stats.ttest_1samp(np.log(ratios), math.log(1.01)).pvalue
    assert p_value(ratios, 1.01) == pytest.approx(expected, rel=1e-9)


@given(ratios=RATIOS, edge=st.floats(min_value=0.5, max_value=2.0))
def test_a_p_value_and_the_interval_say_the_same(ratios: list[float], edge: float) -> None:
    ratio, p = ratio_of(ratios), p_value(ratios, edge)
    if abs(p - DOUBT) > 1e-6:
        assert (p < DOUBT) == (not ratio.low <= edge <= ratio.high)


@given(ratios=RATIOS, floor=st.sampled_from([0.0, 0.01, 0.05]))
def test_beyond_the_floor_means_that_the_interval_is(ratios: list[float], floor: float) -> None:
    ratio, p = ratio_of(ratios), p_beyond(ratios, floor)
    if abs(p - DOUBT) > 1e-6:
        assert (p < DOUBT) == (ratio.low > 1 + floor or ratio.high < 1 - floor)


def test_one_round_and_equal_rounds_have_the_p_values_of_common_sense() -> None:
    assert p_value([1.5], 1.0) == 1.0
    assert p_value([1.5, 1.5, 1.5], 1.0) == 0.0
    assert p_value([1.0, 1.0], 1.0) == 1.0
    assert p_beyond([1.5], 0.01) == 1.0
    assert p_beyond([1.005, 1.004], 0.01) == 1.0


@pytest.mark.parametrize("edge", [0.0, -1.0, math.nan, math.inf])
def test_an_edge_that_is_no_ratio_is_rejected(edge: float) -> None:
    with pytest.raises(InputError, match="tested against"):
        p_value([1.0, 1.1], edge)


def test_holm_multiplies_the_smallest_by_their_number_and_steps_down() -> None:
    assert holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([0.03]) == [0.03]
    assert holm([]) == []
    with pytest.raises(InputError, match="p-value"):
        holm([math.nan])


@given(p=CHANCES)
def test_holm_rejects_what_its_definition_rejects(p: list[float]) -> None:
    corrected = holm(p)
    rejected: list[int] = []
    for step, number in enumerate(sorted(range(len(p)), key=p.__getitem__)):
        if p[number] * (len(p) - step) > DOUBT:
            break
        rejected.append(number)
    assert {n for n, q in enumerate(corrected) if q <= DOUBT} == set(rejected)
    assert all(q >= raw for q, raw in zip(corrected, p, strict=True))
    by_size = sorted(range(len(p)), key=p.__getitem__)
    assert sorted(corrected) == [corrected[n] for n in by_size]


def test_twelve_arms_that_do_nothing_are_rarely_called_anything() -> None:
    rng, alarms, raw = np.random.default_rng(3), 0, 0
    for _ in range(400):
        base = rng.normal(0, 0.03, 8)  # shared, so the arms are not independent
        arms = [list(np.exp(rng.normal(0, 0.03, 8) - base)) for _ in range(12)]
        p = [p_beyond(arm, 0.0) for arm in arms]  # no floor: the correction alone protects
        alarms += min(holm(p)) <= DOUBT
        raw += min(p) <= DOUBT
    assert alarms / 400 <= 0.07
    assert raw / 400 > 0.2  # what it protects from


def test_the_noise_floor_is_twice_the_error_of_the_mean_and_one_per_cent_at_least() -> None:
    quiet, loud = drawn(0.0, 0.002, 8), drawn(0.0, 0.06, 9)
    assert noise_floor(quiet) == 0.01
    assert noise_floor(loud) == pytest.approx(math.expm1(2 * 0.06 / 3))
    assert noise_floor([1.3]) == 0.01  # one round concludes nothing either way


def test_copies_that_differ_beyond_doubt_raise_the_floor_to_their_difference() -> None:
    assert noise_floor(drawn(0.04, 0.01, 8)) == pytest.approx(math.expm1(0.04))
    assert noise_floor(drawn(-0.04, 0.01, 8)) == pytest.approx(math.expm1(0.04))
    assert noise_floor([1e-9, 1e-9, 1e-9]) < 1


@pytest.mark.parametrize(("mean", "word"), [(0.05, "helped"), (-0.05, "hurt"), (0.0, "no effect")])
def test_the_rounds_that_are_needed_do_tell_four_times_of_five(mean: float, word: str) -> None:
    few = ratio_of(drawn(mean, 0.03, 4))
    assert verdict(few) == "undecided"
    more = rounds_needed(few)
    assert isinstance(more, int)
    assert 1 < more < MOST_ROUNDS
    rng = np.random.default_rng(5)
    told = sum(
        verdict(ratio_of(list(np.exp(rng.normal(mean, 0.03, few.rounds + more))))) == word
        for _ in range(400)
    )
    assert 0.74 <= told / 400 <= 0.9


def test_more_arms_and_a_wider_floor_need_more_rounds() -> None:
    few = ratio_of(drawn(0.05, 0.03, 4))
    alone, among, floored = (
        rounds_needed(few),
        rounds_needed(few, arms=12),
        rounds_needed(few, floor=0.04),
    )
    assert isinstance(alone, int)
    assert isinstance(among, int)
    assert isinstance(floored, int)
    assert alone < among
    assert alone < floored


def test_the_rounds_needed_are_bounded_and_unknown_after_one() -> None:
    assert rounds_needed(ratio_of(drawn(math.log(1.01), 0.03, 8))) == "more than 200"  # the edge
    assert rounds_needed(ratio_of([1.5])) is None
    assert rounds_needed(Interval(1.5, 1.5, 0.0, math.inf, 2)) is None


@given(ratios=RATIOS, arms=st.integers(1, 20))
def test_rounds_needed_is_a_number_from_one_to_the_bound(ratios: list[float], arms: int) -> None:
    more = rounds_needed(ratio_of(ratios), arms=arms)
    assert more == "more than 200" or (isinstance(more, int) and 1 <= more <= MOST_ROUNDS)
