"""What a study leaves: its JSON, a line for people, and a page with history and importance."""

from __future__ import annotations

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
from hasten.report.markup import html_table
from hasten.tune.space import Space
from hasten.tune.study import Study

SCHEMA = 1
WIDTH, HEIGHT, LEFT, ROW = 720, 220, 44, 22
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width">
<style>
:root {{ color-scheme: light dark; --ink: #1d2733; --faint: #8a97a5; --good: #1b7f5c;
  --bad: #b3401f; --ground: #fff; }}
@media (prefers-color-scheme: dark) {{ :root {{ --ink: #e4e9ee; --good: #4ec59a; --bad: #f08a66;
  --ground: #14191f; }} }}
body {{ font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--ground);
  max-width: 760px; margin: 2rem auto; padding: 0 1rem; }}
table {{ border-collapse: collapse; width: 100%; font-size: 13px; }}
td, th {{ text-align: left; padding: 2px 8px 2px 0; vertical-align: top; }}
svg {{ max-width: 100%; height: auto; }} text {{ fill: var(--ink); font-size: 12px; }}
.dot {{ fill: var(--faint); }} .cross {{ stroke: var(--bad); stroke-width: 2; }}
.best {{ fill: none; stroke: var(--good); stroke-width: 2; }} .bar {{ fill: var(--good); }}
.axis {{ stroke: var(--faint); }}
</style></head><body><h1>{title}</h1><p>{lead}</p>
<h2>FinalComparison</h2>{final
comparison}{final}<h2>History</h2>{history}<h2>Importance</h2>{importance}<h2>Trials</h2>{trials}
</body></html>
"""


def study_document(
    study: Study,
    space: Space,
    final_comparison: Mapping[str, Any] | None,
    winner: Mapping[str, Any] | None,
    importance: Mapping[str, float],
    about: Mapping[str, Any],
) -> dict[str, Any]:
    """The study as plain values (docs/how-to/tune.md)."""
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
    words = judge_variants(variants)
    rows = []
    for variant, said in zip(variants, words, strict=True):
        ratio = ratio_to(variant, variants[0])
        rows.append(
            {
                "name": variant.name,
                "verdict": said.verdict,
                "quality": said.quality,
                "p_value": said.p_value,
                "ratio": None if ratio is None else ratio.summary(),
                "rounds": variant.rounds,
                "peak_memory_bytes": variant.peak_memory_bytes,
                "failed": variant.failed,
                "idle": idle_techniques(variant),
            }
        )
    return {"noise_floor": round(floor_of(variants), 4), "variants": rows}


def is_fit(row: Mapping[str, Any]) -> bool:
    """Whether a variant could be taken if it is better: it ran, its model isn't worse, as
    proven.
    """
    bad = verdict_word(row["verdict"]) == "failed" or verdict_word(row.get("quality")) == "worse"
    return not bad and row.get("refused") is None


def says_of(row: Mapping[str, Any]) -> str:
    """A variant's verdict in words, with what else speaks against it."""
    words = [row["verdict"]]
    words += [f"quality {row['quality']}"] if verdict_word(row.get("quality")) == "worse" else []
    words += [f"not taken: {row['refused']}"] if row.get("refused") is not None else []
    return "; ".join(words)


def winner_of(rows: Sequence[dict[str, Any]]) -> int | None:
    """The place of the variant with the largest ratio among those that are better beyond doubt."""
    better = [
        i
        for i, row in enumerate(rows)
        if verdict_word(row["verdict"]) == "helped"
        and row["ratio"]["median"] is not None
        and is_fit(row)
    ]
    return max(better, key=lambda i: rows[i]["ratio"]["median"], default=None)


def result_sentence(found: Mapping[str, Any]) -> str:
    """The result in a sentence or two."""
    states = [t["state"] for t in found["trials"]]
    said = "1 trial" if len(states) == 1 else f"{len(states)} trials"
    gone, failed = (states.count(s) for s in ("out of memory", "failed"))
    said += f", {gone} out of memory" if gone else ""
    said += f", {failed} failed" if failed else ""
    said += f"; {found['ended']}."
    if upcoming := found.get("next"):
        said += f" A larger budget would try: {'; or '.join(map(_words, upcoming))}."
    winner = found["winner"]
    if winner is None and found["final_comparison"] and not is_proven(found):
        why = found["final_comparison"]["variants"][2]["verdict"].partition(": ")[2]
        return f"Not proven ({why}): the best of the trials is in best.yaml. {said}"
    if winner is None:
        why = (
            "No significant difference"
            if found["final_comparison"]
            else "Nothing was better by the trials"
        )
        return f"{why}: keep the settings as they are. {said}"
    ratio = winner["ratio"]
    span = f"{ratio['median']:.3f}×"
    if ratio["low"] is not None:
        span += f" [{ratio['low']:.3f}, {ratio['high']:.3f}]"
    changed = _words(winner["changes"])
    lost = ", ".join(winner.get("idle", ()))
    left_out = f" {lost} did not act in the measured plan and is left out." if lost else ""
    return f"{span} {winner['of']} with {changed}.{left_out} {said}"


def _words(changes: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in changes.items())


def is_proven(found: Mapping[str, Any]) -> bool:
    """Whether nothing is left to prove: there was nobody to final comparison with, or a final
    comparison had rounds.
    """
    final_comparison = found["final_comparison"]
    return final_comparison is None or any(
        variant["rounds"] for variant in final_comparison["variants"][2:]
    )


def page(found: Mapping[str, Any], title: str, said: str) -> str:
    """One file of HTML without anything to load; ``said`` is the result in a sentence."""
    return PAGE.format(
        title=escape(title),
        lead=escape(said),
        final_comparison=_final_comparison(found["final_comparison"]),
        final=_final(found.get("final", ())),
        history=_history(found["trials"]),
        importance=_importance(found["importance"]),
        trials=_trials(found["trials"]),
    )


def _final_comparison(final_comparison: Mapping[str, Any] | None) -> str:
    if final_comparison is None:
        return "<p>There was none.</p>"
    rows = []
    for variant in final_comparison["variants"]:
        ratio = variant["ratio"] or {"median": None, "low": None}
        words = "" if ratio["median"] is None else f"{ratio['median']:.3f}"
        if ratio["low"] is not None:
            words += f" [{ratio['low']:.3f}, {ratio['high']:.3f}]"
        rows.append((variant["name"], words, says_of(variant)))
    return html_table(("variant", "ratio [95 %]", "verdict"), rows)


def _final(variants: Sequence[Mapping[str, Any]]) -> str:
    """Empty where there was none."""
    if not variants:
        return ""
    rows = []
    for variant in variants:
        changed = _words(variant["changes"])
        rounds = variant["rounds"]
        rows.append((changed, f"{statistics.median(rounds):.3f}", str(len(rounds))))
    return "<h2>Final</h2>" + html_table(("what differs from the start", "ratio", "turns"), rows)


def _trials(trials: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for number, t in enumerate(trials, start=1):
        ratio = "" if t["log_rate"] is None else f"{math.exp(t['log_rate']):.3f}"
        changed = _words(t["changes"]) or "as the start"
        rows.append((str(number), changed, ratio, t["why"] or t["state"]))
    return html_table(("trial", "what differs from the start", "ratio", "state"), rows)


def _history(trials: Sequence[Mapping[str, Any]]) -> str:
    """A dot for each trial, a cross where there was no result, and the best so far as a line."""
    known = [math.exp(t["log_rate"]) for t in trials if t["log_rate"] is not None]
    if not known:
        return "<p>No trial had a result.</p>"
    low, high = min(1.0, *known), max(1.0, *known)
    room = (high - low) or 1.0

    def y(ratio: float) -> float:
        return HEIGHT - 30 - (ratio - low) / room * (HEIGHT - 50)

    across = (WIDTH - LEFT - 20) / max(len(trials), 1)
    marks, line, best = [], [], 1.0
    for place, t in enumerate(trials):
        x = LEFT + (place + 0.5) * across
        if t["log_rate"] is None:
            bottom = HEIGHT - 30
            marks.append(f'<path class="cross" d="M{x - 4:.1f} {bottom - 4}l8 8m0 -8l-8 8"/>')
        else:
            ratio = math.exp(t["log_rate"])
            best = max(best, ratio)
            marks.append(f'<circle class="dot" cx="{x:.1f}" cy="{y(ratio):.1f}" r="3.5"/>')
        line.append(f"{x:.1f},{y(best):.1f}")
    grid = "".join(
        f'<line class="axis" x1="{LEFT}" x2="{WIDTH}" y1="{y(v):.1f}" y2="{y(v):.1f}" '
        f'stroke-dasharray="2 4"/><text x="0" y="{y(v) + 4:.1f}">{v:.2f}×</text>'
        for v in sorted({low, 1.0, high})
    )
    name = f"{len(trials)} trials, the best {best:.3f} of the start"
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{name}">{grid}{"".join(marks)}'
        f'<polyline class="best" points="{" ".join(line)}"/></svg>'
    )


def _importance(shares: Mapping[str, float]) -> str:
    shown = [(n, s) for n, s in shares.items() if s > 0][:12]
    if not shown:
        return "<p>Nothing is known of it.</p>"
    rows = []
    for place, (name, share) in enumerate(shown):
        top, width = place * ROW, share / shown[0][1] * (WIDTH - 330)
        rows.append(
            f'<text x="0" y="{top + 15}">{escape(name)}</text><rect class="bar" x="250" '
            f'y="{top + 4}" height="14" width="{width:.1f}"/>'
            f'<text x="{258 + width:.1f}" y="{top + 15}">{share:.0%}</text>'
        )
    height = ROW * len(shown)
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="share of each decision in '
        f'what settings change">{"".join(rows)}</svg>'
    )


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)
