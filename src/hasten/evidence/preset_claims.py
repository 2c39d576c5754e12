"""A published plan against the measurement: what was said of each switch, what was found here.

The plan is data (``recipe/plans``), and so is what can't be compared: a row of it says why.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hasten.evidence.report_words import span, words
from hasten.evidence.statistics import Interval, verdict

MEMORY_NOISE = 0.01  # a change of peak memory that nobody should act on
QUALITY = "quality"  # a claim of any measure of it: here it is the held-out loss
Row = dict[str, str]


def preset_claims(preset: Mapping[str, Any], report: Mapping[str, Any]) -> list[Row]:
    """Rows for the report's ``claims``: switches without a technique, the whole, what isn't fit.

    A claim that a technique carries itself stands in the report already, beside the two arms that
    differ by it alone; one that only the published plan makes is checked on the arm that has the
    technique and no other.
    """
    source = preset["source"]
    told = {(_base(c["technique"]), c["metric"]) for c in report["claims"]}
    rows = [
        _row(switch["name"], claim, source, *_alone(switch, claim, report["arms"]))
        for switch in preset["switches"]
        for claim in switch["claims"]
        if (switch.get("technique"), claim["metric"]) not in told
    ]
    missing = [switch["name"] for switch in preset["switches"] if "missing" in switch]
    name = f"the whole plan{f' without {chr(44).join(missing)}' if missing else ''}"
    for claim in preset["totals"]:
        found = _quality(report) if claim["metric"] == QUALITY else _whole(claim, report["arms"])
        rows.append(_row(name, claim, source, *found))
    for entry in preset.get("not_comparable", ()):
        claim = {"metric": "not one metric", "said": entry["said"]}
        rows.append(_row(entry["name"], claim, source, "not measured", entry["reason"].strip()))
    return rows


def _row(name: str, claim: Mapping[str, Any], source: str, measured: str, word: str) -> Row:
    return {
        "technique": name,
        "metric": claim["metric"],
        "claimed": claim["said"],
        "source": source,
        "measured": measured,
        "verdict": word,
    }


def _base(technique: str) -> str:
    """``packed`` of ``packed(row_tokens=512)``."""
    return technique.partition("(")[0]


def _alone(switch: Mapping[str, Any], claim: Mapping[str, Any], arms: Any) -> tuple[str, str]:
    """What the arm of one technique showed against the baseline, as far as there is one."""
    if "missing" in switch:
        return "not measured", switch["missing"]
    name = switch["technique"]
    single = (arm for arm in arms if [_base(t) for t in arm["techniques"]] == [name])
    arm = next(single, None)
    if arm is None:
        return "not measured apart", "inconclusive"
    measured, word = _whole(claim, [arms[0], arm])
    idle = [row for row in arm.get("acted") or () if row["acted"] is False]
    return measured, "no effect: it did not act" if idle else word


def _quality(report: Mapping[str, Any]) -> tuple[str, str]:
    """The held-out loss of the last arm and the first, by the margin that was fixed before."""
    found = report.get("quality") or {}
    losses = [arm.get("held_out_loss") for arm in (report["arms"][0], report["arms"][-1])]
    if None in losses or not found:
        return "not measured", "inconclusive"
    said = " → ".join(words(loss, "loss") for loss in losses)
    word = {"not worse": "held", "worse": "harmed"}.get(found["verdict"], "inconclusive")
    return f"held-out loss {said}, one seed", word


def _whole(claim: Mapping[str, Any], arms: Any) -> tuple[str, str]:
    """The last arm against the first."""
    base, final = arms[0], arms[-1]
    failed = any(arm["verdict"].partition(":")[0] == "failed" for arm in (base, final))
    if failed:
        return "not measured", "inconclusive"
    if claim["metric"] == "tokens_per_second":
        ratio = final["ratio"]
        if None in ratio.values():
            return "not measured", "inconclusive"
        found = Interval(ratio["median"], ratio["median"], ratio["low"], ratio["high"], 0)
        return span(ratio, "times"), verdict(found, claim["ratio"])
    before, after = base.get("peak_memory_bytes"), final.get("peak_memory_bytes")
    if claim["metric"] != "peak_memory_bytes" or not before or not after:
        return "not measured", "inconclusive"
    change = after / before
    if change <= claim["ratio"]:
        return f"{change:.2f}×", "held"
    if change > 1 + MEMORY_NOISE:
        return f"{change:.2f}×", "harmed"
    return f"{change:.2f}×", "fell short" if change < 1 - MEMORY_NOISE else "no effect"
