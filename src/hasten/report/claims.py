"""Claims for each technique or published plan, next to the measured results.

A claim belongs to one technique. It is judged by two variants that differ only by this
technique, if one of them has its effect relative to the other. The interval and the
verdict of that effect decide.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hasten.core.technique import Technique
from hasten.formatting import number_text, span
from hasten.measure.statistics import Effect, Interval, claim_verdict
from hasten.report.conclusions import on_the_whole
from hasten.report.judgement import NOT_MEASURED, verdict_word

SPEED, MEMORY = "tokens_per_second", "peak_memory_bytes"
UNKNOWN = "not comparable"
_INVERSE: dict[str, Effect] = {"helped": "hurt", "hurt": "helped"}
Variant = Mapping[str, Any]  # as in the report
Row = dict[str, str]


def claims_of(techniques: Iterable[Technique], variants: Sequence[Variant]) -> list[Row]:
    """Returns every claim of these techniques with its measurement and its verdict."""
    rows = []
    for technique in techniques:
        pair = pair_of(str(technique), variants)
        for claim in technique.claims:
            measured, word = "not measured apart", UNKNOWN
            if pair is not None:
                measured, word = _checked(claim.metric, claim.ratio, technique.name(), *pair)
            claimed = {"metric": claim.metric, "said": f"{claim.ratio:.2f}×"}
            rows.append(_row(str(technique), claimed, claim.source, measured, word))
    return rows


def pair_of(technique: str, variants: Sequence[Variant]) -> tuple[Variant, Variant] | None:
    """Returns the first variants without and with a technique, one judged against the other."""
    by_name = {variant["name"]: variant for variant in variants}
    for variant in variants:
        other = by_name.get(variant.get("against"))
        if other is not None:
            pair = (other, variant) if technique in variant["techniques"] else (variant, other)
            if set(pair[1]["techniques"]) - set(pair[0]["techniques"]) == {technique}:
                return pair
    return None


def without_quality(word: str) -> str:
    """Returns a claim's verdict if the variant's model is worse: "held" becomes "fell short"."""
    return "fell short: the model is worse" if word == "held" else word


def _checked(
    metric: str, claimed: float, name: str, without: Variant, with_: Variant
) -> tuple[str, str]:
    ratio, effect = with_["effect"] or NOT_MEASURED, verdict_word(with_["verdict"])
    if without["against"] == with_["name"]:  # the variant leaves out a technique of the other
        low, high = (without["effect"][end] for end in ("high", "low"))
        ratio = {"median": 1 / without["effect"]["median"]}
        ratio |= {"low": low and 1 / low, "high": high and 1 / high}
        effect = _INVERSE.get(verdict_word(without["verdict"]), verdict_word(without["verdict"]))
    return _judged(metric, claimed, ratio, effect, without, with_, [name])


def _judged(
    metric: str,
    claimed: float,
    ratio: Mapping[str, float | None],
    effect: str,
    before: Variant,
    after: Variant,
    names: Iterable[str],
) -> tuple[str, str]:
    """Returns a claim's verdict from a ratio with its word, or from two variants' peak memory.

    Peak memory of a fixed shape repeats itself, so one value per variant is enough.
    """
    measured, word, memory = "not measured", UNKNOWN, (before[MEMORY], after[MEMORY])
    if any(verdict_word(variant["verdict"]) == "failed" for variant in (before, after)):
        return measured, word
    if metric == MEMORY and all(memory):
        share = memory[1] / memory[0]
        measured, word = f"{share:.2f}×", "held" if share <= claimed else "fell short"
    elif metric == SPEED and ratio["median"] is not None:
        measured = span(ratio, "times")
        if None not in ratio.values():
            interval: Any = Interval(ratio["median"], **ratio, rounds=0)  # type: ignore[arg-type]
            word = claim_verdict(interval, claimed, effect)  # type: ignore[arg-type]
    idle = {row["technique"] for row in after["effective"] or () if row["effective"] is False}
    if idle & set(names):
        return measured, f"{UNKNOWN}: it did not act"
    return measured, without_quality(word) if verdict_word(after["quality"]) == "worse" else word


# A published plan and the measurement: the claim for each technique, and the result.
#
# The plan is data (``recipe/plans``), and so are claims that can't be compared: a row has the
# reason.

QUALITY = "quality"  # a claim about any quality: here it is the eval loss


def preset_claims(preset: Mapping[str, Any], report: Mapping[str, Any]) -> list[Row]:
    """Returns rows for ``claims``: techniques, the full plan, and claims that can't be compared.

    If a technique carries a claim itself, the report already has it, next to the two
    variants that differ only by the technique. A claim of the published plan alone is
    checked on the variant with only that technique, relative to the baseline.
    """
    source = preset["source"]
    reported = {(_base(c["technique"]), c["metric"]) for c in report["claims"]}
    rows = [
        _row(switch["name"], claim, source, *_alone(switch, claim, report))
        for switch in preset["switches"]
        for claim in switch["claims"]
        if (switch.get("technique"), claim["metric"]) not in reported
    ]
    missing = [switch["name"] for switch in preset["switches"] if "missing" in switch]
    name = "the whole plan" + (f" without {', '.join(missing)}" if missing else "")
    final = report["variants"][-1]
    rows += [
        _row(name, claim, claim.get("source", source), *_total(claim, final, report))
        for claim in preset["totals"]
    ]
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
    """Returns ``packed`` of ``packed(row_tokens=512)``."""
    return technique.partition("(")[0]


def _alone(
    switch: Mapping[str, Any], claim: Mapping[str, Any], report: Mapping[str, Any]
) -> tuple[str, str]:
    if "missing" in switch:
        return "not measured", f"{UNKNOWN}: {switch['missing']}"
    name = switch["technique"]
    for variant in report["variants"]:
        if [_base(t) for t in variant["techniques"]] == [name]:
            return _against_baseline(claim, variant, report, [name])
    return "not measured apart", UNKNOWN


def _total(claim: Mapping[str, Any], final: Variant, report: Mapping[str, Any]) -> tuple[str, str]:
    metric = claim["metric"]
    if metric == QUALITY:
        return _quality(report)
    if metric in PER_RUN:
        return _per_run(metric, final, report), f"{UNKNOWN}: {claim['reason']}"
    if metric not in ABSOLUTE:
        return _against_baseline(claim, final, report)
    measured, word = _absolute(claim, final, report)
    return measured, without_quality(word) if verdict_word(final["quality"]) == "worse" else word


# Claims about an absolute figure, by name: how a variant shows it, and True if more is better.
ABSOLUTE = {
    "parallel_efficiency": True,
    "utilisation": True,
    "communication_share": False,
    "throughput_spread": False,
}
PER_RUN = ("samples_per_second", "cost")  # figures of one job on one machine, not comparable


def _absolute(
    claim: Mapping[str, Any], final: Variant, report: Mapping[str, Any]
) -> tuple[str, str]:
    """Returns the result for a claim on a share: the baseline's, the variant's, and the verdict."""
    metric = claim["metric"]
    shares = [_share(metric, variant) for variant in (report["variants"][0], final)]
    alone = ((report.get("design") or {}).get("ranks") or 1) < 2
    if metric in ("parallel_efficiency", "communication_share") and alone:
        return "not measured", f"{UNKNOWN}: needs several ranks (nproc 2 or more)"
    if None in shares:
        return "not measured", f"{UNKNOWN}: this report has no figure for it"
    text = " → ".join(number_text(share, "percent") for share in shares)
    if metric == "utilisation" and (report.get("hardware") or {}).get("device") == "cpu":
        return text, f"{UNKNOWN}: the claim is of a GPU's busy time; here it is the cores' time"
    reached = shares[1] >= claim["least"] if ABSOLUTE[metric] else shares[1] <= claim["most"]
    return text, "held" if reached else "fell short"


def _share(metric: str, variant: Mapping[str, Any]) -> Any:
    ledger = variant.get("ledger") or {}
    if metric == "throughput_spread":
        return variant.get(metric)
    if metric != "communication_share":
        return ledger.get(metric)
    seconds_by_part = {k: v for k, v in (ledger.get("step") or {}).items() if v is not None}
    total, communication = sum(seconds_by_part.values()), seconds_by_part.get("communication")
    return communication / total if total and communication is not None else None


def _per_run(metric: str, final: Mapping[str, Any], report: Mapping[str, Any]) -> str:
    """Returns examples per second, or the price of a pass over the data, before and after."""
    design, cost = report.get("design") or {}, report.get("cost") or {}
    tokens, examples = design.get("epoch_tokens"), design.get("epoch_examples")
    rates = [variant["tokens_per_second"]["median"] for variant in (report["variants"][0], final)]
    if None in rates or not tokens:
        return "not measured"
    if metric == "samples_per_second":
        texts = [number_text(rate * examples / tokens, "amount") for rate in rates]
        return f"{' → '.join(texts)} examples/s"
    prices = cost.get("per_million_tokens") or {}
    paid = [prices.get(variant["name"]) for variant in (report["variants"][0], final)]
    if None in paid:
        return "not measured: the recipe has no price"
    text = " → ".join(number_text(p * tokens / 1e6, "amount") for p in paid)
    return f"{text} {cost.get('currency') or ''} for a pass over the data"


def _quality(report: Mapping[str, Any]) -> tuple[str, str]:
    assessment = report.get("quality") or {}
    variants = report["variants"]
    losses = [variant.get("eval_loss") for variant in (variants[0], variants[-1])]
    if None in losses or not assessment:
        return "not measured", UNKNOWN
    text = " → ".join(number_text(loss, "loss") for loss in losses)
    word = {"not worse": "held", "worse": "fell short"}.get(assessment["verdict"], UNKNOWN)
    return f"eval loss {text}, one seed", word


SECONDS = ("epoch_seconds", "total_seconds")  # inverse of tokens per second, for the same examples


def _against_baseline(
    claim: Mapping[str, Any], variant: Variant, report: Mapping[str, Any], names: Iterable[str] = ()
) -> tuple[str, str]:
    """Returns a variant's result for a claim relative to the baseline, and its verdict."""
    if claim["metric"] in SECONDS:
        return _seconds(claim, variant, report, names)
    ratio, effect = variant["ratio"], on_the_whole(variant, report)
    claimed = claim.get("ratio", 1.0)  # a metric that isn't judged has none
    return _judged(claim["metric"], claimed, ratio, effect, report["variants"][0], variant, names)


def _seconds(
    claim: Mapping[str, Any], variant: Variant, report: Mapping[str, Any], names: Iterable[str]
) -> tuple[str, str]:
    faster = {**claim, "metric": SPEED, "ratio": 1 / claim["ratio"]}
    measured, word = _against_baseline(faster, variant, report, names)
    ratio = variant["ratio"]
    if measured == "not measured" or None in ratio.values():
        return measured, word
    inverse = {"median": ratio["median"], "low": ratio["high"], "high": ratio["low"]}
    measured = span({key: 1 / value for key, value in inverse.items()}, "times")
    tokens = (report.get("design") or {}).get("epoch_tokens")
    rates = [one["tokens_per_second"]["median"] for one in (report["variants"][0], variant)]
    if claim["metric"] == "epoch_seconds" and tokens and None not in rates:
        measured += f", {' → '.join(number_text(tokens / rate, 'seconds') for rate in rates)}"
    return measured, word
