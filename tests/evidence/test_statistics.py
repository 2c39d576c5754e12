"""The statistics against scipy, against simulation, and against the rules written a second time."""

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from hasten.errors import InputError
from hasten.evidence.statistics import (
    Interval,
    paired_ratio,
    spread,
    student_quantile,
    verdict,
)

SPEEDS = st.floats(min_value=1e-300, max_value=1e300)
PAIRS = st.lists(st.tuples(SPEEDS, SPEEDS), min_size=2, max_size=12)
ENDS = st.floats(min_value=0.5, max_value=2.0)


def interval(low: float, high: float) -> Interval:
    middle = math.sqrt(low * high)
    return Interval(middle, middle, low, high, 5)


@pytest.mark.parametrize("dof", [1, 2, 3, 4, 5, 7, 9, 10, 19, 30, 99, 1000, 31_623, 100_000, 2.5])
def test_the_student_quantile_agrees_with_scipy(dof: float) -> None:
    for p in [1e-9, 1e-6, 1e-3, 0.005, 0.025, 0.05, 0.1, 0.3, 0.499, 0.5, 0.6, 0.975, 0.9995]:
        expected = stats.t.ppf(p, dof)
        assert student_quantile(p, dof) == pytest.approx(expected, rel=1e-8, abs=1e-8), p


def test_the_student_quantile_has_its_textbook_values() -> None:
    assert student_quantile(0.975, 4) == pytest.approx(2.7764451052, abs=1e-9)
    assert student_quantile(0.75, 1) == pytest.approx(1.0, abs=1e-12)  # Cauchy: tan(pi / 4)


@given(p=st.floats(min_value=1e-6, max_value=1 - 1e-6), dof=st.integers(1, 200))
def test_the_distribution_function_undoes_the_quantile(p: float, dof: int) -> None:
    assert stats.t.cdf(student_quantile(p, dof), dof) == pytest.approx(p, rel=1e-8)


@pytest.mark.parametrize(
    ("p", "dof"), [(0.0, 3), (1.0, 3), (math.nan, 3), (0.9, 0), (0.9, math.inf)]
)
def test_a_quantile_outside_its_domain_is_rejected(p: float, dof: float) -> None:
    with pytest.raises(InputError):
        student_quantile(p, dof)


@pytest.mark.parametrize("rounds", [5, 10])
def test_a_95_percent_interval_covers_the_truth_95_percent_of_the_time(rounds: int) -> None:
    rng, truth, repeats = np.random.default_rng(20), 1.3, 3000
    covered = {"ratio": 0, "spread": 0}
    for _ in range(repeats):
        weather = rng.lognormal(0, 0.2, rounds)  # what both arms of a round suffer
        baseline = 1000 * weather * rng.lognormal(0, 0.03, rounds)
        other = 1000 * truth * weather * rng.lognormal(0, 0.03, rounds)
        ratio, alone = paired_ratio(list(baseline), list(other)), spread(list(baseline))
        covered["ratio"] += ratio.low <= truth <= ratio.high
        covered["spread"] += alone.low <= 1000 <= alone.high
    assert all(0.92 <= count / repeats <= 0.98 for count in covered.values()), covered


def test_pairing_removes_what_both_arms_of_a_round_suffer() -> None:
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


@given(pairs=PAIRS)
def test_the_estimate_lies_in_its_interval_whatever_was_measured(
    pairs: list[tuple[float, float]],
) -> None:
    baseline, other = zip(*pairs, strict=True)
    for measured in (paired_ratio(baseline, other), spread(baseline)):
        assert 0 <= measured.low <= measured.estimate <= measured.high


@given(pairs=st.lists(st.tuples(ENDS, ENDS), min_size=2, max_size=9))
def test_exchanging_the_arms_inverts_the_interval(pairs: list[tuple[float, float]]) -> None:
    baseline, other = zip(*pairs, strict=True)
    there, back = paired_ratio(baseline, other), paired_ratio(other, baseline)
    inverted = (1 / back.high, 1 / back.estimate, 1 / back.low)
    assert (there.low, there.estimate, there.high) == pytest.approx(inverted)


@given(values=st.lists(ENDS, min_size=2, max_size=9))
def test_more_confidence_never_narrows_the_interval(values: list[float]) -> None:
    narrow, wide = spread(values, 0.8), spread(values, 0.99)
    assert wide.low <= narrow.low
    assert narrow.high <= wide.high


def test_one_round_has_a_ratio_but_an_infinite_interval_and_no_verdict() -> None:
    ratio = paired_ratio([100.0], [150.0])
    assert ratio == Interval(1.5, 1.5, 0.0, math.inf, 1)
    assert ratio.summary() == {"median": 1.5, "low": None, "high": None}
    assert verdict(ratio, claim=1.1) == "inconclusive"


def test_a_summary_carries_median_low_and_high() -> None:
    summary = spread([99.0, 100.0, 104.0]).summary()
    assert list(summary) == ["median", "low", "high"]
    assert summary["median"] == 100.0


@pytest.mark.parametrize(
    ("baseline", "other", "words"),
    [
        ([1.0, 2.0], [1.0], "2 and the other arm 1"),
        ([], [], "no rounds"),
        ([1.0, 0.0], [1.0, 1.0], "Round 2 of the baseline is 0"),
        ([1.0], [math.nan], "Round 1 of the other arm is nan"),
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
        spread([1.0, 2.0], confidence)


@pytest.mark.parametrize(
    ("low", "high", "claim", "word"),
    [
        (1.10, 1.20, None, "held"),
        (1.10, 1.20, 1.15, "held"),
        (1.10, 1.20, 1.05, "held"),  # better than promised
        (1.10, 1.20, 1.21, "fell short"),
        (0.90, 0.98, 1.15, "harmed"),
        (0.995, 1.005, 1.15, "no effect"),
        (0.98, 1.05, 1.15, "inconclusive"),
        (1.005, 1.05, None, "inconclusive"),  # faster, perhaps by less than the noise floor
        (0.985, 0.995, None, "inconclusive"),
    ],
)
def test_the_verdict_is_the_documented_word(
    low: float, high: float, claim: float | None, word: str
) -> None:
    assert verdict(interval(low, high), claim) == word


@given(ends=st.tuples(ENDS, ENDS), claim=st.none() | ENDS, floor=st.sampled_from([0, 0.01, 0.1]))
def test_exactly_one_rule_decides_every_interval(
    ends: tuple[float, float], claim: float | None, floor: float
) -> None:
    low, high = sorted(ends)
    better, promised = low > 1 + floor, claim is not None and claim > high
    rules = {
        "harmed": high < 1 - floor,
        "held": better and not promised,
        "fell short": better and promised,
        "no effect": not (low < 1 - floor) and not (high > 1 + floor),
    }
    holding = [word for word, holds in rules.items() if holds]
    assert len(holding) <= 1
    assert verdict(interval(low, high), claim, floor) == (holding or ["inconclusive"])[0]


@given(ends=st.tuples(ENDS, ENDS), claims=st.tuples(ENDS, ENDS))
def test_a_bolder_claim_never_turns_out_better(
    ends: tuple[float, float], claims: tuple[float, float]
) -> None:
    measured = interval(*sorted(ends))
    modest, bold = (verdict(measured, claim) for claim in sorted(claims))
    assert modest == bold or (modest, bold) == ("held", "fell short")


@pytest.mark.parametrize(("claim", "floor"), product([None, 1.2], [-0.1, 1.0, math.nan]))
def test_a_noise_floor_that_is_no_share_is_rejected(claim: float | None, floor: float) -> None:
    with pytest.raises(InputError, match="noise floor"):
        verdict(interval(1.0, 1.1), claim, floor)


@pytest.mark.parametrize("claim", [0.0, -1.0, math.nan, math.inf])
def test_a_claim_that_is_no_ratio_is_rejected(claim: float) -> None:
    with pytest.raises(InputError, match="claimed ratio"):
        verdict(interval(1.0, 1.1), claim)
