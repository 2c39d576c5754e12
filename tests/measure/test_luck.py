"""Processes of one program differ; intervals over their rounds must allow for it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hasten.core.plan import Plan
from hasten.measure.ablation import Variant
from hasten.measure.significance import (
    BELIEF,
    USUAL,
    noise_floor,
    p_beyond,
    process_variance_of,
    with_process_variance,
)
from hasten.measure.statistics import Interval, ProcessVariance, student_quantile
from hasten.report.judgement import (
    interaction_of,
    judge_variants,
    noise_of,
    ratio_between,
    ratio_to,
)

ROUNDS = 8


def experiment(
    draw: np.random.Generator,
    gains: list[float],
    builds: int,
    process: float = 0.012,
    noise: float = 0.02,
    rounds: int = ROUNDS,
) -> list[Variant]:
    """A baseline, its copy, a variant for each gain; each build of each variant has its own
    process variance.
    """
    names = ["baseline", "again", *(f"variant {i}" for i in range(len(gains)))]
    truths = [1.0, 1.0, *gains]
    of_build = [min(i * builds // rounds, builds - 1) for i in range(rounds)]
    variants = []
    for name, truth in zip(names, truths, strict=True):
        process_variance = draw.normal(0, process, builds)
        values = [truth * math.exp(process_variance[b] + draw.normal(0, noise)) for b in of_build]
        kind = "again" if name == "again" else "other"
        variants.append(Variant(name, Plan(), rounds=values, builds=of_build, kind=kind))
    for variant in variants:
        variant.baseline_rounds = variants[0].rounds
    return with_process_variance(variants)


@pytest.mark.parametrize("builds", [2, 3])
@pytest.mark.parametrize("count", [2, 7])
def test_intervals_hold_the_truth_where_processes_differ(builds: int, count: int) -> None:
    draw, hits, alone, tries = np.random.default_rng(builds * 10 + count), 0, 0, 400
    for _ in range(tries):
        variants = experiment(draw, [1.05] * count, builds, rounds=24)
        ratio = ratio_to(variants[2], variants[0])
        assert ratio is not None
        hits += ratio.low <= 1.05 <= ratio.high
        for variant in variants:
            variant.process_variance = None
        without = ratio_to(variants[2], variants[0])
        assert without is not None
        alone += without.low <= 1.05 <= without.high
    assert hits >= 0.92 * tries
    assert alone < hits  # rounds alone say less than they seem to


def test_a_copy_is_not_called_better_for_its_luck() -> None:
    draw, called = np.random.default_rng(3), 0
    for _ in range(200):
        variants = experiment(draw, [1.0, 1.0, 1.0], 2, rounds=24)
        called += any(j.verdict == "helped" for j in judge_variants(variants)[2:])
    assert called <= 0.05 * 200


def test_many_variants_tell_how_far_processes_lie_apart() -> None:
    variants = experiment(np.random.default_rng(1), [1.0] * 60, 4, process=0.03, noise=0.001)
    found = process_variance_of(variants)
    assert found is not None
    assert found.spread == pytest.approx(0.03, rel=0.15)
    assert found.freedom == BELIEF + 60 * 3  # variants and copy less one, builds less one


def test_what_a_sitting_did_to_all_variants_is_no_difference_between_them() -> None:
    quiet = experiment(np.random.default_rng(2), [1.1, 0.9, 1.0], 2, process=0.0, noise=0.0)
    for variant in quiet:
        variant.rounds = [
            r * (1.3 if b else 1.0) for r, b in zip(variant.rounds, variant.builds, strict=True)
        ]
        variant.baseline_rounds = quiet[0].rounds
    found = process_variance_of(quiet)
    assert found is not None
    assert found.error == pytest.approx(math.sqrt(BELIEF * USUAL**2 / (BELIEF + 3) / 2))


def test_a_single_build_goes_by_what_is_usual_and_by_the_copy() -> None:
    variants = experiment(np.random.default_rng(4), [1.0], 1, noise=0.0)
    found, apart = (
        process_variance_of(variants),
        math.log(variants[1].rounds[0] / variants[0].rounds[0]),
    )
    assert found is not None
    squares = BELIEF * USUAL**2 + apart**2 / 2
    assert found == ProcessVariance(pytest.approx(math.sqrt(squares / (BELIEF + 1))), BELIEF + 1, 1)


def test_without_an_variant_that_ran_there_is_nothing_to_say() -> None:
    base, broken = Variant("baseline", Plan(), rounds=[1.0]), Variant("x", Plan(), failed="memory")
    assert process_variance_of([base]) is None
    assert process_variance_of([base, broken]) is None
    assert with_process_variance([base, broken])[0].process_variance is None


def test_a_claim_s_pair_and_the_interaction_are_widened_too() -> None:
    variants = experiment(np.random.default_rng(5), [1.1, 1.2], 2, process=0.05, noise=0.0001)
    process_variance = variants[0].process_variance
    assert process_variance is not None
    between = ratio_between(variants[3], variants[2], variants[0])
    assert between is not None
    assert math.log(between[0].high / between[0].low) >= 2 * process_variance.half() * 0.999
    said = noise_of(variants)
    assert said is not None
    assert "Processes of one program lie" in said["text"]
    assert interaction_of(variants) is None  # nothing was asked for


@given(st.floats(1e-4, 0.2), st.integers(1, 40), st.floats(0.5, 2.0), st.floats(0.0, 0.1))
def test_an_interval_is_never_narrower_and_keeps_its_middle(
    error: float, freedom: int, estimate: float, half: float
) -> None:
    process_variance = ProcessVariance(error, freedom, 2)
    before = Interval(estimate, estimate, estimate * (1 - half), estimate * (1 + half), 8)
    after = process_variance.widened(before)
    assert after.low <= before.low <= before.high <= after.high
    assert (after.estimate, after.median, after.rounds) == (estimate, estimate, 8)
    wide = math.log(after.high / after.estimate)
    assert wide >= student_quantile(0.975, freedom) * error * math.sqrt(2) * (1 - 1e-9)
    assert process_variance.chance(process_variance.half()) == pytest.approx(0.05, rel=1e-6)


def test_one_round_stays_unknown() -> None:
    unknown = Interval(1.0, 1.0, 0.0, math.inf, 1)
    assert ProcessVariance(0.01, 4, 1).widened(unknown) == unknown


def test_no_p_value_is_smaller_than_processes_alone_give() -> None:
    ratios, process_variance = [1.05, 1.051, 1.049, 1.05], ProcessVariance(0.01, 5, 2)
    distance = math.log(1.05) - math.log(1.01)
    assert p_beyond(ratios, 0.01) < 0.001
    assert p_beyond(ratios, 0.01, process_variance) == pytest.approx(
        process_variance.chance(distance), rel=1e-3
    )
    assert process_variance.chance(distance) > 0.02


def test_a_copy_that_differs_as_processes_do_raises_no_floor() -> None:
    again = [1.02, 1.0201, 1.0199, 1.02]  # beyond doubt by its rounds, and nothing by its processes
    assert noise_floor(again) == pytest.approx(0.02, rel=1e-2)
    assert noise_floor(again, ProcessVariance(0.01, 5, 2)) == 0.01
