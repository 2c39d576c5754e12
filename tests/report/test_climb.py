"""Gradual optimisation: what pays is kept, and nothing else."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest

from hasten.core.plan import Plan
from hasten.core.technique import Technique
from hasten.measure.ablation import Variant
from hasten.report.speedup import by_gain, decide, greedy_search
from hasten.techniques.attention import DocumentAttention
from hasten.techniques.collate import Packed
from hasten.techniques.optimizer import FusedAdamW

TECHNIQUES: list[Technique] = [Packed(), DocumentAttention(), FusedAdamW()]


def pair(before: Plan, after: Plan, gain: float, noise: float = 0.01) -> tuple[Variant, Variant]:
    """Eight paired rounds that differ by a gain, and noise."""
    rng = random.Random(str(after))
    base = [100 * (1 + rng.gauss(0, 0.05)) for _ in range(8)]
    ours = [value * gain * (1 + rng.gauss(0, noise)) for value in base]
    one = Variant("so far", before, rounds=base, eval_data=[(10, 2.0)])
    return one, Variant("+", after, rounds=ours, eval_data=[(10, 2.0)])


def gains(table: Mapping[str, float]) -> object:
    def measure(before: Plan, after: Plan) -> tuple[Variant, Variant]:
        (new,) = set(after.techniques) - set(before.techniques)
        return pair(before, after, table[new.name()])

    return measure


def test_only_what_pays_is_kept() -> None:
    table = {"packed": 1.3, "document_attention": 0.9, "fused_adamw": 1.1}
    found = greedy_search(TECHNIQUES, gains(table))  # type: ignore[arg-type]
    assert [t.name() for t in found.plan] == ["packed", "fused_adamw"]
    assert [rung.accepted for rung in found.rungs] == [True, False, True]
    assert "slower" in str(found)
    assert "times the plan so far [98.3 %]" in str(found)  # three decisions share 5 %
    assert str(found).endswith("kept: packed + fused_adamw")


def test_each_technique_stands_on_what_was_kept_before() -> None:
    seen = []

    def measure(before: Plan, after: Plan) -> tuple[Variant, Variant]:
        seen.append((str(before), str(after)))
        return pair(before, after, 1.0 if before == Plan() else 1.5)

    greedy_search(TECHNIQUES, measure)
    assert seen == [("baseline", str(Plan([t]))) for t in TECHNIQUES]


def test_a_technique_that_does_nothing_is_not_kept() -> None:
    table = {t.name(): 1.0 for t in TECHNIQUES}
    found = greedy_search(TECHNIQUES, gains(table))  # type: ignore[arg-type]
    assert not len(found.plan)
    assert str(found).endswith("kept: nothing")


def test_more_techniques_make_each_decision_stricter() -> None:
    before, after = pair(Plan(), Plan([Packed()]), 1.035, noise=0.02)
    alone = decide(Packed(), before, after, doubt=0.05)
    among_many = decide(Packed(), before, after, doubt=0.05 / 1000)
    assert alone.ratio is not None
    assert among_many.ratio is not None
    assert among_many.ratio["low"] < alone.ratio["low"]  # type: ignore[operator]
    assert (alone.accepted, among_many.accepted) == (True, False)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"failed": "killed"}, "failed: killed"),
        ({"unfinished": "hung"}, "what it did is not known: hung"),
        (
            {"effective": [{"technique": "packed", "effective": False, "evidence": ""}]},
            "it did not act",
        ),
        ({"eval_data": [(10, 2.5)]}, "Eval loss"),
    ],
)
def test_speed_alone_keeps_nothing(change: dict[str, object], why: str) -> None:
    before, after = pair(Plan(), Plan([Packed()]), 2.0)
    for name, value in change.items():
        setattr(after, name, value)
    rung = decide(Packed(), before, after, doubt=0.05)
    assert not rung.accepted
    assert rung.why.startswith(why)


def test_without_a_base_there_is_no_gain() -> None:
    before, after = pair(Plan(), Plan([Packed()]), 2.0)
    before.failed = "killed"
    assert decide(Packed(), before, after, doubt=0.05).why.endswith("has no result: killed")


def test_by_gain_the_best_comes_first_and_the_unmeasured_last() -> None:
    base = Variant("baseline", Plan(), rounds=[100.0] * 3)
    variants = [base]
    for technique, speed in zip(TECHNIQUES[1:], (90.0, 130.0), strict=True):
        variants.append(Variant(technique.name(), Plan([technique]), rounds=[speed] * 3))
    assert by_gain(TECHNIQUES, variants) == [FusedAdamW(), DocumentAttention(), Packed()]
