"""p-values against scipy, Holm's correction against its definition, Student's t."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scipy import stats

from hasten.errors import InputError
from hasten.measure.significance import (
    MOST_ROUNDS,
    holm,
    judge_effects,
    noise_floor,
    p_beyond,
    ratio_of_rounds,
    rounds_needed,
)
from hasten.measure.statistics import (
    DOUBT,
    Interval,
    ProcessVariance,
    paired_ratio,
    student_quantile,
    student_tail,
    verdict,
)

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
    assert p_beyond(ratios, 0.01) == pytest.approx(expected, rel=1e-9)


@given(ratios=RATIOS, floor=st.sampled_from([0.0, 0.01, 0.05]))
def test_beyond_the_floor_means_that_the_interval_is(ratios: list[float], floor: float) -> None:
    ratio, p = ratio_of(ratios), p_beyond(ratios, floor)
    if abs(p - DOUBT) > 1e-6:
        assert (p < DOUBT) == (ratio.low > 1 + floor or ratio.high < 1 - floor)


def test_one_round_and_equal_rounds_have_the_p_values_of_common_sense() -> None:
    assert p_beyond([1.5, 1.5, 1.5], 0.0) == 0.0
    assert p_beyond([1.0, 1.0], 0.0) == 1.0
    assert p_beyond([1.5], 0.01) == 1.0
    assert p_beyond([1.005, 1.004], 0.01) == 1.0


@given(p=CHANCES)
@example(p=[0.04, 0.02])  # the second needs a factor of 1, not of 2
def test_holm_corrects_as_its_definition_does(p: list[float]) -> None:
    smallest_first = sorted(range(len(p)), key=p.__getitem__)
    for number, corrected in enumerate(holm(p)):
        rank = smallest_first.index(number)
        products = [(len(p) - step) * p[smallest_first[step]] for step in range(rank + 1)]
        assert corrected == min(1.0, max(products))


def test_the_noise_floor_is_twice_the_error_of_the_mean_and_one_per_cent_at_least() -> None:
    quiet, loud = drawn(0.0, 0.002, 8), drawn(0.0, 0.06, 9)
    assert noise_floor(quiet) == 0.01
    assert noise_floor(loud) == pytest.approx(math.expm1(2 * 0.06 / 3))
    assert noise_floor([1.3]) == 0.01  # one round concludes nothing either way


def test_copies_that_differ_beyond_doubt_raise_the_floor_to_their_difference() -> None:
    assert noise_floor(drawn(0.04, 0.01, 8)) == pytest.approx(math.expm1(0.04))
    assert noise_floor(drawn(-0.04, 0.01, 8)) == pytest.approx(math.expm1(0.04))
    assert noise_floor([1e-9, 1e-9, 1e-9]) < 1


def decided_after(logs: Any, edges: tuple[float, float], doubt: float = 0.05) -> Any:
    """Of each row: whether its first n values decide, by scipy's quantiles."""
    count = np.arange(1, logs.shape[1] + 1)
    mean = np.cumsum(logs, axis=1) / count
    squares = np.cumsum(logs**2, axis=1) - count * mean**2
    freedom = np.maximum(count - 1, 1)
    half = stats.t.ppf(1 - doubt / 2, freedom) * np.sqrt(np.maximum(squares, 0) / freedom / count)
    low, high = mean - half, mean + half
    found = (low > edges[1]) | (high < edges[0]) | ((low >= edges[0]) & (high <= edges[1]))
    return found & (count > 1)


@pytest.mark.parametrize("few", [4, 8])
@pytest.mark.parametrize(
    ("effect", "noise"),
    [
        *((-0.05, 0.05), (-0.05, 0.1), (0.03, 0.02), (0.03, 0.05), (0.03, 0.1), (0.05, 0.05)),
        *((0.05, 0.1), (0.05, 0.2), (0.1, 0.1), (0.1, 0.2), (0.2, 0.2)),
    ],
)
def test_the_forecast_of_further_rounds_is_right_within_a_factor_of_two(
    effect: float, noise: float, few: int
) -> None:
    """Compared with the rounds that were really drawn until there was a word, in the median."""
    logs = np.random.default_rng(7).normal(effect, noise, (1000, few + MOST_ROUNDS))
    decided = decided_after(logs, (math.log(0.99), math.log(1.01)))
    rows = np.flatnonzero(~decided[:, few - 1])[:150]
    assert len(rows) == 150
    later = decided[rows, few:]
    actual = np.where(later.any(axis=1), later.argmax(axis=1) + 1, 10 * MOST_ROUNDS)
    found = [rounds_needed(ratio_of(list(np.exp(logs[row, :few])))) for row in rows]
    forecast = [10 * MOST_ROUNDS if isinstance(more, str) else more for more in found]
    assert 0.5 <= np.median(np.array(forecast) / actual) <= 2


def test_no_round_decides_what_lies_within_the_luck_of_processes() -> None:
    few = ratio_of(drawn(0.03, 0.03, 6))
    process_variance = ProcessVariance(0.01, 4, 1)
    assert isinstance(rounds_needed(few), int)
    assert rounds_needed(few, process_variance=process_variance) == "more than 200"
    assert isinstance(
        rounds_needed(ratio_of(drawn(0.08, 0.12, 6)), process_variance=process_variance), int
    )


@pytest.mark.parametrize("change", [0.05, -0.05, 0.2])
def test_words_of_several_ratios_are_those_of_one_after_the_correction(change: float) -> None:
    rounds = {"a": drawn(change, 0.01, 6), "b": drawn(0.0, 0.03, 6), "c": drawn(0.3, 0.02, 6)}
    process_variance = ProcessVariance(0.005, 8, 1)
    effects = {
        name: (ratio_of_rounds(found, process_variance), found) for name, found in rounds.items()
    }
    judged = judge_effects(effects, 0.01, process_variance)
    p_values = holm([p_beyond(found, 0.01, process_variance) for found in rounds.values()])
    assert [judged[name].p_value for name in rounds] == p_values
    for name, p in zip(rounds, p_values, strict=True):
        said = verdict(process_variance.widened(ratio_of(rounds[name])), 0.01, p_value=p)
        assert judged[name].word == said
        assert judged[name].text.startswith(said)
    assert judged["b"].rivals == 1
    assert {judged["a"].rivals, judged["c"].rivals} == {2, 3}


def test_more_variants_and_a_wider_floor_need_more_rounds() -> None:
    few = ratio_of(drawn(0.05, 0.03, 4))
    alone, among, floored = (
        rounds_needed(few),
        rounds_needed(few, variants=12),
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


def test_quantile_and_tail_have_their_textbook_values() -> None:
    assert student_quantile(0.975, 4) == pytest.approx(2.7764451052, abs=1e-9)
    assert student_quantile(0.75, 1) == pytest.approx(1.0, abs=1e-12)  # Cauchy: tan(pi / 4)
    assert student_tail(2.7764451052, 4) == pytest.approx(0.025, abs=1e-10)
    assert [student_tail(t, 4) for t in (math.inf, 1e200, 0.0)] == [0.0, 0.0, 0.5]


@pytest.mark.parametrize(
    ("p", "dof"), [(0.0, 3), (1.0, 3), (math.nan, 3), (0.9, 0), (0.9, math.inf)]
)
def test_a_quantile_outside_its_domain_is_rejected(p: float, dof: float) -> None:
    with pytest.raises(InputError):
        student_quantile(p, dof)
