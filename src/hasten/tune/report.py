"""Outputs of a study: JSON, one line for users, a page with history and importance."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from hasten.measure.ablation import Variant
from hasten.report.judgement import (
    floor_of,
    idle_techniques,
    judge_variants,
    ratio_to,
    verdict_word,
)
from hasten.report.markup import html_page, html_table
from hasten.report.svg import Bar, Curve, bar_chart, line_chart
from hasten.tune.space import changes_text
from hasten.tune.study import Study

SCHEMA = 1
WIDTH, HEIGHT = 720, 220  # pixels of a drawing


def study_document(
    study: Study,
    final_comparison: Mapping[str, Any] | None,
    winner: Mapping[str, Any] | None,
    importance: Mapping[str, float],
    about: Mapping[str, Any],
) -> dict[str, Any]:
    """The study as plain values (docs/how-to/tune.md)."""
    space = study.space
    return {
        "schema": SCHEMA,
        **about,
        "objective": study.objective,
        "noise": round(study.noise, 5),
        "ended": study.ended,
        "next": [space.changes(point) for point in study.next],
        "space": [
            {"name": d.name, "values": [_plain(v) for v in d.values], "needs": _plain(d.needs)}
            for d in space.dimensions
        ],
        "start": {
            "settings": space.settings(space.start),
            "rate": study.rate,
            "memory": study.memory,
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
        "importance": dict(importance),
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
    if upcoming := document.get("next"):
        counts += f" A larger budget would try: {'; or '.join(map(changes_text, upcoming))}."
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


def page(document: Mapping[str, Any], title: str, sentence: str) -> str:
    """One file of HTML without anything to load; ``sentence`` is the result in a sentence."""
    comparison, final = document["final_comparison"], document.get("final", ())
    compared, finalists = "<p>There was none.</p>", ""
    if comparison is not None:
        rows = [(v["name"], ratio_text(v["ratio"]), says_of(v)) for v in comparison["variants"]]
        compared = html_table(("variant", "ratio [95 %]", "verdict"), rows)
    if final:
        medians = [f"{statistics.median(one['rounds']):.3f}" for one in final]
        rows = [
            (changes_text(one["changes"]), median, str(len(one["rounds"])))
            for one, median in zip(final, medians, strict=True)
        ]
        finalists = html_table(("what differs from the start", "ratio", "turns"), rows)
    sections = {
        "Final comparison": compared,
        "Final": finalists,
        "History": _history(document["trials"]),
        "Importance": _importance(document["importance"]),
        "Trials": _trials(document["trials"]),
    }
    body = "".join(f"<section><h2>{h}</h2>{text}</section>" for h, text in sections.items() if text)
    return html_page(title, f"<p>{escape(sentence)}</p>{body}")


def _trials(trials: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for number, t in enumerate(trials, start=1):
        ratio = "" if t["log_rate"] is None else f"{math.exp(t['log_rate']):.3f}"
        changed = changes_text(t["changes"]) or "as the start"
        rows.append((str(number), changed, ratio, t["why"] or t["state"]))
    return html_table(("trial", "what differs from the start", "ratio", "state"), rows)


def _history(trials: Sequence[Mapping[str, Any]]) -> str:
    """The ratio of each trial that had a result, and the best so far."""
    ratios = [None if t["log_rate"] is None else math.exp(t["log_rate"]) for t in trials]
    if not any(ratios):
        return "<p>No trial had a result.</p>"
    best = itertools.accumulate((ratio or 1.0 for ratio in ratios), max, initial=1.0)
    curves = [
        Curve("the best so far", list(enumerate(best)), "final"),
        Curve("each trial", list(enumerate(ratios, start=1)), "other"),
    ]
    name = f"{len(trials)} trials: their ratio to the start"
    return line_chart(name, curves, (WIDTH, HEIGHT), lambda trial: f"{trial:g}")


def _importance(shares: Mapping[str, float]) -> str:
    bars = [Bar(name, f"{share:.0%}", share) for name, share in shares.items() if share > 0]
    if not bars:
        return "<p>Nothing is known of it.</p>"
    title = "share of each decision in what settings change"
    return bar_chart(title, bars[:12], WIDTH, 0, lambda share: f"{share:.0%}")


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)
