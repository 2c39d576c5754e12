"""Conclusions from all variants of a report: gains of techniques, best row, headline.

A variant's own verdict is about its effect against one other variant, and is in the report. The
gain of a technique next to all the others needs two other variants. It is a ratio within rounds,
too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hasten import formatting
from hasten.core.plan import Plan
from hasten.formatting import number, number_text, span
from hasten.measure.ablation import Variant
from hasten.measure.quality.requirements import FAILED
from hasten.measure.significance import LEAST_FLOOR
from hasten.measure.statistics import Interval, ProcessVariance, is_likely, verdict
from hasten.report.judgement import NOT_MEASURED, Row, cumulative_of, ratio_between, verdict_word

_SENSIBLE = (1e-50, 1e50)  # tokens per second; outside, logarithms and squares lose their meaning


@dataclass(frozen=True)
class SwitchGain:
    """One technique: its gain alone, and its gain when added to all the others.

    The second is the speed of all techniques over that of all without this one.
    """

    technique: str
    alone: Row | None
    with_others: Interval | None


def result_of(variants: Sequence[Row]) -> Row:
    """Returns the variant that the page compares with the baseline: the full plan, or the last."""
    full_plans = [variant for variant in variants if variant["kind"] == "all"]
    plain = [variant for variant in variants if variant["kind"] not in ("again", "leave-one-out")]
    return (full_plans or plain or variants)[-1]


def paired_speed(one: Row, other: Row, base: Row) -> Interval | None:
    """Returns the speed of the other variant over the one's, paired by round, or None."""
    measured_rows = {id(row): measured_variant(row) for row in (base, one, other)}
    sides = measured_rows[id(other)], measured_rows[id(one)]
    if not all(side.rounds for side in sides):
        return None
    ratio = ratio_between(*sides, measured_rows[id(base)])
    return None if ratio is None else ratio[0]


def measured_variant(row: Row) -> Variant:
    """Returns a report's variant with its rounds; without any if these can't be speeds."""
    usable = all(map(_sensible, (*row["rounds"], *row["beside"])))
    process_variance = row["process_variance"]
    has_variance = process_variance is not None and all(map(_sensible, process_variance.values()))
    failed = verdict_word(row["verdict"]) == "failed"
    return Variant(
        row["name"],
        Plan(),
        rounds=list(row["rounds"]) if usable and not failed else [],
        failed=row["verdict"] if failed else None,
        baseline_rounds=list(row["beside"]) if len(row["beside"]) == len(row["rounds"]) else [],
        process_variance=ProcessVariance(**process_variance) if has_variance else None,
    )


def on_the_whole(variant: Row, report: Mapping[str, Any]) -> str:
    """Returns the word for a variant's speed against the baseline, not against its reference."""
    word = verdict_word(variant["verdict"])
    if variant.get("against") in (None, report["variants"][0]["name"]) and word != "together":
        return word
    ratio = variant["ratio"]
    if None in ratio.values():
        return "undecided"
    floor = (report.get("noise") or {}).get("floor")
    return word_of(Interval(ratio["median"], **ratio, rounds=0), floor)


def switches(variants: Sequence[Row]) -> list[SwitchGain]:
    """Returns the techniques of the full plan with separate measurements; not in a cumulative."""
    final = result_of(variants)
    wanted = set(final["techniques"])
    compared_rows = [a for a in variants[1:] if a is not final]
    separate = [a for a in compared_rows if a["kind"] not in ("again", "cumulative")]
    if any(a["kind"] is None for a in separate) and cumulative_of(variants):
        return []
    gains = []
    for technique in dict.fromkeys(final["techniques"]):
        alone = [a for a in separate if a["techniques"] == [technique]]
        others = wanted - {technique}
        without = [a for a in separate if others and set(a["techniques"]) == others]
        interval = paired_speed(without[0], final, variants[0]) if without else None
        if alone or interval is not None:
            gains.append(SwitchGain(technique, alone[0] if alone else None, interval))
    return gains


def fastest_of_equal_quality(report: Mapping[str, Any]) -> Row | None:
    """Returns the fastest variant with a model that isn't worse; None without measurements.

    The baseline is one of these variants. In a cumulative design, last rows without a
    likely gain are left out. The simpler plan wins, as with ``plan: auto``.
    """
    variants: Sequence[Row] = report["variants"]
    base = variants[0]
    if base["tokens_per_second"]["median"] is None:
        return None
    measured = [variant for variant in variants[1:] if variant["ratio"]["median"] is not None]
    every = [base, *(a for a in measured if verdict_word(a["quality"]) == "not worse")]
    best = max(every, key=lambda variant: variant["ratio"]["median"] or 0.0)
    rows = cumulative_of(variants)
    index = next((i for i, row in enumerate(rows) if row is best), 0)
    for above in reversed(rows[:index]):
        effect: Mapping[str, float | None] = best.get("effect") or NOT_MEASURED
        median, low, high = effect["median"], effect["low"], effect["high"]
        if above not in every or best.get("against") != above["name"]:
            break
        if median is None or low is None or high is None:  # one round is too few for a decision
            break
        ratio = Interval(median, median, low, high, len(best["rounds"]))
        if verdict_word(best["verdict"]) == "helped" or is_likely(ratio):
            break
        best = above
    return best


def compared(variants: Sequence[Row]) -> list[Row]:
    """Returns the variants with a speed that counts for the decision about techniques."""
    return [a for a in variants[1:] if a["kind"] not in ("again", "leave-one-out")]


def unpaid(report: Mapping[str, Any]) -> list[dict[str, str]]:
    """Returns variants and techniques without gain, one entry each.

    Returns:
        ``name``, ``why``, and ``word``: hurt, no effect, undecided, or worse. The last
            means that the model is worse, and wasn't in the variant of the comparison.
    """
    variants, floor, entries = report["variants"], report["noise"]["floor"], []
    quality_of = {variant["name"]: variant["quality"] for variant in variants}
    for variant in compared(variants):
        word = verdict_word(variant["verdict"])
        reasons = [effect_words(variant), variant["verdict"]]
        was_worse = verdict_word(quality_of.get(variant["against"])) == "worse"
        if verdict_word(variant["quality"]) == "worse" and not was_worse:
            word, reasons = word if word == "hurt" else "worse", [*reasons, variant["quality"]]
        if word in ("worse", "hurt", "no effect", "undecided"):
            entries.append({"name": variant["name"], "why": "; ".join(reasons), "word": word})
    listed = {row["name"] for row in entries}
    for switch in switches(variants):
        gain = switch.with_others
        listed_alone = switch.alone is not None and switch.alone["name"] in listed
        if gain is None or listed_alone or (word := word_of(gain, floor)) == "helped":
            continue
        alone = f"alone {span(switch.alone['ratio'], 'times')}, but " if switch.alone else ""
        what = "slower with it than without" if word == "hurt" else "no gain beyond the noise"
        why = f"{alone}with all the others {gain_text(gain)}: {what}"
        entries.append({"name": switch.technique, "why": why, "word": word})
    guilty = (row for row in report["verification"] if verdict_word(row["verdict"]) in FAILED)
    return entries + [
        {"name": row["technique"], "why": reason_of(row), "word": "worse"} for row in guilty
    ]


def term_name(term: str) -> str:
    """Returns the page's name for a part of a step or of memory."""
    return "the process itself" if term == "other" else term


def any_known(terms: Mapping[str, float | None]) -> bool:
    return any(value is not None for value in terms.values())


def gain_text(ratio: Interval | None) -> str:
    """Returns a ratio with its interval, in words."""
    return formatting.NOT_MEASURED if ratio is None else span(ratio.summary(), "times")


def word_of(ratio: Interval, floor: float | None) -> str:
    """Returns the ratio's verdict beyond the noise floor of its report."""
    if floor is None or not 0 <= floor < 1:
        return verdict(ratio)
    return verdict(ratio, max(floor, LEAST_FLOOR))


def reason_of(row: Mapping[str, Any]) -> str:
    """Returns a line of the verification in words: its verdict and the reason."""
    measured = row["measured"]
    text = "no reason given" if measured is None else f"measured {amount(measured)}"
    return f"{row['verdict']}: {row['text'] or text}"


def amount(value: object) -> str:
    """Returns a measured number or text of a verification as it is printed."""
    numeric = number(value)
    return str(value) if numeric is None else number_text(numeric, "measured")


def _sensible(value: float | None) -> bool:
    low, high = _SENSIBLE
    return value is not None and math.isfinite(value) and low < value < high


def effect_words(variant: Row, usual: str | None = None) -> str:
    """Returns a variant's own effect, and its reference if that isn't the usual one."""
    if variant["kind"] == "again":
        return span(variant["ratio"], "times")
    if verdict_word(variant["verdict"]) == "baseline":
        return "–"
    effect_text = span(variant["effect"] or NOT_MEASURED, "times")
    is_usual = variant["against"] in (None, usual)
    return effect_text if is_usual else f"{effect_text} of {variant['against']}"


def variants_that_hurt(variants: Sequence[Row]) -> set[str]:
    """Returns names of the variants in red: slower than the variant of their comparison.

    Variants that leave a technique out are excluded: there, slower is good news for the
    technique.
    """
    return {
        a["name"]
        for a in variants
        if verdict_word(a["verdict"]) == "hurt" and a["kind"] != "leave-one-out"
    }


def lead_of(report: Mapping[str, Any]) -> Row:
    """Returns the headline's variant: the fastest of equal quality if it helped, or the result."""
    best = fastest_of_equal_quality(report)
    if best is None or on_the_whole(best, report) != "helped":
        return result_of(report["variants"])
    return best
