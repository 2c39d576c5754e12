"""Findings laid out for the page, from hand-made variants."""

from __future__ import annotations

import pytest

from hasten.core.plan import Plan
from hasten.measure.ablation import Variant
from hasten.recipe.schema import Recipe
from hasten.report.judgement import ratio_to
from hasten.report.schema import read_report
from hasten.training.run import cost_of
from report.handmade import (
    MEMORY,
    SPEED,
    Fake,
    Other,
    baseline,
    findings,
    report,
    variant,
)


def test_ratios_are_paired_by_round() -> None:
    found = report(baseline(), variant(Fake(), speed=1.5))["variants"][1]
    ratio, alone = found["ratio"], found["tokens_per_second"]
    assert ratio["median"] == pytest.approx(1.5)  # the weather cancels, only the noise is left
    assert 1.48 < ratio["low"] < ratio["high"] < 1.52
    assert alone["high"] / alone["low"] > 2  # one variant by itself carries the weather


def test_only_rounds_that_both_variants_have_are_compared() -> None:
    base, short = baseline(), variant(Fake(), speed=1.5, noise=(1, 1, 1, 1, 1))
    short.rounds = short.rounds[:2]
    ratio = ratio_to(short, base)
    assert ratio is not None
    assert (ratio.rounds, ratio.median) == (2, pytest.approx(1.5))


def test_the_numbers_of_an_variant_are_its_measured_steps() -> None:
    found = report(baseline(), variant(Fake()))["variants"][0]
    assert found["step_seconds"]["p50"] == pytest.approx(0.3)
    assert 0.4 < found["step_seconds"]["p99"] <= 0.9
    assert found["padding_share"] == pytest.approx(0.2)
    assert found["ratio"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    assert found["verdict"] == "baseline"


def test_a_failed_variant_has_its_reason_and_no_result() -> None:
    failed = variant(Fake(((SPEED, 1.1),)), failed="the process ended with code -9: killed")
    found = report(baseline(), failed, variant(Other(), speed=2.0))
    row = found["variants"][1]
    assert row["verdict"] == "failed: the process ended with code -9: killed"
    assert set(row["ratio"].values()) == set(row[SPEED].values()) == {None}
    assert row["eval_loss"] is row[MEMORY] is None
    assert row["rounds"] == failed.rounds  # what is known of its way there stays in the file
    assert found["variants"][2]["verdict"] == "helped"  # the others go on


def test_an_variant_that_never_started_is_a_row_of_the_report() -> None:
    found = report(baseline(), Variant("x", Plan([Fake()]), failed="no technique is called 'x'"))
    assert found["variants"][1]["verdict"] == "failed: no technique is called 'x'"
    assert found["variants"][1]["padding_share"] is None
    assert found["quality"]["verdict"] == "undecided"


def test_against_a_failed_baseline_nothing_is_said() -> None:
    found = report(baseline(failed="no memory"), variant(Fake(), speed=2.0))
    assert found["variants"][1]["verdict"] == "undecided: the baseline has no result"
    assert found["variants"][1]["ratio"]["median"] is None
    assert found["variants"][0]["ratio"]["median"] is None
    assert found["quality"]["text"].startswith("not measured")


def test_an_variant_that_failed_after_its_last_round_keeps_its_numbers() -> None:
    late = variant(Fake(), speed=1.5, effective=[], unfinished="generate: no room")
    row = report(baseline(), late)["variants"][1]
    assert row["ratio"]["median"] == pytest.approx(1.5)
    assert (row["eval_loss"], row[MEMORY]) == (2.0, 4e9)
    assert row["verdict"] == ("undecided: what its techniques did is not known (generate: no room)")
    assert row["effective"] == [
        {"technique": "fake", "effective": None, "evidence": "generate: no room"}
    ]
    assert (
        report(baseline(unfinished="no room"), late)["variants"][0]["verdict"]
        == "baseline: no room"
    )


def test_the_articles_example_costs_what_they_say() -> None:
    price = {"currency": "CNY", "per_device_hour": 0.6}
    recipe = Recipe(model="m", dataset="d", max_steps=1, price=price)
    found = cost_of(recipe.price, seconds=1.8 * 3600, tokens=2_000_000, devices=4)
    assert found is not None
    assert found["total"] == pytest.approx(4.32)
    assert found["device_hours"] == pytest.approx(7.2)
    assert found["per_million_tokens"] == pytest.approx(2.16)
    assert cost_of(None, 1.0, 1, 1) is None


def test_samples_come_from_the_baseline_and_the_last_variant() -> None:
    text = [{"prompt": "p", "answer": "a"}]
    variants = [
        baseline(samples=text),
        variant(Fake(), samples=text),
        variant(Fake(), Other(), samples=text),
    ]
    assert [s["variant"] for s in report(*variants)["samples"]] == ["baseline", "fake+other"]


def test_what_others_found_is_handed_through_as_it_is() -> None:
    design = {"rounds": 5, "dropped": ["without packed"], "resumed": False}
    lines = [{"what": "split", "verdict": "equal", "measured": 0.0, "tolerance": 1e-6, "text": "x"}]
    fake = variant(
        Fake(), kind="single", foreign_load=[0.1, 0.2], warmup={"steps": 4, "seconds": 2.0}
    )
    fake.ledger = {"step": {"forward": 0.1}, "utilisation": None}
    energy = {"kwh_per_million_tokens": {"baseline": 0.2}, "source": "a meter"}
    found = findings(
        *(baseline(), fake),
        design=design,
        invariance=lines,
        verification=[],
        cost={"energy": energy},
    )
    assert (found["design"], found["invariance"], found["verification"]) == (design, lines, [])
    assert found["cost"]["energy"] == energy
    row = found["variants"][1]
    assert (row["kind"], row["foreign_load"], row["ledger"]) == ("single", [0.1, 0.2], fake.ledger)
    assert row["warmup"]["steps"] == 4
    read_report(found)


def test_what_nobody_measured_is_null() -> None:
    found = findings(baseline(), variant(Fake()))
    for key in ("design", "invariance", "verification", "noise", "interaction"):
        assert found[key] is None
    for key in ("foreign_load", "warmup", "ledger", "rebuilt"):
        assert found["variants"][1][key] is None
    assert found["variants"][0]["p_value"] is None
