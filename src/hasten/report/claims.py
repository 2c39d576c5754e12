"""What was promised of each technique, or of a published plan, beside what was measured here.

A claim belongs to one technique, so it is judged by two arms that differ by this technique alone:
on a ladder by neighbouring rungs, else by the technique alone against the baseline. The claims of
one experiment are judged together, with the same noise floor and the same correction for their
number as its arms. No claim holds where the model of the arm that shows it is worse.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hasten.core.technique import Claim, Technique
from hasten.formatting import span, words
from hasten.measure.ablation import Arm
from hasten.measure.significance import LEAST_FLOOR, holm, p_beyond
from hasten.measure.statistics import Interval, verdict
from hasten.report.verdicts import GUILTY, Guard, floor_of, idle, is_worse, ratio_between

MEMORY_NOISE = 0.01  # a change of peak memory that nobody should act on
SPEED, MEMORY = "tokens_per_second", "peak_memory_bytes"
WORSE = "fell short: reached, but the model is worse"
Pair = tuple[Arm, Arm]  # without the technique, with it
Measured = tuple[Interval, float | None]  # of a speed claim: its ratio and corrected p-value


def claims_of(arms: Sequence[Arm], guard: Guard = ()) -> list[dict[str, str]]:
    """Every claim of the last arm's techniques with its measurement and its verdict."""
    final = arms[-1]
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
                word = "no effect: it did not act"
            if pair is not None and word == "held" and is_worse(pair[1], arms[0], guard):
                word = WORSE
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
        return "not measured apart", "inconclusive"
    if claim.metric == SPEED and speed is not None:
        ratio, p_value = speed
        word = verdict(ratio, claim.ratio, floor, nothing=LEAST_FLOOR, p_value=p_value)
        return span(ratio.summary(), "times"), word
    if claim.metric == MEMORY:
        before, after = (arm.peak_memory_bytes for arm in pair)
        return memory_claim(before, after, claim.ratio)
    return "not measured", "inconclusive"


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

    Peak memory of a fixed shape repeats itself, so one value per arm is enough. The words are those
    of `statistics.verdict`, for a ratio of which less is better.
    """
    if not before or not after:
        return "not measured", "inconclusive"
    found = after / before
    if found <= claimed:
        word = "held"
    elif found > 1 + MEMORY_NOISE:
        word = "harmed"
    else:
        word = "fell short" if found < 1 - MEMORY_NOISE else "no effect"
    return f"{found:.2f}×", word


# A published plan against the measurement: what was said of each switch, what was found here.
#
# The plan is data (``recipe/plans``), and so is what can't be compared: a row of it says why.

QUALITY = "quality"  # a claim of any measure of it: here it is the held-out loss
Row = dict[str, str]
Finding = tuple[str, str]  # what was measured, and the verdict on it
RANKS = "not comparable: needs several ranks (nproc 2 or more)"
UNKNOWN = "not comparable: this report has no figure for it"
OF_CORES = "not comparable: a GPU's share of busy time; here it is the share of the cores' time"


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
    rows += [
        _row(name, claim, claim.get("source", source), *_total(claim, report["arms"][-1], report))
        for claim in preset["totals"]
    ]
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
    measured, word = _checked_preset(claim, arm, report)
    idle = [row for row in arm.get("acted") or () if row["acted"] is False]
    if word == "held" and model_is_worse(arm, report):
        word = WORSE
    return measured, "no effect: it did not act" if idle else word


def _total(
    claim: Mapping[str, Any], final: Mapping[str, Any], report: Mapping[str, Any]
) -> Finding:
    """A claim on the whole plan: by its kind of metric."""
    metric = claim["metric"]
    if metric == QUALITY:
        return _quality(report)
    if metric in ABSOLUTE:
        measured, word = _absolute(claim, final, report)
    elif metric in PER_RUN:
        measured, word = _per_run(metric, final, report), f"not comparable: {claim['reason']}"
    else:
        measured, word = _checked_preset(claim, final, report)
    return measured, WORSE if word == "held" and model_is_worse(final, report) else word


def model_is_worse(arm: Mapping[str, Any], report: Mapping[str, Any]) -> bool:
    """Whether the report's guard, or its margin of the held-out loss, is against an arm."""
    found = report.get("quality") or {}
    before, after = (one.get("held_out_loss") for one in (report["arms"][0], arm))
    most = None if before is None else before * (1 + (found.get("margin") or 0.0))
    if most is not None and after is not None and after > most:
        return True
    if found.get("verdict") == "worse" and arm is report["arms"][-1]:
        return True
    guilty = [row["technique"] for row in report.get("guard") or () if row["verdict"] in GUILTY]
    return any(name in (text, _base(text)) for text in arm["techniques"] for name in guilty)


# Claims on a figure itself, by name: how it is read off an arm, and whether more of it is better.
ABSOLUTE = {
    "parallel_efficiency": True,
    "utilisation": True,
    "communication_share": False,
    "throughput_spread": False,
}
PER_RUN = ("samples_per_second", "cost")  # figures of one job on one machine, comparable to none


def _absolute(
    claim: Mapping[str, Any], final: Mapping[str, Any], report: Mapping[str, Any]
) -> Finding:
    """A claim on a share: the baseline's, the arm's, and whether it reaches what was said."""
    metric = claim["metric"]
    shares = [_share(metric, arm) for arm in (report["arms"][0], final)]
    alone = ((report.get("design") or {}).get("ranks") or 1) < 2
    if metric in ("parallel_efficiency", "communication_share") and alone:
        return "not measured", RANKS
    if None in shares:
        return "not measured", UNKNOWN
    said = " → ".join(words(share, "percent") for share in shares)
    if metric == "utilisation" and (report.get("hardware") or {}).get("device") == "cpu":
        return said, OF_CORES
    reached = shares[1] >= claim["least"] if ABSOLUTE[metric] else shares[1] <= claim["most"]
    return said, "held" if reached else "fell short"


def _share(metric: str, arm: Mapping[str, Any]) -> Any:
    """A share of an arm, or None where it wasn't measured."""
    ledger = arm.get("ledger") or {}
    if metric == "throughput_spread":
        return arm.get(metric)
    if metric != "communication_share":
        return ledger.get(metric)
    known = {k: v for k, v in (ledger.get("step") or {}).items() if v is not None}
    whole = sum(known.values())
    return known["communication"] / whole if whole and "communication" in known else None


def _per_run(metric: str, final: Mapping[str, Any], report: Mapping[str, Any]) -> str:
    """Records a second, or the price of a pass over the data: of the baseline and of the arm."""
    design, cost = report.get("design") or {}, report.get("cost") or {}
    tokens, records = design.get("epoch_tokens"), design.get("epoch_records")
    rates = [arm["tokens_per_second"]["median"] for arm in (report["arms"][0], final)]
    if None in rates or not tokens:
        return "not measured"
    if metric == "samples_per_second":
        return " → ".join(words(r * records / tokens, "amount") for r in rates) + " records/s"
    prices = cost.get("per_million_tokens") or {}
    paid = [prices.get(arm["name"]) for arm in (report["arms"][0], final)]
    if None in paid:
        return "not measured: the recipe has no price"
    said = " → ".join(words(p * tokens / 1e6, "amount") for p in paid)
    return f"{said} {cost.get('currency') or ''} for a pass over the data"


def _quality(report: Mapping[str, Any]) -> tuple[str, str]:
    """The held-out loss of the last arm and the first, by the margin that was fixed before."""
    found = report.get("quality") or {}
    losses = [arm.get("held_out_loss") for arm in (report["arms"][0], report["arms"][-1])]
    if None in losses or not found:
        return "not measured", "inconclusive"
    said = " → ".join(words(loss, "loss") for loss in losses)
    word = {"not worse": "held", "worse": "harmed"}.get(found["verdict"], "inconclusive")
    return f"held-out loss {said}, one seed", word


SECONDS = ("epoch_seconds", "total_seconds")  # of the same records: tokens per second, inverted


def _seconds(
    claim: Mapping[str, Any], arm: Mapping[str, Any], report: Mapping[str, Any]
) -> Finding:
    """The time for the same records, judged as the speed is."""
    ratio = arm["ratio"]
    inverse = {"median": ratio["median"], "low": ratio["high"], "high": ratio["low"]}
    measured = span({key: 1 / value for key, value in inverse.items()}, "times")
    faster = {**claim, "metric": SPEED, "ratio": 1 / claim["ratio"]}
    word = _checked_preset(faster, arm, report)[1]
    tokens = (report.get("design") or {}).get("epoch_tokens")
    rates = [one["tokens_per_second"]["median"] for one in (report["arms"][0], arm)]
    if claim["metric"] == "epoch_seconds" and tokens and None not in rates:
        measured += f", {' → '.join(words(tokens / rate, 'seconds') for rate in rates)}"
    return measured, word


def _checked_preset(
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
    if claim["metric"] not in (SPEED, *SECONDS) or None in ratio.values():
        return "not measured", "inconclusive"
    if claim["metric"] in SECONDS:
        return _seconds(claim, arm, report)
    found = Interval(ratio["median"], ratio["median"], ratio["low"], ratio["high"], 0)
    floor = (report.get("noise") or {}).get("floor") or LEAST_FLOOR
    p_value = arm.get("p_value")
    word = verdict(found, claim["ratio"], floor, nothing=LEAST_FLOOR, p_value=p_value)
    return span(ratio, "times"), word
