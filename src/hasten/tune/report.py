"""Outputs of a study: its JSON, and one line for users."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hasten.measure.ablation import AGAIN, BASELINE, Variant
from hasten.report.judgement import (
    floor_of,
    idle_techniques,
    judge_variants,
    ratio_to,
    verdict_word,
)
from hasten.tune.space import changes_text
from hasten.tune.study import Objective, Study

SCHEMA = 1


def study_document(
    study: Study,
    final_comparison: Mapping[str, Any] | None,
    winner: Mapping[str, Any] | None,
    about: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns the study as plain values (docs/how-to/tune.md)."""
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
        "final_comparison": final_comparison,
        "winner": winner,
    }


def final_rows(variants: Sequence[Variant]) -> dict[str, Any]:
    """Returns the final comparison for the study's JSON."""
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


def best_row(
    rows: Sequence[dict[str, Any]], objective: Objective, memory: int | None
) -> dict[str, Any] | None:
    """Returns the best valid choice: it ran, its quality isn't worse, and it wasn't refused.

    For ``tokens`` it is the fastest of the significantly faster choices. For ``memory`` it is
    the choice with the lowest peak, more than 1 % below the start's. The argument ``memory``
    is the start's peak in the first comparison, used if the final one has none.
    """
    fit = [
        row
        for row in rows
        if row["name"] not in (BASELINE, AGAIN)
        and verdict_word(row["verdict"]) != "failed"
        and verdict_word(row.get("quality")) != "worse"
        and row.get("refused") is None
    ]
    if objective == "memory":
        base = rows[0]["peak_memory_bytes"] or memory or 0
        smaller = [row for row in fit if 0 < (row["peak_memory_bytes"] or base) < 0.99 * base]
        return min(smaller, key=lambda row: row["peak_memory_bytes"], default=None)
    faster = [row for row in fit if verdict_word(row["verdict"]) == "helped"]
    return max(faster, key=lambda row: row["ratio"]["median"], default=None)


def says_of(row: Mapping[str, Any]) -> str:
    """Returns a variant's verdict, with worse quality or a refusal if there is one."""
    clauses = [row["verdict"]]
    clauses += [f"quality {row['quality']}"] if verdict_word(row.get("quality")) == "worse" else []
    clauses += [f"not taken: {row['refused']}"] if row.get("refused") is not None else []
    return "; ".join(clauses)


def result_sentence(document: Mapping[str, Any]) -> str:
    """Returns the result in one or two sentences."""
    states = [t["state"] for t in document["trials"]]
    counts = "1 trial" if len(states) == 1 else f"{len(states)} trials"
    gone, failed = (states.count(s) for s in ("out of memory", "failed"))
    counts += f", {gone} out of memory" if gone else ""
    counts += f", {failed} failed" if failed else ""
    counts += f"; {document['ended']}."
    winner = document["winner"]
    if not is_proven(document):
        why = document["final_comparison"]["variants"][0]["failed"] or "no time for two rounds"
        return f"Not proven ({why}): the best of the trials is in best.yaml. {counts}"
    if winner is None:
        why = "No significant difference"
        if document["final_comparison"] is None:
            why = "Nothing was better by the trials"
        return f"{why}: keep the settings as they are. {counts}"
    span, changed = ratio_text(winner["ratio"], "×"), changes_text(winner["changes"])
    lost = ", ".join(winner.get("idle", ()))
    left_out = f" {lost} did not act in the measured plan and is left out." if lost else ""
    return f"{span} {winner['of']} with {changed}.{left_out} {counts}"


def ratio_text(ratio: Mapping[str, float | None] | None, sign: str = "") -> str:
    """Returns a ratio with its interval; empty if it wasn't measured."""
    if ratio is None or ratio["median"] is None:
        return ""
    text = f"{ratio['median']:.3f}{sign}"
    return text if ratio["low"] is None else f"{text} [{ratio['low']:.3f}, {ratio['high']:.3f}]"


def is_proven(document: Mapping[str, Any]) -> bool:
    """Returns True if the start is the best, or the final comparison has rounds."""
    comparison = document["final_comparison"]
    return comparison is None or any(
        row["rounds"] for row in comparison["variants"] if row["name"] not in (BASELINE, AGAIN)
    )


def _plain(setting: Any) -> Any:
    if isinstance(setting, tuple):
        return [_plain(part) for part in setting]
    return setting if isinstance(setting, str | int | float | bool | None) else str(setting)
