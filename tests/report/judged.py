"""Reports that tests write by hand get the effects against other rows that their rounds give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hasten.core.technique import Fidelity
from hasten.report.conclusions import fastest_of_equal_quality, measured_variant
from hasten.report.judgement import judge_variants
from hasten.report.schema import read_report


@dataclass(frozen=True)
class Named:
    """Stands for a technique of this name."""

    text: str
    fidelity: Fidelity = Fidelity.ROUNDING

    def __str__(self) -> str:
        return self.text


def judged(report: Mapping[str, Any]) -> dict[str, Any]:
    """The report with `against`, `effect`, `quality` and `fastest`.

    A row that is compared with the baseline keeps its own verdict, and its ratio is its effect.
    """
    read = read_report(report)
    base = read["variants"][0]
    variants = [measured_variant(row) for row in read["variants"]]
    for variant, row in zip(variants, read["variants"], strict=True):
        variant.plan = [Named(name) for name in row["techniques"]]  # type: ignore[assignment]
        variant.kind, variant.effective = row["kind"], row["effective"]
        if row["eval_loss"] is not None:
            variant.eval_data = [((row["eval_curve"] or [(1, 0)])[-1][0] or 0, row["eval_loss"])]
    found = judge_variants(variants, read["verification"])
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
