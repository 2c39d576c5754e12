"""The report's files, read back with independent parsers, on a realistic and on hostile reports."""

import copy
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contrast import contrast
from hasten.errors import InputError
from hasten.formatting import span
from hasten.report.page import render_markdown, write_report
from report.report_pages import Page, Report, full_report

SCHEMA_DOC = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"


def written(report: Report, folder: Path) -> Page:
    return Page(write_report(report, folder).read_text(encoding="utf-8"))


def smallest() -> Report:
    block = re.search(r"```json\n(.*?)```", SCHEMA_DOC.read_text(encoding="utf-8"), re.S)
    assert block
    result: Report = json.loads(block[1])
    return result


def test_both_files_carry_the_whole_report(report: Report, tmp_path: Path) -> None:
    page = written(report, tmp_path / "made" / "if missing")
    file = tmp_path / "made" / "if missing" / "report.json"
    assert json.loads(page.data) == json.loads(file.read_text()) == report
    assert page.stack == [""]  # every element was closed, in order


def test_the_head_says_how_much_faster_and_how_sure(report: Report, tmp_path: Path) -> None:
    head = written(report, tmp_path).words().split("Speed of each variant")[0]
    ratio = report["variants"][-1]["ratio"]
    assert f"{ratio['median']:.2f}×" in head
    assert f"interval {ratio['low']:.2f}× to {ratio['high']:.2f}×" in head
    for said in (
        "61.20 GB → 38.40 GB",
        "−37.3 %",
        "2.4131 → 2.4142",
        "not worse",
        "8 rounds",
        "H100",
    ):
        assert said in head


def test_the_page_needs_no_network_and_runs_no_script(report: Report, tmp_path: Path) -> None:
    page = written(report, tmp_path)
    scripts = [attributes for tag, attributes in page.elements if tag == "script"]
    assert scripts == [{"type": "application/json", "id": "report-data"}]
    for tag, attributes in page.elements:
        assert tag not in ("link", "img", "iframe", "object", "form")
        assert "src" not in attributes
        assert (attributes.get("href") or "#").startswith("#"), "a place on the page itself"
        assert not [name for name in attributes if name.startswith("on")]
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "default-src 'none'" in html
    assert not re.search(r"url\(|@import", html)


def test_text_and_marks_stand_out_in_light_dark_and_print(report: Report, tmp_path: Path) -> None:
    html = write_report(report, tmp_path).read_text(encoding="utf-8")
    palettes = [
        dict(re.findall(r"--([\w-]+): (#\w{6})", block)) for block in html.split(":root {")[1:]
    ]
    assert len(palettes) == 3
    for colours in palettes:
        for text in ("ink", "muted", "good", "bad"):
            assert contrast(colours[text], colours["page"]) >= 4.5, text
        for mark in ("accent", "base", "other", "bad", *(f"s{i}" for i in range(1, 9))):
            assert contrast(colours[mark], colours["page"]) >= 3, mark
        for soft in ("good", "bad"):
            assert contrast(colours[soft], colours[f"{soft}-soft"]) >= 4.5, soft


def hostile(value: Any, attack: str) -> Any:
    """The report with the attack at the end of every text, but for the time of writing.

    The words that the page goes by stay: of a verdict the reason is attacked, a variant's kind
        isn't.
    """
    if isinstance(value, dict):
        ways = {"verdict": f": {attack}", "quality": f": {attack}", "created": "", "kind": ""}
        return {k: hostile(v, ways.get(k, attack)) for k, v in value.items()}
    if isinstance(value, list):
        return [hostile(item, attack) for item in value]
    return value + attack if isinstance(value, str) else value


def structure(page: Page) -> list[tuple[str, list[Any]]]:
    return [(tag, sorted(attributes)) for tag, attributes in page.elements]


@pytest.fixture(scope="module")
def calm() -> dict[str, Any]:
    """The structure of each report's page with texts that attack nothing, once it was written."""
    return {}


@pytest.mark.parametrize(
    "attack",
    [
        "</script><script>alert(1)</script>",
        "<!--<script>",
        "</title></style></pre></svg><img src=x onerror=alert(1)>",
        "\" onload='alert(1)' x=\"",
        "{{ 7 * 7 }}{% raw %}",
        "]]>&lt;script&gt;&#60;",
        "\x00\x1b[31m\x07\u202e\u2066\ufeff\ud800\u2028",
    ],
)
@pytest.mark.parametrize("which", ["realistic", "full"])
def test_no_text_in_the_report_can_change_the_page(
    report: Report, attack: str, which: str, tmp_path: Path, calm: dict[str, Any]
) -> None:
    report = full_report() if which == "full" else report
    attacked = hostile(report, attack)
    page = written(attacked, tmp_path)
    if which not in calm:
        calm[which] = structure(written(hostile(report, "harmless"), tmp_path / "calm"))
    assert structure(page) == calm[which]
    assert json.loads(page.data) == attacked
    html = (tmp_path / "report.html").read_bytes().decode("utf-8")
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", html)


def test_a_sample_is_shown_word_for_word(report: Report, tmp_path: Path) -> None:
    answer = "\n  if a < b && c:\n\treturn '</pre>'"
    report["samples"][0]["answer"] = answer
    assert answer in written(report, tmp_path).text


def test_a_long_sample_says_how_much_is_missing(report: Report, tmp_path: Path) -> None:
    report["samples"] = [{"prompt": "p", "answer": "x" * 2500, "variant": "baseline"}] * 8
    said = written(report, tmp_path).words()
    assert "x… (500 more characters in report.json)" in said
    assert "2 more in report.json" in said


def test_what_was_not_measured_is_said_and_never_a_number(tmp_path: Path) -> None:
    report = smallest()
    report["variants"][1]["ratio"] = {"median": None, "low": None, "high": None}
    page = written(report, tmp_path)
    said = page.words()
    head = said.split("Speed of each variant")[0]
    assert "packing (PackWithinStep) against baseline; ratio not measured" in head
    assert "Peak memory not measured → not measured Eval loss not measured" in head
    assert "Repeats not measured" in head
    assert "Equal quality: not measured" in said
    for invented in ("nan", "None", "null", "0.0000", "0 MiB"):
        assert not re.search(rf"\b{invented}\b", said), invented


def test_one_round_has_a_ratio_without_an_interval(tmp_path: Path) -> None:
    report = smallest()
    report["variants"][1]["ratio"] = {"median": 1.5, "low": None, "high": None}
    said = written(report, tmp_path).words()
    assert "1.50× 1,190 tokens per second" in said
    assert "packing (PackWithinStep) against baseline; interval not measured" in said


def test_a_baseline_alone_is_compared_with_nothing(tmp_path: Path) -> None:
    report = smallest()
    del report["variants"][1]
    head = written(report, tmp_path).words().split("Speed of each variant")[0]
    assert "nothing to compare" in head
    assert "×" not in head


def test_numbers_that_are_not_finite_become_null(report: Report, tmp_path: Path) -> None:
    report["variants"][1]["eval_loss"] = math.nan
    report["variants"][1]["loss_curve"][3] = [1e5, math.inf]
    report["variants"][1]["peak_memory_bytes"] = np.int64(2**30)
    variant = json.loads(written(report, tmp_path).data)["variants"][1]
    assert (variant["eval_loss"], variant["loss_curve"][3]) == (None, [1e5, None])
    assert variant["peak_memory_bytes"] == 2**30


def test_a_refused_report_leaves_the_old_files_as_they_were(report: Report, tmp_path: Path) -> None:
    write_report(report, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert sorted(before) == ["report.html", "report.json"]
    with pytest.raises(InputError):
        write_report(report | {"title": None}, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_folder_that_cannot_be_written_is_the_users_to_mend(
    report: Report, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="name another place"):
        write_report(report, tmp_path / "file")


def test_the_report_given_is_not_changed(report: Report, tmp_path: Path) -> None:
    before = copy.deepcopy(report)
    write_report(report, tmp_path)
    assert report == before


def test_the_markdown_table_has_a_row_per_variant_and_equal_columns(report: Report) -> None:
    lines = render_markdown(report).partition("\n\n")[0].splitlines()
    assert len(lines) == 2 + len(report["variants"])
    assert len({len(line) for line in lines}) == 1
    cells = [cell.strip() for cell in lines[-1].strip("|").split("|")]
    assert cells[0] == "all techniques"
    ratio = span(report["variants"][-1]["ratio"], "times")
    assert cells[1:] == [ratio, "helped", "34,840", "not worse", "38.40 GB", "2.4142"]


def test_a_name_cannot_break_the_markdown_table() -> None:
    report = smallest()
    report["variants"][1]["name"] = "a|b\n<img> [x](y) \x1b[31m`"
    row = render_markdown(report).splitlines()[3]
    assert len(re.findall(r"(?<!\\)\|", row)) == 8
    assert "\x1b" not in row
    assert r"\<img\> \[x\](y)" in row
    assert row.count("not measured") == 2


def test_a_plan_measured_as_a_whole_says_nothing_of_its_switches(tmp_path: Path) -> None:
    whole, single = smallest(), smallest()
    whole["variants"][1]["techniques"] = ["packed", "fused_adamw"]
    assert "which of its techniques pay is not known" in written(whole, tmp_path / "a").words()
    assert "Everything that was measured paid" in written(single, tmp_path / "b").words()


def test_what_failed_is_not_said_to_have_paid(tmp_path: Path) -> None:
    none, some = smallest(), smallest()
    none["variants"][1] |= {"verdict": "failed: killed", "techniques": ["packed", "fused_adamw"]}
    said = written(none, tmp_path / "a").words()
    assert "paid" not in said
    assert "which of its techniques pay is not known" not in said
    some["variants"].append(some["variants"][1] | {"name": "other", "verdict": "failed: killed"})
    assert (
        "Everything that has a result paid; what has none" in written(some, tmp_path / "b").words()
    )


def test_one_switch_beside_a_second_baseline_is_no_plan_of_unknown_parts(tmp_path: Path) -> None:
    report = smallest()
    again = report["variants"][0] | {"name": "baseline again", "kind": "again"}
    report["variants"].insert(1, again)
    assert "Everything that was measured paid" in written(report, tmp_path).words()
