"""What the report says of several variants together, and how the page lays it out."""

import re
from pathlib import Path
from typing import Any

import pytest

from hasten.core.plan import Plan
from hasten.measure.ablation import Variant
from hasten.report.conclusions import lead_of
from hasten.report.judgement import ratio_to
from hasten.report.page import machine, proofs, render_markdown, table_of, write_report
from hasten.report.schema import read_report
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
from report.judged import judged
from report.test_report_gains import variant as written_variant

RATES = {"baseline": 100.0, "+ a": 150.0, "+ b": 300.0, "+ c": 270.0}
Report = dict[str, Any]


@pytest.fixture
def cumulative() -> Report:
    """Four rungs, of which the last takes back a tenth of what the others gained."""
    variants: list[Report] = []
    for count, (name, rate) in enumerate(RATES.items()):
        names, verdict = ["a", "b", "c"][:count], "helped" if count else "baseline"
        seen = [{"technique": t, "effective": True, "evidence": f"{t} was seen"} for t in names]
        variants.append(written_variant(name, rate, names, verdict, effective=seen))
    free = {"hardware": {}, "versions": {}, "recipe": {"plan": ["a", "b", "c"]}, "seed": 0}
    head = {"schema": 2, "title": "t", "created": "2026-11-20T14:03:27+00:00", "command": "c"}
    return {**head, "variants": variants, **free}


def variants_of(report: Report) -> list[Report]:
    found: list[Report] = read_report(judged(report))["variants"]
    return found


def page(report: Report, folder: Path) -> str:
    text = write_report(judged(report), folder).read_text(encoding="utf-8")
    return text.partition('<script type="application/json"')[0]


def test_a_rung_is_compared_with_the_rung_below(cumulative: Report, tmp_path: Path) -> None:
    said = [row["effect"] for row in table_of(read_report(judged(cumulative))).rows]
    assert [text.split()[0] for text in said] == ["–", "1.50×", "2.00×", "0.90×"]
    assert "[0.90, 0.90]" in said[3] or said[3] == "0.90×"  # paired, so the weather cancels
    assert "Against the row above" in page(cumulative, tmp_path)
    assert "the whole plan</strong> (a, b, c)" in page(cumulative, tmp_path)


def test_variants_that_are_no_ladder_are_compared_with_the_baseline(
    cumulative: Report, tmp_path: Path
) -> None:
    cumulative["variants"][2]["techniques"] = ["b"]
    table = table_of(read_report(judged(cumulative)))
    assert "ratio" not in table.columns  # it would say the same again
    assert [row["effect"][:5] for row in table.rows[1:]] == ["1.50×", "3.00×", "2.70×"]
    assert "Against the row above" not in page(cumulative, tmp_path)
    assert "<strong>+ c</strong> (a, b, c)" in page(cumulative, tmp_path)


def test_a_rung_above_a_failed_one_is_compared_with_the_one_below_it(cumulative: Report) -> None:
    cumulative["variants"][2]["verdict"] = "failed: no memory"
    said = [row["effect"] for row in table_of(read_report(judged(cumulative))).rows]
    assert said[2] == "not measured"
    assert said[3].startswith("1.80×")
    assert said[3].endswith(" of + a")  # which the heading can't say of all rows


def test_the_headline_is_the_fastest_plan_of_equal_quality(
    cumulative: Report, tmp_path: Path
) -> None:
    for row in cumulative["variants"]:
        row["eval_loss"] = 2.0
    assert lead_of(read_report(judged(cumulative)))["name"] == "+ b"
    text = page(cumulative, tmp_path)
    assert '<span class="big">3.00×</span>' in text
    assert "fastest plan of equal quality, without last techniques that have no likely gain" in text
    assert "<pre>plan: [a, b]</pre>" in text
    # One figure for the gain: nothing above the first section can be divided into another one.
    head = text[text.index("<header") : text.index('id="variants"')]
    assert re.findall(r"[\d.]+×", head) == ["3.00×", "2.99×", "3.01×"]
    assert head.count("→") == 2, "of memory and eval loss"
    assert "fastest at equal quality: + b, 3.00× [2.99, 3.01]: `plan: [a, b]`" in render_markdown(
        judged(cumulative)
    )
    cumulative["variants"][2]["quality"] = "worse: eval loss 2.00 → 2.50"  # fast, but worse
    assert lead_of(read_report(judged(cumulative)))["name"] == "+ c"
    assert "fastest at equal quality" not in render_markdown(judged(cumulative))
    del cumulative["variants"][2]["quality"]
    last = cumulative["variants"][3]
    last["rounds"] = [1.3 * rate for rate in last["rounds"]]
    last["ratio"] = {end: 1.3 * value for end, value in last["ratio"].items()}
    assert lead_of(read_report(judged(cumulative)))["name"] == "+ c"
    last["rounds"] = [rate * 1.11 / 1.3 for rate in last["rounds"]]  # as fast as the row above
    last["ratio"] = {end: value * 1.12 / 1.3 for end, value in last["ratio"].items()}
    assert lead_of(read_report(judged(cumulative)))["name"] == "+ b"  # the simpler plan


def test_a_headline_is_a_figure_only_where_that_figure_is_shown(
    cumulative: Report, tmp_path: Path
) -> None:
    plan, base = cumulative["variants"][3], cumulative["variants"][0]
    cumulative["variants"] = [base, plan]
    plan["ratio"] = {"median": 2.81, "low": 0.19, "high": 39.78}
    plan["verdict"] = "undecided"
    text = page(cumulative, tmp_path)
    assert '<span class="big">undecided</span>' in text
    assert "interval 0.19× to 39.78×" in text
    plan["ratio"] |= {"low": 2.5, "high": 3.1}
    plan["verdict"] = "helped"
    assert '<span class="big">2.81×</span>' in page(cumulative, tmp_path)


def test_variants_with_the_same_proof_share_a_row(cumulative: Report) -> None:
    cumulative["variants"][3]["effective"][1]["effective"] = False
    found = [
        (row["technique"], row["effective"], row["variants"])
        for row in proofs(variants_of(cumulative))
    ]
    assert found == [
        ("a", True, "all 3 with it"),
        ("b", True, "+ b"),
        ("b", False, "+ c"),
        ("c", True, "+ c"),
    ]


def test_a_reason_stands_beside_its_verdict_and_below_the_table(
    cumulative: Report, tmp_path: Path
) -> None:
    cumulative["variants"][3]["verdict"] = "failed: the process\nended | with code -9"
    html = page(cumulative, tmp_path)
    assert '<span class="verdict bad">failed</span>' in html
    assert '<span class="reason">the process\nended | with code -9</span>' in html
    table, _, notes = render_markdown(judged(cumulative)).partition("\n\n")
    assert table.splitlines()[-1].split("|")[3].strip() == "failed"
    assert notes == "- + c: failed: the process ended \\| with code -9\n"


def test_the_machine_is_named_by_what_it_trained_on() -> None:
    gpus = [{"name": "H100", "memory_bytes": 80}, {"name": "H100"}]
    host = {"cpu": "EPYC", "usable_cores": 16, "memory_limit_bytes": 25_276_502_016}
    assert machine(host | {"accelerators": gpus, "device": "cuda"}) == (
        "2 × H100 · EPYC · 16 cores · 25.28 GB"
    )
    assert machine(host | {"accelerators": gpus, "device": "cpu"}) == "EPYC · 16 cores · 25.28 GB"


@pytest.mark.parametrize(
    "strange",
    [
        {"accelerators": "many", "usable_cores": "two"},
        {"accelerators": [3, {"name": ["x"]}, {}]},
        {"memory_limit_bytes": "much", "device": 3},
    ],
)
def test_hardware_of_any_form_makes_a_page(
    cumulative: Report, strange: Report, tmp_path: Path
) -> None:
    assert "Hardware" in page(cumulative | {"hardware": strange}, tmp_path)


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
