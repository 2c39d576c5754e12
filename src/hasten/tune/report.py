"""Outputs of a study: its JSON, and one line for users."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hasten.measure.ablation import Variant
from hasten.report.judgement import (
    floor_of,
    idle_techniques,
    judge_variants,
    ratio_to,
    verdict_word,
)
from hasten.tune.space import changes_text
from hasten.tune.study import Study

SCHEMA = 1


def study_document(
    study: Study,
    final_comparison: Mapping[str, Any] | None,
    winner: Mapping[str, Any] | None,
    about: Mapping[str, Any],
) -> dict[str, Any]:
    """The study as plain values (docs/how-to/tune.md)."""
    space = study.space
    return {
        "schema": SCHEMA,
        **about,
        "objective": study.objective,
        "noise": study.start["noise"],
        "ended": study.ended,
        "space": [
            {"name": d.name, "values": [_plain(v) for v in d.values], "needs": _plain(d.needs)}
            for d in space.dimensions
        ],
        "start": {
            "settings": space.settings(space.start),
            "rate": study.start["rate"],
            "memory": study.start["memory"],
        },
        "trials": study.rows,
        "final": [
            {
                "changes": space.changes(point),
                "rounds": [round(math.exp(log), 4) for log in study.final[point]],
            }
            for point in study.leaders(len(study.final))
        ],
        "final_comparison": final_comparison,
        "winner": winner,
    }


def final_rows(variants: Sequence[Variant]) -> dict[str, Any]:
    """The final comparison as the study's JSON has it; places of ``rows`` follow the variants."""
    rows = []
    for variant, judgement in zip(variants, judge_variants(variants), strict=True):
        ratio = ratio_to(variant, variants[0])
        rows.append(
            {
                "name": variant.name,
                "verdict": judgement.verdict,
                "quality": judgement.quality,
                "p_value": judgement.p_value,
                "ratio": None if ratio is None else ratio.summary(),
                "rounds": variant.rounds,
                "peak_memory_bytes": variant.peak_memory_bytes,
                "failed": variant.failed,
                "idle": idle_techniques(variant),
            }
        )
    return {"noise_floor": round(floor_of(variants), 4), "variants": rows}


def is_fit(row: Mapping[str, Any]) -> bool:
    """Returns True if a variant is usable: it ran, and its model is verified as not worse."""
    bad = verdict_word(row["verdict"]) == "failed" or verdict_word(row.get("quality")) == "worse"
    return not bad and row.get("refused") is None


def says_of(row: Mapping[str, Any]) -> str:
    """A variant's verdict in words, with what else speaks against it."""
    clauses = [row["verdict"]]
    clauses += [f"quality {row['quality']}"] if verdict_word(row.get("quality")) == "worse" else []
    clauses += [f"not taken: {row['refused']}"] if row.get("refused") is not None else []
    return "; ".join(clauses)


def winner_of(rows: Sequence[dict[str, Any]]) -> int | None:
    """Index of the variant with the largest ratio among the significantly better ones."""
    better = [
        i
        for i, row in enumerate(rows)
        if verdict_word(row["verdict"]) == "helped"
        and row["ratio"]["median"] is not None
        and is_fit(row)
    ]
    return max(better, key=lambda i: rows[i]["ratio"]["median"], default=None)


def result_sentence(document: Mapping[str, Any]) -> str:
    """The result in a sentence or two."""
    states = [t["state"] for t in document["trials"]]
    counts = "1 trial" if len(states) == 1 else f"{len(states)} trials"
    gone, failed = (states.count(s) for s in ("out of memory", "failed"))
    counts += f", {gone} out of memory" if gone else ""
    counts += f", {failed} failed" if failed else ""
    counts += f"; {document['ended']}."
    winner = document["winner"]
    if winner is None and document["final_comparison"] and not is_proven(document):
        why = document["final_comparison"]["variants"][2]["verdict"].partition(": ")[2]
        return f"Not proven ({why}): the best of the trials is in best.yaml. {counts}"
    if winner is None:
        why = (
            "No significant difference"
            if document["final_comparison"]
            else "Nothing was better by the trials"
        )
        return f"{why}: keep the settings as they are. {counts}"
    span, changed = ratio_text(winner["ratio"], "×"), changes_text(winner["changes"])
    lost = ", ".join(winner.get("idle", ()))
    left_out = f" {lost} did not act in the measured plan and is left out." if lost else ""
    return f"{span} {winner['of']} with {changed}.{left_out} {counts}"


def ratio_text(ratio: Mapping[str, float | None] | None, sign: str = "") -> str:
    """A ratio with its interval; empty where it wasn't measured."""
    if ratio is None or ratio["median"] is None:
        return ""
    text = f"{ratio['median']:.3f}{sign}"
    return text if ratio["low"] is None else f"{text} [{ratio['low']:.3f}, {ratio['high']:.3f}]"


def is_proven(document: Mapping[str, Any]) -> bool:
    """Returns whether no proof is missing: the start is the best, or the final comparison ended."""
    final_comparison = document["final_comparison"]
    return final_comparison is None or any(
        variant["rounds"] for variant in final_comparison["variants"][2:]
    )


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)
