"""Noise, builds, groups and interaction from hand-made variants, whose ratios are known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from hasten.core.plan import Plan
from hasten.measure.ablation import Variant
from hasten.report.judgement import (
    floor_of,
    interaction_of,
    noise_of,
    ratio_between,
    ratio_to,
    rebuilt_of,
)
from hasten.techniques.attention import DocumentAttention
from hasten.techniques.collate import Packed
from hasten.techniques.layers import FusedLayers
from report.handmade import report

WEATHER = (100.0, 50.0, 160.0, 80.0, 120.0, 90.0)
JITTER = (1.001, 0.999, 1.002, 0.998, 1.0, 1.0)


def variant(
    name: str,
    plan: Sequence[Any] = (),
    speed: float = 1.0,
    weather: Sequence[float] = WEATHER,
    **changes: Any,
) -> Variant:
    rounds = [w * speed * j for w, j in zip(weather, JITTER, strict=True)]
    return Variant(name, Plan(plan), rounds=rounds, **changes)


def baseline(**changes: Any) -> Variant:
    return Variant("baseline", Plan(), rounds=list(WEATHER), kind="baseline", **changes)


def experiment(together: float) -> list[Variant]:
    return [
        baseline(),
        variant("only packed", [Packed()], 1.2, kind="single"),
        variant("only fused_layers", [FusedLayers()], 1.5, kind="single"),
        variant("all", [Packed(), FusedLayers()], together, kind="all"),
    ]


def test_without_a_second_copy_there_is_no_noise_to_report() -> None:
    assert noise_of([baseline(), variant("a", [Packed()])]) is None
    assert floor_of([baseline(), variant("a", [Packed()])]) == 0.01


def test_a_second_copy_shows_the_noise() -> None:
    found = noise_of([baseline(), variant("again", kind="again"), variant("a", [Packed()])])
    assert found is not None
    assert found["floor"] == 0.01
    assert found["ratio"]["low"] < 1 < found["ratio"]["high"]
    assert "over 6 rounds. Changes below 1.0 % are not counted" in found["text"]


def test_copies_that_differ_beyond_doubt_are_said_to() -> None:
    found = noise_of([baseline(), variant("again", speed=1.04, kind="again")])
    assert found is not None
    assert "they certainly differ" in found["text"]
    assert found["floor"] == pytest.approx(0.04, abs=1e-3)


def losses(*values: float) -> list[tuple[int, float]]:
    return [(100 * i, value) for i, value in enumerate(values, start=1)]


def test_copies_that_do_not_compute_the_same_are_said_not_to() -> None:
    first, copy = baseline(losses=losses(8, 7, 6)), variant("again", kind="again")
    copy.losses = losses(8, 7 * (1 + 1e-4), 5.7)
    found = noise_of([first, copy])
    assert found is not None
    assert "training losses differ from step 2 on, by 5 % at most" in found["text"]


@pytest.mark.parametrize("theirs", [(8, 7, 6), (8, 7 * (1 + 1e-7), 6), (8, 7)])
def test_the_order_of_sums_is_no_difference_between_copies(theirs: tuple[float, ...]) -> None:
    first, copy = baseline(losses=losses(8, 7, 6)), variant("again", kind="again")
    copy.losses = losses(*theirs)
    found = noise_of([first, copy])
    assert found is not None
    assert "training losses" not in found["text"]


def test_one_round_of_a_second_copy_promises_nothing() -> None:
    copy = variant("again", kind="again")
    copy.rounds = copy.rounds[:1]
    found = noise_of([baseline(), copy])
    assert found is not None
    assert found["ratio"]["low"] is None
    assert "One round doesn't show" in found["text"]


@pytest.mark.parametrize(
    ("together", "words"),
    [(1.8, "no interaction"), (1.5, "take from each other"), (2.2, "help each other")],
)
def test_all_is_compared_with_the_product_of_the_singles(together: float, words: str) -> None:
    found = interaction_of(experiment(together))
    assert found is not None
    assert found["ratio"]["median"] == pytest.approx(together / 1.8, rel=5e-3)
    assert found["ratio"]["low"] < together / 1.8 < found["ratio"]["high"]
    assert words in found["text"]


def test_an_interaction_nobody_can_know_is_not_measured() -> None:
    cumulative = [
        baseline(),
        variant("+ packed", [Packed()], kind="cumulative"),
        experiment(1.8)[-1],
    ]
    assert interaction_of(cumulative) is None  # no variant has one technique alone by design
    missing = experiment(1.8)
    missing[2].failed = "killed"
    found = interaction_of(missing)
    assert found is not None
    assert found["ratio"]["median"] is None
    assert found["text"] == "Not measured: fused_layers has no result of its own."
    apart = experiment(1.8)
    apart[1].baseline_rounds = [2 * w for w in WEATHER]
    said = interaction_of(apart)
    assert said is not None
    assert "alive together" in said["text"]


def test_variants_of_a_group_are_paired_with_the_baseline_of_their_own_rounds() -> None:
    later = [3.0 * w for w in reversed(WEATHER)]  # another hour, another weather
    grouped = variant("b", [FusedLayers()], 1.5, later, baseline_rounds=later)
    ratio = ratio_to(grouped, baseline())
    assert ratio is not None
    assert ratio.estimate == pytest.approx(1.5, rel=1e-3)
    assert ratio.high / ratio.low < 1.01  # its weather cancels


def test_variants_of_different_groups_are_compared_through_the_baseline() -> None:
    later = [3.0 * w for w in reversed(WEATHER)]
    base = baseline(baseline_rounds=list(WEATHER))
    one = variant("a", [Packed()], 1.2, baseline_rounds=list(WEATHER), kind="cumulative")
    both = variant("ab", [Packed(), FusedLayers()], 1.8, later, baseline_rounds=later, kind="all")
    found = ratio_between(both, one, base)
    assert found is not None
    ratio, rounds = found
    assert ratio.estimate == pytest.approx(1.5, rel=1e-3)
    assert rounds == []
    together = ratio_between(both, base, base)
    assert together is not None
    assert together[0].estimate == pytest.approx(1.8, rel=1e-3)
    assert together[1]
    claims = {c["technique"]: c for c in report(base, one, both)["claims"]}
    assert claims["fused_layers"]["measured"].startswith("1.50×")


def test_two_builds_are_compared_through_the_baseline() -> None:
    builds = [0, 0, 0, 1, 1, 1]
    same, other = (
        variant("a", [Packed()], 1.2, builds=builds),
        variant("b", [Packed()], builds=builds),
    )
    other.rounds = [
        v * (1.1 if build else 1.0) for v, build in zip(other.rounds, builds, strict=True)
    ]
    base = baseline(builds=builds)
    alike, apart = rebuilt_of(same, base), rebuilt_of(other, base)
    assert alike is not None
    assert apart is not None
    assert "too narrow" not in alike["text"]
    assert apart["ratio"]["median"] == pytest.approx(1.1, rel=5e-3)
    assert "builds differ by more than their rounds do" in apart["text"]
    own = rebuilt_of(base, base)
    assert own is not None
    assert math.isfinite(own["ratio"]["median"])


def test_builds_of_a_single_round_are_not_compared() -> None:
    assert rebuilt_of(variant("a", [Packed()]), baseline()) is None
    fresh = variant("a", [DocumentAttention()], builds=[0, 1, 2, 3, 4, 5])
    assert rebuilt_of(fresh, baseline()) is None
