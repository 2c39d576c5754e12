"""What was promised of each technique, or of a published plan, beside what was measured here.

A claim belongs to one technique, so it is judged by two arms that differ by this technique alone:
on a ladder by neighbouring rungs, else by the technique alone against the baseline. The claims of
one experiment are judged together, with the same noise floor and the same correction for their
number as its arms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hasten.core.technique import Claim, Technique
from hasten.formatting import span, words
from hasten.measure.ablation import Arm
from hasten.measure.significance import LEAST_FLOOR, holm, p_beyond
from hasten.measure.statistics import Interval, claim_verdict, verdict
from hasten.report.verdicts import Judgement, floor_of, head, idle, ratio_between

SPEED, MEMORY = "tokens_per_second", "peak_memory_bytes"
Pair = tuple[Arm, Arm]  # without the technique, with it
Measured = tuple[Interval, float | None]  # of a speed claim: its ratio and corrected p-value
UNKNOWN = "not comparable"


def claims_of(arms: Sequence[Arm], judgements: Sequence[Judgement]) -> list[dict[str, str]]:
    """Every claim of the last arm's techniques with its measurement and its verdict."""
    final = arms[-1]
    worse = {a.name for a, j in zip(arms, judgements, strict=True) if head(j.quality) == "worse"}
    if final is arms[0]:
        return []
    floor = floor_of(arms)
    pairs = {technique: _pair_for(technique, arms) for technique in final.plan}
    speeds = _speeds(pairs, arms[0], floor)
    found = []
    for technique, pair in pairs.items():
        for claim in technique.claims:
            measured, word = _checked(claim, pair, speeds.get(technique), floor)
            if pair is not None and technique.name() in idle(pair[1]):
                word = f"{UNKNOWN}: it did not act"
            if pair is not None and pair[1].name in worse:
                word = without_quality(word)
            found.append(
                {
                    "technique": str(technique),
                    "metric": claim.metric,
                    "claimed": f"{claim.ratio:.2f}×",
                    "source": claim.source,
                    "measured": measured,
                    "verdict": word,
                }
            )
    return found


def without_quality(word: str) -> str:
    """The verdict on a claim of an arm whose model is worse: no claim is held by that."""
    return "fell short: the model is worse" if word == "held" else word


def _speeds(
    pairs: dict[Technique, Pair | None], base: Arm, floor: float
) -> dict[Technique, Measured]:
    """What each technique with a claim on speed did to it, corrected for their number."""
    found: dict[Technique, tuple[Interval, list[float]]] = {}
    for technique, pair in pairs.items():
        if pair is None or all(claim.metric != SPEED for claim in technique.claims):
            continue
        ratio = ratio_between(pair[1], pair[0], base)
        if ratio is not None:
            found[technique] = ratio
    # Arms of different groups have an interval and no rounds in common; it decides alone.
    paired = [technique for technique, (_, rounds) in found.items() if rounds]
    corrected = holm([p_beyond(found[t][1], floor, base.luck) for t in paired])
    p_values = dict(zip(paired, corrected, strict=True))
    return {technique: (ratio, p_values.get(technique)) for technique, (ratio, _) in found.items()}


def _checked(
    claim: Claim, pair: Pair | None, speed: Measured | None, floor: float
) -> tuple[str, str]:
    """What was measured of one claim, and the verdict on it."""
    if pair is None:
        return "not measured apart", UNKNOWN
    if claim.metric == SPEED and speed is not None:
        ratio, p_value = speed
        return span(ratio.summary(), "times"), _speed_word(ratio, claim.ratio, floor, p_value)
    if claim.metric == MEMORY:
        before, after = (arm.peak_memory_bytes for arm in pair)
        return memory_claim(before, after, claim.ratio)
    return "not measured", UNKNOWN


def _speed_word(ratio: Interval, claim: float, floor: float, p_value: float | None) -> str:
    return claim_verdict(ratio, claim, verdict(ratio, floor, nothing=LEAST_FLOOR, p_value=p_value))


def _pair_for(technique: Technique, arms: Sequence[Arm]) -> Pair | None:
    """The first two arms with a result that differ by this technique alone."""
    measured = [arm for arm in arms if arm.failed is None and arm.rounds]
    for one in measured:
        for other in measured:
            without = set(other.plan.techniques) - {technique}
            if technique in other.plan.techniques and set(one.plan.techniques) == without:
                return one, other
    return None


def memory_claim(before: float | None, after: float | None, claimed: float) -> tuple[str, str]:
    """What was measured of a claim on peak memory, and the verdict on it.

    Peak memory of a fixed shape repeats itself, so one value per arm is enough.
    """
    if not before or not after:
        return "not measured", UNKNOWN
    found = after / before
    return f"{found:.2f}×", "held" if found <= claimed else "fell short"


# A published plan against the measurement: what was said of each switch, what was found here.
#
# The plan is data (``recipe/plans``), and so is what can't be compared: a row of it says why.

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
        found = (
            _quality(report)
            if claim["metric"] == QUALITY
            else _checked_preset(claim, final, report)
        )
        rows.append(_row(name, claim, source, *found))
    for entry in preset.get("not_comparable", ()):
        claim = {"metric": "not one metric", "said": entry["said"]}
        why = f"{UNKNOWN}: {entry['reason'].strip()}"
        rows.append(_row(entry["name"], claim, source, "not measured", why))
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
        return "not measured", f"{UNKNOWN}: {switch['missing']}"
    name = switch["technique"]
    single = (arm for arm in report["arms"] if [_base(t) for t in arm["techniques"]] == [name])
    arm = next(single, None)
    if arm is None:
        return "not measured apart", UNKNOWN
    measured, word = _checked_preset(claim, arm, report)
    idle = [row for row in arm.get("acted") or () if row["acted"] is False]
    return measured, f"{UNKNOWN}: it did not act" if idle else word


def _quality(report: Mapping[str, Any]) -> tuple[str, str]:
    """The held-out loss of the last arm and the first, by the margin that was fixed before."""
    found = report.get("quality") or {}
    losses = [arm.get("held_out_loss") for arm in (report["arms"][0], report["arms"][-1])]
    if None in losses or not found:
        return "not measured", UNKNOWN
    said = " → ".join(words(loss, "loss") for loss in losses)
    word = {"not worse": "held", "worse": "fell short"}.get(found["verdict"], UNKNOWN)
    return f"held-out loss {said}, one seed", word


def _checked_preset(
    claim: Mapping[str, Any], arm: Mapping[str, Any], report: Mapping[str, Any]
) -> tuple[str, str]:
    """What an arm showed of a claim against the baseline, and the verdict on it."""
    base = report["arms"][0]
    if any(head(one["verdict"]) == "failed" for one in (base, arm)):
        return "not measured", UNKNOWN
    keep = without_quality if head(arm.get("quality")) == "worse" else str
    if claim["metric"] == MEMORY:
        before, after = (one.get("peak_memory_bytes") for one in (base, arm))
        measured, word = memory_claim(before, after, claim["ratio"])
        return measured, keep(word)
    ratio = arm["ratio"]
    if claim["metric"] != SPEED or None in ratio.values():
        return "not measured", UNKNOWN
    found = Interval(ratio["median"], ratio["median"], ratio["low"], ratio["high"], 0)
    floor = (report.get("noise") or {}).get("floor") or LEAST_FLOOR
    p_value = arm.get("p_value") if arm.get("against") == base["name"] else None
    return span(ratio, "times"), keep(_speed_word(found, claim["ratio"], floor, p_value))
