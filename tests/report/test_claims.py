"""Claims against hand-made variants; gradual optimisation keeps what pays, and nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import pytest

from hasten.core.plan import Plan
from hasten.core.technique import Technique
from hasten.errors import InputError
from hasten.measure.ablation import Design, Variant, plans_of
from hasten.measure.search import search
from hasten.report.speedup import Greedy, GreedySearch, by_gain, decide
from hasten.techniques.attention import DocumentAttention
from hasten.techniques.collate import Packed
from hasten.techniques.optimizer import FusedAdamW
from report.handmade import (
    MEMORY,
    SPEED,
    Fake,
    Other,
    baseline,
    report,
    variant,
    verdict_of,
)


def test_a_claim_is_judged_by_the_variants_that_differ_by_its_technique_alone() -> None:
    one, two = Fake(((SPEED, 1.2),)), Other(((SPEED, 1.5), ("comm_bytes", 0.1)))
    both = variant(one, two, speed=1.3 * 1.1, kind="all")
    rungs = [baseline(), variant(one, speed=1.3, kind="cumulative"), both]
    first, second, third = report(*rungs)["claims"]
    assert first["measured"].startswith("1.30× [")
    assert (first["claimed"], first["verdict"]) == ("1.20×", "held")
    assert second["measured"].startswith("1.10× [")  # against the rung below, not the baseline
    assert (second["source"], second["verdict"]) == ("an article", "fell short")
    assert (third["metric"], third["measured"]) == ("comm_bytes", "not measured")
    assert third["verdict"] == "not comparable"


def test_a_claim_without_two_such_variants_is_left_open() -> None:
    one, two = Fake(((SPEED, 1.2),)), Other(((SPEED, 1.2),))
    for claim in report(baseline(), variant(one, two, speed=2.0))["claims"]:
        assert (claim["measured"], claim["verdict"]) == ("not measured apart", "not comparable")
    assert report(baseline())["claims"] == []


def test_a_failed_variant_gives_way_to_another_pair() -> None:
    one, two = Fake(((SPEED, 1.2),)), Other()
    without = variant(two, kind="leave-one-out")
    variants = [
        baseline(),
        variant(one, failed="x"),
        without,
        variant(one, two, speed=1.5, kind="all"),
    ]
    claim = report(*variants)["claims"][0]
    assert claim["measured"].startswith("1.50×")


def test_a_claim_of_a_technique_that_did_not_act_is_not_held() -> None:
    idle = [{"technique": "fake", "effective": False, "evidence": "nothing"}]
    with_it = variant(Fake(((SPEED, 1.2),)), speed=1.5, effective=idle)
    assert report(baseline(), with_it)["claims"][0]["verdict"] == "not comparable: it did not act"


@pytest.mark.parametrize(
    ("used", "measured", "word"),
    [
        (0.60, "0.60×", "held"),
        (0.70, "0.70×", "held"),
        (0.85, "0.85×", "fell short"),
        (0.995, "0.99×", "fell short"),
        (1.005, "1.00×", "fell short"),
        (1.02, "1.02×", "fell short"),
        (1.97, "1.97×", "fell short"),
    ],
)
def test_memory_that_falls_by_less_than_promised_falls_short(
    used: float, measured: str, word: str
) -> None:
    lean = variant(Fake(((MEMORY, 0.7),)), memory=4e9 * used)
    claim = report(baseline(), lean)["claims"][0]
    assert (claim["claimed"], claim["measured"], claim["verdict"]) == ("0.70×", measured, word)


def test_a_promise_of_little_more_memory_can_be_kept() -> None:
    claim = report(baseline(), variant(Fake(((MEMORY, 1.1),)), memory=4.2e9))["claims"][0]
    assert claim["verdict"] == "held"


def test_claims_are_corrected_for_their_number_as_variants_are() -> None:
    noise = (1.03, 0.98, 1.0, 1.01, 0.99)
    promised = Fake(((SPEED, 1.03),)), Other(((SPEED, 1.2),))
    first = variant(promised[0], speed=1.035, noise=noise, kind="cumulative")
    alone = [first, variant(*promised, speed=1.04, noise=noise, kind="all")]
    first, second = report(baseline(), *alone)["claims"]
    assert first["verdict"] == "not comparable"
    assert second["verdict"] == "fell short"
    single = report(baseline(), variant(promised[0], speed=1.035, noise=noise))["claims"]
    assert single[0]["verdict"] == "held"


def test_a_baseline_with_techniques_is_no_part_of_what_an_variant_claims_or_does() -> None:
    shared = Other()
    effective = [{"technique": "other", "effective": True, "evidence": "seen"}]
    idle = [*effective, {"technique": "fake", "effective": False, "evidence": "0 modules"}]
    base = variant(shared, name="baseline", noise=(1, 1, 1, 1, 1), effective=effective)
    assert verdict_of(base, variant(Fake(), shared, speed=1.5, effective=idle)) == (
        "no effect: fake did not act"
    )
    found = report(base, variant(Fake(((SPEED, 2.0),)), shared, speed=1.5))
    assert found["variants"][1]["verdict"] == "helped"  # that it was promised more is the claim's
    assert found["claims"][0]["verdict"] == "fell short"


@pytest.mark.parametrize("spoilt", ["loss", "verification"])
def test_no_claim_is_held_by_an_variant_whose_model_is_worse(spoilt: str) -> None:
    promised = Fake(((SPEED, 1.2), (MEMORY, 0.7)))
    fast = variant(promised, speed=1.5, memory=2e9, loss=2.5 if spoilt == "loss" else 2.0)
    line = {"technique": "fake", "verdict": "differs", "text": "gradient off by 0.3"}
    found = report(baseline(), fast, verification=[line] if spoilt == "verification" else [])
    assert found["variants"][1]["quality"].startswith("worse: ")
    assert {c["verdict"] for c in found["claims"]} == {"fell short: the model is worse"}


TECHNIQUES: list[Technique] = [Packed(), DocumentAttention(), FusedAdamW()]


def pair(before: Plan, after: Plan, gain: float, noise: float = 0.01) -> tuple[Variant, Variant]:
    """Eight paired rounds that differ by a gain, and noise."""
    rng = random.Random(str(after))
    base = [100 * (1 + rng.gauss(0, 0.05)) for _ in range(8)]
    ours = [value * gain * (1 + rng.gauss(0, noise)) for value in base]
    one = Variant("so far", before, rounds=base, eval_data=[(10, 2.0)])
    return one, Variant("+", after, rounds=ours, eval_data=[(10, 2.0)])


Measure = Callable[[Plan, Plan], tuple[Variant, Variant]]


def greedy(measure: Measure) -> GreedySearch:
    rules = Greedy(TECHNIQUES, Design())
    search(rules, lambda proposal: measure(*proposal.variants.values()))
    return rules.result


def gains(table: Mapping[str, float]) -> Measure:
    def measure(before: Plan, after: Plan) -> tuple[Variant, Variant]:
        (new,) = set(after.techniques) - set(before.techniques)
        return pair(before, after, table[new.name()])

    return measure


def test_only_what_pays_is_kept() -> None:
    table = {"packed": 1.3, "document_attention": 0.9, "fused_adamw": 1.1}
    found = greedy(gains(table))
    assert [t.name() for t in found.plan] == ["packed", "fused_adamw"]
    assert [rung.accepted for rung in found.rungs] == [True, False, True]
    assert "slower" in str(found)
    assert "times the plan so far [98.3 %]" in str(found)  # three decisions share 5 %
    first = pair(Plan(), Plan(TECHNIQUES[:1]), table["packed"])
    assert found.rungs[0] == decide(TECHNIQUES[0], *first, doubt=0.05 / 3)
    assert str(found).endswith("kept: packed + fused_adamw")


def test_each_technique_stands_on_what_was_kept_before() -> None:
    seen = []

    def measure(before: Plan, after: Plan) -> tuple[Variant, Variant]:
        seen.append((str(before), str(after)))
        return pair(before, after, 1.0 if before == Plan() else 1.5)

    greedy(measure)
    assert seen == [("baseline", str(Plan([t]))) for t in TECHNIQUES]


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


def test_an_unknown_order_or_set_of_variants_is_refused() -> None:
    with pytest.raises(InputError, match="order: there is no 'speed'; there are slots, gain"):
        Greedy(TECHNIQUES, Design(), "speed")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="variants: there is no 'plan'; there are full, "):
        plans_of(Plan(TECHNIQUES), "plan")  # type: ignore[arg-type]
