"""The page as a whole: its sections by what was measured, its size, and any report at all."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from hasten.errors import InputError
from hasten.formatting import span
from hasten.report.page import page_of, render_markdown, write_report
from hasten.report.schema import REPORT, as_json, read_report
from report.report_pages import Page, Report, full_report, large_report, reports

DOC = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"


def html_of(report: Report) -> str:
    return page_of(as_json(report, "report"), read_report(report))


def page(report: Report) -> Page:
    return Page(html_of(report))


def test_the_full_example_shows_every_section() -> None:
    found = page(full_report())
    first = ["variants", "unpaid", "quality", "step", "memory", "predicted", "stability"]
    rest = ["effective", "claims", "sample", "cost", "gaps", "reproduction"]
    assert found.sections() == [*first, *rest]
    targets = [attributes["href"] for tag, attributes in found.elements if tag == "a"]
    assert targets == [f"#{name}" for name in found.sections()]
    said = found.words()
    for words in (
        "EXAMPLE with invented numbers",
        "noise floor 1.2 %",
        "a second copy of baseline ran at",
        "Together, over the product of the single gains: 0.97× [0.95, 0.99]",
        "ROUNDING one step's gradient against float64 5.2e-07 0.0001 equal",
        "eval loss over paired seeds, 3 seeds 1.004 1.01 undecided",
        "rows packed or padded 4.4e-07 0.0001 equal",
        "Eval loss Against baseline token accuracy baseline 2.9403 – 0.3815",
        "p < 0.001 (Holm)",
        "would be decided by 14 more rounds",
        "the second build was faster by more than chance",
        "Rounds measured again because of it: 2.",
        "kWh per million tokens",
        "The experiment itself: 45 min on the machine, 0.3164 EUR.",
        "paid for itself after 2.3 hours",
        "without checkpoints: the budget of 60 min was spent",
        "In two groups",
        "rate of a device 1,240 tokens/s 1,195 tokens/s 0.96× yes",
        "peak memory 1.31 GB 1.62 GB 1.24× no",
        "optimizer 41 ms not measured – –",
        "ranks of each variant 2",
    ):
        assert words in said, words


def test_a_p_value_that_the_verdict_has_is_not_shown_twice() -> None:
    report = full_report()
    variant = next(v for v in report["variants"] if v.get("p_value") is not None)
    variant |= {"p_value": 0.0623, "corrected": True}
    variant["verdict"] = "undecided: not certain among several (p = 0.0623, at most 0.05 wanted)"
    said = page(report).words()
    assert "(p = 0.0623, at most 0.05 wanted)" in said
    assert "p 0.062" not in said.replace("\xa0", " ")


def test_a_curve_has_two_points_and_an_unknown_bound_is_a_dash() -> None:
    report = full_report()
    assert "Eval loss against tokens" in page(report).words()
    for variant in report["variants"]:
        variant["eval_curve"] = (variant.get("eval_curve") or [])[-1:]
    said = page(report).words()
    assert "Eval loss against tokens" not in said
    assert "Training loss against tokens" in said
    assert "against float64 not measured – not tested" in said


def test_a_ratio_that_the_text_tells_is_not_told_twice() -> None:
    report = full_report()
    for key in ("noise", "interaction"):
        ratio = span(report[key]["ratio"], "times")
        report[key]["text"] = f"In a sentence of its own: {ratio}."
    said = page(report).words()
    assert "a second copy of baseline ran at" not in said
    assert "over the product of the single gains" not in said
    assert said.count("In a sentence of its own") == 2


def test_what_no_key_says_is_named_and_has_no_section() -> None:
    report = full_report()
    new = (
        "design",
        "noise",
        "interaction",
        "invariance",
        "verification",
        "cost",
        "mfu",
        "predicted",
    )
    report = {key: value for key, value in report.items() if key not in new}
    gone = (
        "kind",
        "ledger",
        "foreign_load",
        "warmup",
        "rebuilt",
        "p_value",
        "rounds_needed",
        "mfu",
    )
    report["variants"] = [
        {k: v for k, v in variant.items() if k not in gone} for variant in report["variants"]
    ]
    found = page(report)
    assert not {"step", "cost", "predicted"} & set(found.sections())
    said = found.words()
    for missing in ("noise", "the proof of equal", "independence", "where a step", "what memory"):
        assert f"Not measured: {missing}" in said
    assert "Not measured: energy" in said
    assert not re.search(r"\b(None|nan|null)\b", said)


def test_an_inner_part_that_is_missing_is_not_a_zero() -> None:
    report = full_report()
    for variant in report["variants"]:
        variant["ledger"] = {"step": {"forward": 0.5, "backward": None}}
    said = page(report).words()
    assert "Part baseline all forward 500 ms 500 ms" in said
    assert "backward: not measured" in said
    assert not re.search(r"\b0 ms\b", said.partition("Where a step's time goes")[2][:600])


@pytest.mark.parametrize(("variants", "rounds"), [(40, 50), (200, 8), (3, 5_000)])
def test_large_experiments_stay_light(variants: int, rounds: int) -> None:
    html = html_of(large_report(variants, rounds))
    assert len(html.encode()) < 500_000
    if variants == 40:  # the size that is promised: nothing of it may be left out
        assert "This page was shortened" not in html
        drawn = html.partition('<div class="wide">')[2].partition("</svg>")[0]
        assert "only packed" in html
        assert drawn


@pytest.mark.parametrize("text", ["x" * 60_000, "a <b> " * 10_000, "梯\u202e" * 6_000])
def test_texts_of_any_length_leave_a_light_page_and_a_whole_file(text: str, tmp_path: Path) -> None:
    report = _grown(full_report(), text)
    html = write_report(report, tmp_path).read_text(encoding="utf-8")
    assert len(html.encode()) < 500_000
    assert "This page was shortened" in html
    assert json.loads((tmp_path / "report.json").read_text())["title"] == report["title"]
    assert max(map(len, render_markdown(report).partition("\n\n")[2].splitlines())) < 3_000


def _grown(report: Report, text: str) -> Report:
    """A text of that length wherever a report may hold one, but not in every one of forty."""
    report["title"] += text
    report["quality"]["text"] = report["interaction"]["text"] = text
    report["variants"][1]["verdict"] = f"failed: {text}"
    report["variants"][2]["verdict"] = text
    report["variants"][3]["name"] = text
    report["variants"][4]["techniques"] = [text]
    report["verification"][0]["text"] = report["claims"][0]["source"] = text
    report["hardware"][text] = text
    report["recipe"][text] = {"deep": [text]}
    report["design"]["dropped"] = [text] * 12 + [text[:500]] * 300
    return report


@given(report=reports())
def test_any_report_that_can_be_read_becomes_a_page(report: Report) -> None:
    html = html_of(report)
    found = Page(html)
    assert found.stack == [""]
    assert len(html.encode()) < 500_000
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", html)
    shapes = [v for tag, a in found.elements for k, v in a.items() if k in ("x", "y", "points")]
    assert not re.search(r"\b(nan|inf)\b", " ".join(map(str, shapes)))
    render_markdown(report).encode()


def test_a_report_nested_without_end_is_refused() -> None:
    recipe: dict[str, Any] = {}
    for _ in range(5_000):
        recipe = {"deeper": recipe}
    with pytest.raises(InputError, match="nested too deeply"):
        read_report(full_report() | {"recipe": recipe})


def test_every_table_has_headers_and_a_caption_and_every_drawing_words() -> None:
    html = html_of(full_report())
    tables = re.findall(r"<table.*?</table>", html, re.S)
    assert len(tables) > 8
    for table in tables:
        assert '<caption class="hidden">' in table
        assert 'scope="col"' in table
        rows = re.findall(r"<tr>.*?</tr>", table.partition("<tbody>")[2], re.S)
        assert all('<th scope="row">' in row for row in rows)
    drawings = re.findall(r"<svg .*?</svg>", html, re.S)
    assert len(drawings) > 10
    for drawing in drawings:
        assert re.search(r'role="img".*?><title>[^<]+</title><desc>[^<]+</desc>', drawing)


def test_every_key_is_described_and_stands_in_the_example() -> None:
    text, example = DOC.read_text(encoding="utf-8"), full_report()
    for place, key in _keys(REPORT, example):
        assert f"`{key}`" in text, f"{place} isn't described"


def _keys(shape: Any, value: Any, place: str = "report") -> list[tuple[str, str]]:
    """Every key of a shape; fails where the example has no value for it."""
    if isinstance(shape, list):
        assert value, f"{place} is empty in the example"
        some: dict[str, Any] = {}
        for item in value if isinstance(shape[0], dict) else []:
            some |= {k: v for k, v in item.items() if v not in (None, [])}
        return _keys(shape[0], some, place) if some else []
    if not isinstance(shape, dict):
        return []
    found = []
    for name, inner in shape.items():
        key = name.rstrip("?")
        inside = f"{place}.{key}"
        optional = ("beside", "communication", "copy", "other", "median")
        if key not in optional:
            assert key in value, f"{inside} isn't in the example"
        found.append((inside, key))
        found += _keys(inner, value.get(key), inside) if value.get(key) else []
    return found
