"""A published plan against the measurement: what was said of each switch, what was found here.

The plan is data (``recipe/plans``), and so is what can't be compared: a row of it says why.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hasten.formatting import span, words
from hasten.measure.significance import LEAST_FLOOR
from hasten.measure.statistics import Interval, verdict
from hasten.report.claims import MEMORY, SPEED, memory_claim

QUALITY = "quality"  # a claim of any measure of it: here it is the held-out loss
Row = dict[str, str]


def preset_claims(preset: Mapping[str, Any], report: Mapping[str, Any]) -> list[Row]:
    """Rows for the report's ``claims``: switches without a technique, the whole, what isn't fit.

    A claim that a technique carries itself stands in the report already, beside the two arms that
    differ by it alone; one that only the published plan makes is checked on the arm that has the
    technique and no other. A claim of speed is judged as its arm is: beyond the experiment's noise
    floor, and by the arm's own p-value.
    """
    source = preset["source"]
    told = {(_base(c["technique"]), c["metric"]) for c in report["claims"]}
    rows = [
        _row(switch["name"], claim, source, *_alone(switch, claim, report))
        for switch in preset["switches"]
        for claim in switch["claims"]
        if (switch.get("technique"), claim["metric"]) not in told
    ]
    missing = [switch["name"] for switch in preset["switches"] if "missing" in switch]
    name = "the whole plan" + (f" without {', '.join(missing)}" if missing else "")
    for claim in preset["totals"]:
        final = report["arms"][-1]
        found = _quality(report) if claim["metric"] == QUALITY else _checked(claim, final, report)
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


def _alone(
    switch: Mapping[str, Any], claim: Mapping[str, Any], report: Mapping[str, Any]
) -> tuple[str, str]:
    """What the arm of one technique showed against the baseline, as far as there is one."""
    if "missing" in switch:
        return "not measured", switch["missing"]
    name = switch["technique"]
    single = (arm for arm in report["arms"] if [_base(t) for t in arm["techniques"]] == [name])
    arm = next(single, None)
    if arm is None:
        return "not measured apart", "inconclusive"
    measured, word = _checked(claim, arm, report)
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


def _checked(
    claim: Mapping[str, Any], arm: Mapping[str, Any], report: Mapping[str, Any]
) -> tuple[str, str]:
    """What an arm showed of a claim against the baseline, and the verdict on it."""
    base = report["arms"][0]
    if any(one["verdict"].partition(":")[0] == "failed" for one in (base, arm)):
        return "not measured", "inconclusive"
    if claim["metric"] == MEMORY:
        before, after = (one.get("peak_memory_bytes") for one in (base, arm))
        return memory_claim(before, after, claim["ratio"])
    ratio = arm["ratio"]
    if claim["metric"] != SPEED or None in ratio.values():
        return "not measured", "inconclusive"
    found = Interval(ratio["median"], ratio["median"], ratio["low"], ratio["high"], 0)
    floor = (report.get("noise") or {}).get("floor") or LEAST_FLOOR
    p_value = arm.get("p_value")
    word = verdict(found, claim["ratio"], floor, nothing=LEAST_FLOOR, p_value=p_value)
    return span(ratio, "times"), word
