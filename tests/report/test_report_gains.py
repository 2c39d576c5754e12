"""What the report derives from pairs of variants: rungs, switches in company, what did not pay.

The reports are written by hand: their effects are found from their rounds.
"""

from typing import Any

import pytest

from hasten.measure.statistics import paired_ratio
from hasten.report.conclusions import (
    fastest_of_equal_quality,
    result_of,
    switches,
    unpaid,
    variants_that_hurt,
)
from hasten.report.judgement import cumulative_of
from hasten.report.page import page_of, recipe_plan, render_markdown, table_of, unmeasured
from hasten.report.schema import read_report
from hasten.report.svg import drawings
from report.judged import judged
from report.report_pages import Page, Report, full_report

WEATHER = (1.0, 0.6, 1.5, 1.1)  # what slows a round slows all variants of it
JITTER = (1.001, 0.999, 1.0005, 0.9995)


def variant(name: str, rate: float, techniques: list[str], verdict: str, **more: Any) -> Report:
    spread = {"median": rate, "low": rate - 1, "high": rate + 1}
    ratio = {"median": rate / 100, "low": rate / 100 - 0.01, "high": rate / 100 + 0.01}
    rounds = [rate * w * j for w, j in zip(WEATHER, JITTER, strict=True)]
    named = {"name": name, "techniques": techniques, "verdict": verdict, "rounds": rounds}
    return {**named, "tokens_per_second": spread, "ratio": ratio, **more}


def read(variants: list[Report], **more: Any) -> Report:
    free = {"hardware": {}, "versions": {}, "recipe": {}, "seed": 0, **more}
    head = {"schema": 2, "title": "t", "created": "2026-11-20T14:03:27+00:00", "command": "c"}
    return read_report(judged({**head, "variants": variants, **free}))


def apart(**more: Any) -> Report:
    """a gains alone and beside b; b gains alone, but nothing beside a."""
    return read(
        [
            variant("baseline", 100, [], "baseline", kind="baseline"),
            variant("again", 101, [], "baseline", kind="again"),
            variant("only a", 150, ["a"], "helped", kind="single"),
            variant("only b", 120, ["b"], "helped", kind="single"),
            variant("only c", 101, ["c"], "no effect: c did not act", kind="single"),
            variant("without a", 121, ["b", "c"], "helped", kind="leave-one-out"),
            variant("without b", 151, ["a", "c"], "helped", kind="leave-one-out"),
            variant("without c", 151, ["a", "b"], "helped", kind="leave-one-out"),
            variant("all", 151, ["a", "b", "c"], "helped", kind="all"),
        ],
        **more,
    )


def cumulative(
    losses: tuple[float | None, ...] = (2.0, 2.0, 2.0, 2.0), rounds: list[float] | None = None
) -> Report:
    """a gains, b halves the speed, c gains on top of it."""
    speeds, names = (100, 150, 75, 90), ["a", "b", "c"]
    variants = [variant("baseline", 100, [], "baseline", kind="baseline")]
    for number, speed in enumerate(speeds[1:], start=1):
        verdict = "helped" if speed > 100 else "hurt"
        kind = "all" if number == 3 else "cumulative"
        variants.append(
            variant(f"+ {names[number - 1]}", speed, names[:number], verdict, kind=kind)
        )
    if rounds is not None:
        ratios = [a / b for a, b in zip(rounds, variants[0]["rounds"], strict=True)]
        variants[2] |= {"rounds": rounds, "ratio": paired_ratio([1.0] * 4, ratios).summary()}
    for row, loss in zip(variants, losses, strict=True):
        row["eval_loss"] = loss
    return read(variants, quality={"margin": 0.01, "verdict": "not worse", "text": ""})


@pytest.mark.parametrize("loss", [2.1, None])
def test_a_fast_row_whose_model_is_worse_or_unknown_is_not_the_fastest_of_equal_quality(
    loss: float | None,
) -> None:
    found = fastest_of_equal_quality(cumulative((2.0, loss, 2.0, 2.0)))
    assert found is not None
    assert found["name"] == "baseline"  # all others are slower


def test_without_a_baseline_s_speed_no_row_is_the_fastest() -> None:
    report = cumulative()
    report["variants"][0]["tokens_per_second"]["median"] = None
    assert fastest_of_equal_quality(report) is None


def test_a_row_is_slower_than_the_row_above_it_only_beyond_its_interval() -> None:
    assert variants_that_hurt(cumulative()["variants"]) == {"+ b"}
    unsure = [150 * w * j for w, j in zip(WEATHER, (0.6, 1.5, 0.7, 1.1), strict=True)]
    assert variants_that_hurt(cumulative(rounds=unsure)["variants"]) == set()  # it may be either
    assert (
        variants_that_hurt(apart()["variants"]) == set()
    )  # leaving one out is slower, which is good news of it


def test_a_plan_of_a_report_is_the_recipe_s_with_its_settings() -> None:
    plan = ["a", {"b": {"chunk": 3}}, {"technique": "c"}]
    report = apart(recipe={"plan": plan})
    variants = {variant["name"]: variant for variant in report["variants"]}
    variants["all"]["techniques"][1] = "b(chunk=3)"
    assert recipe_plan(variants["all"], report) == plan
    assert recipe_plan(variants["only a"], report) == ["a"]
    assert recipe_plan(variants["baseline"], report) == []
    assert recipe_plan(variants["all"], apart(recipe={"plan": ["a"]})) is None
    assert recipe_plan(variants["all"], apart(recipe={"plan": "auto"})) is None


def test_a_row_that_is_slower_than_the_row_above_it_is_red_on_the_page() -> None:
    report = cumulative()
    page = page_of(report, report | {"cut": ""})
    row = page.split('<tr class="hurt"><th scope="row">')[1].partition("</th>")[0]
    assert row == '<span class="whole">+\xa0b</span>'
    assert page.count('<tr class="hurt">') == 1


def test_a_switch_is_measured_alone_and_beside_all_the_others() -> None:
    found = switches(apart()["variants"])
    assert [(s.technique, s.alone["name"]) for s in found if s.alone] == [
        ("a", "only a"),
        ("b", "only b"),
        ("c", "only c"),
    ]
    gains = [round(s.with_others.median, 3) for s in found if s.with_others]
    assert gains == [pytest.approx(151 / 121, abs=1e-3), 1.0, 1.0]


def test_the_table_says_against_which_variant_each_effect_is() -> None:
    table = table_of(apart())
    assert table.columns["effect"] == "against baseline or all [95 %]"
    rows = {row["name"]: row for row in table.rows}
    assert rows["without a"]["effect"].startswith("0.80×")
    assert rows["without a"]["effect"].endswith(" of all")
    assert (rows["without a"]["verdict"], rows["without a"]["ratio"][:5]) == ("hurt", "1.21×")
    assert rows["only a"]["effect"].startswith("1.50×")
    assert rows["only a"]["effect"].endswith("]")


def test_page_and_markdown_show_the_same_cells() -> None:
    report = full_report()
    table = table_of(read_report(report))
    said = Page(page_of(report, read_report(report) | {"cut": ""})).words()
    lines = render_markdown(report).splitlines()
    for line, row in zip(lines[2:], table.rows, strict=False):
        assert [cell.strip() for cell in line.strip("|").split("|")] == list(row.values())
        assert f"{row['name']} {row['effect']} {row['verdict']}" in said


def test_what_did_not_pay_is_listed_once_with_its_reason() -> None:
    rows = unpaid(apart())
    assert [row["name"] for row in rows] == ["only c", "b"]
    assert rows[0]["why"].endswith("no effect: c did not act")
    assert rows[1]["why"].startswith("alone 1.20× [1.19, 1.21], but with all the others 1.00×")


def test_a_gain_within_this_machines_noise_floor_did_not_pay_and_is_not_drawn_as_one() -> None:
    for floor, within in ((0.01, False), (0.3, True)):  # a's gain beside the others is 1.25
        report = apart(noise={"floor": floor})
        assert ("a" in [row["name"] for row in unpaid(report)]) == within
        assert ("bar gain hollow" not in drawings(report)["pairs"][0]) == within


def test_a_switch_that_slows_the_others_did_not_pay_and_is_not_called_noise() -> None:
    report = read(
        [
            variant("baseline", 100, [], "baseline"),
            variant("without a", 200, ["b"], "helped", kind="leave-one-out"),
            variant("without b", 120, ["a"], "helped", kind="leave-one-out"),
            variant("all", 150, ["a", "b"], "helped", kind="all"),
        ]
    )
    rows = unpaid(report)
    assert [row["name"] for row in rows] == ["a"]
    assert rows[0]["why"].endswith(": slower with it than without")
    assert "- did not pay: a: " in render_markdown(report)


def test_a_switch_that_the_guard_objects_to_did_not_pay() -> None:
    row = {"technique": "a", "verdict": "differs", "text": "gradient off by 3, allowed 1e-4"}
    rows = unpaid(apart(verification=[row]))
    why = "differs: gradient off by 3, allowed 1e-4"
    assert rows[-1] == {"name": "a", "why": why, "word": "worse"}
    markdown = render_markdown(full_report() | {"verification": [row]})
    assert "- did not pay: a: differs: gradient off by 3, allowed 1e-4" in markdown


def test_a_rung_that_takes_back_did_not_pay_though_it_beats_the_baseline() -> None:
    report = read(
        [
            variant("baseline", 100, [], "baseline"),
            variant("+ a", 150, ["a"], "helped"),
            variant("+ b", 140, ["a", "b"], "helped"),
        ]
    )
    assert [variant["against"] for variant in report["variants"]] == [None, "baseline", "+ a"]
    assert [row["name"] for row in unpaid(report)] == ["+ b"]
    assert {"waterfall"} == {"waterfall", "pairs", "ratio"} & set(drawings(report))
    assert switches(report["variants"]) == []  # it would say the same again


def test_a_ladder_is_found_among_other_variants_by_its_kind() -> None:
    report = read(
        [
            variant("baseline", 100, [], "baseline", kind="baseline"),
            variant("again", 100, [], "baseline", kind="again"),
            variant("+ a", 150, ["a"], "helped", kind="cumulative"),
            variant("only b", 110, ["b"], "helped", kind="single"),
            variant("+ b", 170, ["a", "b"], "helped", kind="all"),
        ]
    )
    assert [a["name"] for a in cumulative_of(report["variants"])] == ["baseline", "+ a", "+ b"]
    assert {"waterfall", "pairs"} <= set(drawings(report))


def test_the_result_is_the_whole_plan_wherever_it_stands() -> None:
    variants = apart()["variants"]
    assert result_of([*variants[:2], variants[-1], *variants[2:-1]])["name"] == "all"
    assert (
        result_of(read([variant("baseline", 1, [], "baseline")])["variants"])["name"] == "baseline"
    )


def test_each_drawing_of_speed_shows_what_the_others_do_not() -> None:
    found = drawings(apart())
    assert "with the others" in found["pairs"][0]
    assert "only a" not in found["ratio"][0]
    assert ">again<" not in found["ratio"][0]


def test_gaps_name_what_failed_what_was_dropped_and_what_was_not_tested() -> None:
    report = apart(
        design={"dropped": ["without d: no time was left"]},
        verification=[{"technique": "b", "verdict": "not tested", "text": "needs a GPU"}],
    )
    report["variants"][3]["verdict"] = "failed: out of memory"
    found = unmeasured(report)
    assert found[:3] == [
        "without d: no time was left",
        "only b: failed: out of memory",
        "Equal quality of b: not tested: needs a GPU",
    ]
    assert not [line for line in found if "the proof of equal quality" in line]
