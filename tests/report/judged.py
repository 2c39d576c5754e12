"""Reports that tests write by hand get the effects against other rows that their rounds give."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hasten.report.conclusions import fastest_of_equal_quality, measured_variant
from hasten.report.judgement import judge_variants
from hasten.report.schema import read_report


def judged(report: Mapping[str, Any]) -> dict[str, Any]:
    """The report with `against`, `effect`, `quality` and `fastest`.

    A row that is compared with the baseline keeps its own verdict, and its ratio is its effect.
    """
    read = read_report(report)
    base = read["variants"][0]
    variants = [measured_variant(row, base) for row in read["variants"]]
    plans = {row["name"]: row["techniques"] for row in read["variants"]}
    found = judge_variants(
        variants, read["verification"], plans=plans, floor=read["noise"]["floor"]
    )
    rows = []
    for plain, row, said in zip(report["variants"], read["variants"], found, strict=True):
        of_row: dict[str, Any] = {"against": base["name"], "effect": row["ratio"]}
        if row["verdict"].partition(":")[0] in ("baseline", "failed"):
            of_row = {"against": None, "effect": None}
        elif said.against not in (None, base["name"]) and said.effect is not None:
            of_row = {
                "against": said.against,
                "effect": said.effect.summary(),
                "verdict": said.verdict,
                "p_value": said.p_value,
                "corrected": said.corrected,
                "rounds_needed": said.rounds_needed,
            }
        rows.append({"quality": said.quality, **plain, **of_row})
    best = fastest_of_equal_quality({"variants": rows})
    return {**report, "variants": rows, "fastest": best and best["name"]}
