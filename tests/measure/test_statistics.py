"""Intervals against scipy and simulated noise; the verdict against its rules."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from hasten.errors import InputError
from hasten.measure.statistics import (
    Interval,
    claim_verdict,
    joint_ratio,
    paired_ratio,
    unpaired_ratio,
    verdict,
)
from measure.simulated import NOISES, ROUNDS, coverage

SPEEDS = st.floats(min_value=1e-300, max_value=1e300)
ENDS = st.floats(min_value=0.5, max_value=2.0)


def interval(low: float, high: float) -> Interval:
    middle = math.sqrt(low * high)
    return Interval(middle, middle, low, high, 5)


def test_pairing_removes_what_both_variants_of_a_round_suffer() -> None:
    ratio = paired_ratio([100.0, 50.0, 400.0], [120.0, 60.0, 480.0])
    assert (ratio.low, ratio.estimate, ratio.high) == pytest.approx((1.2, 1.2, 1.2))


def test_the_ratio_is_scipys_one_sample_interval_of_the_logs() -> None:
    baseline, other = [100.0, 104.0, 98.0, 101.0], [121.0, 119.0, 125.0, 118.0]
    logs = np.log(other) - np.log(baseline)
    expected = stats.ttest_1samp(logs, 0).confidence_interval(0.9)
    ratio = paired_ratio(baseline, other, confidence=0.9)
    assert (ratio.low, ratio.high) == pytest.approx(
        (math.exp(expected.low), math.exp(expected.high))
    )
    assert ratio.estimate == pytest.approx(stats.gmean(other) / stats.gmean(baseline))
    assert ratio.median == pytest.approx(np.median(np.divide(other, baseline)))
    assert ratio.rounds == 4


def test_one_round_has_a_ratio_but_an_infinite_interval_and_no_verdict() -> None:
    ratio = paired_ratio([100.0], [150.0])
    assert ratio == Interval(1.5, 1.5, 0.0, math.inf, 1)
    assert ratio.summary() == {"median": 1.5, "low": None, "high": None}
    assert verdict(ratio) == "undecided"
    assert claim_verdict(ratio, 1.1, "undecided") == "not comparable"


@pytest.mark.parametrize(
    ("baseline", "other", "words"),
    [
        ([1.0, 2.0], [1.0], "2 and the other variant 1"),
        ([], [], "no rounds"),
        ([1.0, 0.0], [1.0, 1.0], "Round 2 of the baseline is 0"),
        ([1.0], [math.nan], "Round 1 of the other variant is nan"),
        ([1.0], [math.inf], "inf"),
    ],
)
def test_rounds_that_cannot_be_compared_are_rejected_with_their_place(
    baseline: list[float], other: list[float], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        paired_ratio(baseline, other)


@pytest.mark.parametrize("confidence", [0.0, 1.0, 95.0, math.nan])
def test_a_confidence_that_is_no_share_is_rejected(confidence: float) -> None:
    with pytest.raises(InputError, match="confidence"):
        paired_ratio([1.0, 1.0], [1.0, 2.0], confidence)


@pytest.mark.parametrize(
    ("low", "high", "claim", "word"),
    [
        (1.10, 1.20, 1.15, "held"),
        (1.10, 1.20, 1.05, "held"),  # better than promised
        (1.10, 1.20, 1.21, "fell short"),
        (0.90, 0.98, 1.15, "fell short"),
        (0.995, 1.005, 1.15, "fell short"),
        (0.98, 1.05, 1.04, "not comparable"),
        (1.005, 1.05, 1.04, "not comparable"),  # as promised, or within the noise
        (0.96, 0.99, 0.95, "held"),  # slower by no more than was said
        (0.94, 0.99, 0.95, "not comparable"),
    ],
)
def test_the_verdict_on_a_claim_is_the_documented_word(
    low: float, high: float, claim: float, word: str
) -> None:
    measured = interval(low, high)
    assert claim_verdict(measured, claim, verdict(measured)) == word


@given(ends=st.tuples(ENDS, ENDS), floor=st.sampled_from([0, 0.01, 0.1]))
def test_exactly_one_rule_decides_every_interval(ends: tuple[float, float], floor: float) -> None:
    low, high = sorted(ends)
    rules = {
        "hurt": high < 1 - floor,
        "helped": low > 1 + floor,
        "no effect": not (low < 1 - floor) and not (high > 1 + floor),
    }
    holding = [word for word, holds in rules.items() if holds]
    assert len(holding) <= 1
    assert verdict(interval(low, high), floor) == (holding or ["undecided"])[0]


@pytest.mark.parametrize("floor", [-0.1, 1.0, math.nan])
def test_a_noise_floor_that_is_no_share_is_rejected(floor: float) -> None:
    with pytest.raises(InputError, match="noise floor"):
        verdict(interval(1.0, 1.1), floor)


@pytest.mark.parametrize("claim", [0.0, -1.0, math.nan, math.inf])
def test_a_claim_that_is_no_ratio_is_rejected(claim: float) -> None:
    with pytest.raises(InputError, match="claimed ratio"):
        claim_verdict(interval(1.0, 1.1), claim, "helped")


@given(ends=st.tuples(ENDS, ENDS), p=st.floats(min_value=0, max_value=1))
def test_a_correction_only_ever_withholds_a_word(ends: tuple[float, float], p: float) -> None:
    measured = interval(*sorted(ends))
    alone, among = verdict(measured), verdict(measured, p_value=p)
    assert among == alone or (p > 0.05 and among in ("undecided", "no effect"))
    if p > 0.05:
        assert among not in ("helped", "hurt")


def test_a_noisy_machine_does_not_make_more_of_it_nothing() -> None:
    measured = interval(1.01, 1.04)
    assert verdict(measured, noise_floor=0.05) == "no effect"  # as a margin somebody chose
    assert verdict(measured, noise_floor=0.05, nothing=0.01) == "undecided"


def test_the_unpaired_ratio_is_welchs_interval_of_the_logs() -> None:
    first, second = [100.0, 104.0, 98.0, 101.0], [121.0, 129.0, 115.0, 118.0, 130.0, 119.0]
    test = stats.ttest_ind(np.log(second), np.log(first), equal_var=False)
    expected = test.confidence_interval(0.95)
    ratio = unpaired_ratio(first, second)
    assert (ratio.low, ratio.high) == pytest.approx(
        (math.exp(expected.low), math.exp(expected.high))
    )
    assert ratio.estimate == pytest.approx(stats.gmean(second) / stats.gmean(first))
    assert ratio.rounds == 4


def test_exact_repeats_leave_no_doubt_and_one_value_leaves_all() -> None:
    sure, unsure = unpaired_ratio([2.0, 2.0], [3.0, 3.0]), unpaired_ratio([2.0], [3.0, 3.0])
    assert (sure.low, sure.estimate, sure.high) == pytest.approx((1.5, 1.5, 1.5))
    assert (unsure.median, unsure.low, unsure.high) == (1.5, 0.0, math.inf)


def test_what_techniques_do_together_is_compared_with_their_product() -> None:
    weather = np.array([100.0, 50.0, 400.0, 130.0])
    singles = [list(1.2 * weather), list(1.5 * weather)]
    joint = joint_ratio(list(weather), list(1.62 * weather), singles)
    assert (joint.low, joint.estimate, joint.high) == pytest.approx((0.9, 0.9, 0.9))
    one = joint_ratio(list(weather), list(1.62 * weather), [singles[0]])
    assert one.median == pytest.approx(1.35)


def test_variants_of_other_rounds_cannot_be_multiplied() -> None:
    with pytest.raises(InputError, match="same rounds"):
        joint_ratio([1.0, 1.0], [1.0, 1.0], [[1.0]])


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize("noise", NOISES)
def test_a_95_percent_interval_holds_the_truth_95_percent_of_the_time(
    noise: str, rounds: int
) -> None:
    assert 0.92 <= coverage(NOISES[noise], rounds, replays=2000) <= 0.98
