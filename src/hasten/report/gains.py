"""What the report derives from several arms together: its table, what gained, what did not pay.

An arm's own verdict is about its effect against one other arm, and stands in the report. What a
technique still gains beside all the others needs two other arms; it is a ratio paired by round, as
everywhere. Everything here reads a report that schema.py checked.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hasten.core.plan import Plan
from hasten.formatting import NOT_MEASURED, duration, span, words
from hasten.measure import ablation
from hasten.measure.quality.requirements import FAILED
from hasten.measure.significance import LEAST_FLOOR
from hasten.measure.statistics import Interval, ProcessVariance, is_likely, verdict
from hasten.report import verdicts
from hasten.report.verdicts import NOT_MEASURED as NOTHING
from hasten.report.verdicts import ratio_between, verdict_word

Arm = Mapping[str, Any]
GUILTY = FAILED
_SAME = 1e-3  # by which a ratio may differ from its rounds' for being rounded
_SENSIBLE = (1e-50, 1e50)  # tokens per second; beyond, logarithms and their squares lose meaning


@dataclass(frozen=True)
class SwitchGain:
    """One technique with its gain alone, and beside all the others (all over all without it)."""

    technique: str
    alone: Arm | None
    beside: Interval | None


def result_of(arms: Sequence[Arm]) -> Arm:
    """The arm that the head of the page compares with the baseline: all of it, or the last."""
    whole = [arm for arm in arms if arm["kind"] == "all"]
    plain = [arm for arm in arms if arm["kind"] not in ("again", "left out")]
    return (whole or plain or arms)[-1]


def paired_speed(one: Arm, other: Arm, base: Arm) -> Interval | None:
    """The speed of the other arm over the one's, paired by round; None if they can't be paired."""
    found = {id(row): measured_arm(row, base) for row in (base, one, other)}
    sides = found[id(other)], found[id(one)]
    if not all(side.rounds for side in sides):
        return None
    ratio = ratio_between(*sides, found[id(base)])
    return None if ratio is None else ratio[0]


def measured_arm(row: Arm, base: Arm) -> ablation.Arm:
    """An arm of a report with what verdicts need of it; without rounds where they can't be paired.

    An arm without `beside`, whose ratio isn't that of its rounds over the baseline's, has run in
    other turns.
    """
    usable = all(map(_sensible, (*row["rounds"], *row["beside"]))) and _in_turn(row, base)
    failed, loss, curve = verdict_word(row["verdict"]) == "failed", row["held_out_loss"], [(1, 0.0)]
    return ablation.Arm(
        row["name"],
        Plan(),
        rounds=list(row["rounds"]) if usable and not failed else [],
        held_out=[] if loss is None else [((row["held_out_curve"] or curve)[-1][0] or 0, loss)],
        acted=row["acted"],
        failed=row["verdict"] if failed else None,
        kind=row["kind"],
        beside=list(row["beside"]) if len(row["beside"]) == len(row["rounds"]) else [],
        luck=ProcessVariance(**row["luck"]) if _is_known(row["luck"]) else None,
    )


def ladder_of(arms: Sequence[Arm]) -> list[Arm]:
    """The baseline and the arms that each add something to the one above; empty if none do."""
    kinds = {arm["name"]: arm.get("kind") for arm in arms}
    names = verdicts.ladder_of(kinds, {arm["name"]: arm["techniques"] for arm in arms})
    return [arm for arm in arms if arm["name"] in names]


def on_the_whole(arm: Arm, report: Mapping[str, Any]) -> str:
    """The word for an arm's speed against the baseline, whatever its own effect is against."""
    word = verdict_word(arm["verdict"])
    if arm.get("against") in (None, report["arms"][0]["name"]) and word != "together":
        return word
    ratio = arm["ratio"]
    if None in ratio.values():
        return "undecided"
    floor = (report.get("noise") or {}).get("floor")
    return word_of(Interval(ratio["median"], **ratio, rounds=0), floor)


def switches(arms: Sequence[Arm]) -> list[SwitchGain]:
    """Every technique of the whole plan, where it was measured apart; not what a ladder shows."""
    final = result_of(arms)
    wanted = set(final["techniques"])
    apart = [a for a in arms[1:] if a is not final and a["kind"] not in ("again", "ladder")]
    if any(a["kind"] is None for a in apart) and ladder_of(arms):
        return []
    found = []
    for technique in dict.fromkeys(final["techniques"]):
        alone = [a for a in apart if a["techniques"] == [technique]]
        others = wanted - {technique}
        without = [a for a in apart if others and set(a["techniques"]) == others]
        beside = paired_speed(without[0], final, arms[0]) if without else None
        if alone or beside is not None:
            found.append(SwitchGain(technique, alone[0] if alone else None, beside))
    return found


def fastest_of_equal_quality(report: Mapping[str, Any]) -> Arm | None:
    """The fastest arm whose model isn't worse; None where nothing was measured.

    The baseline is one of these arms. Of a ladder, last rows that aren't likely to gain anything
    are left off: the simpler plan wins, as with ``plan: auto``.
    """
    arms: Sequence[Arm] = report["arms"]
    base = arms[0]
    if base["tokens_per_second"]["median"] is None:
        return None
    equal = [arm for arm in arms[1:] if verdict_word(arm["quality"]) == "not worse"]
    every: list[Arm] = [base, *(arm for arm in equal if arm["ratio"]["median"] is not None)]
    best = max(every, key=lambda arm: arm["ratio"]["median"] or 0.0)
    for above in reversed(_above(best, arms)):
        if above not in every or not _is_idle_row(best, above):
            break
        best = above
    return best


def _above(arm: Arm, arms: Sequence[Arm]) -> list[Arm]:
    """The rows of the ladder above an arm; none of an arm that isn't in one."""
    rows = ladder_of(arms)
    place = next((i for i, row in enumerate(rows) if row is arm), 0)
    return rows[:place]


def _is_idle_row(arm: Arm, above: Arm) -> bool:
    """Whether a row isn't likely to be faster than the one above; one round doesn't tell."""
    effect: Mapping[str, float | None] = arm.get("effect") or NOTHING
    median, low, high = effect["median"], effect["low"], effect["high"]
    if arm.get("against") != above["name"] or median is None or low is None or high is None:
        return False
    ratio = Interval(median, median, low, high, len(arm["rounds"]))
    return not (verdict_word(arm["verdict"]) == "helped" or is_likely(ratio))


def compared(arms: Sequence[Arm]) -> list[Arm]:
    """The arms whose own speed says whether something pays."""
    return [a for a in arms[1:] if a["kind"] not in ("again", "left out")]


def unpaid(report: Mapping[str, Any]) -> list[dict[str, str]]:
    """What did not pay, one entry per arm or switch.

    Returns:
        ``name``, ``why``, and ``word``: hurt, no effect, undecided, or worse (the model, which
        wasn't so yet in the arm that it is compared with).
    """
    arms, floor, found = report["arms"], report["noise"]["floor"], []
    quality_of = {arm["name"]: arm["quality"] for arm in arms}
    for arm in compared(arms):
        word, reasons = verdict_word(arm["verdict"]), [effect_words(arm), arm["verdict"]]
        if verdict_word(arm["quality"]) == "worse" != verdict_word(quality_of.get(arm["against"])):
            word, reasons = word if word == "hurt" else "worse", [*reasons, arm["quality"]]
        if word in ("worse", "hurt", "no effect", "undecided"):
            found.append({"name": arm["name"], "why": "; ".join(reasons), "word": word})
    listed = {row["name"] for row in found}
    for switch in switches(arms):
        gain = switch.beside
        listed_alone = switch.alone is not None and switch.alone["name"] in listed
        if gain is None or listed_alone or (word := word_of(gain, floor)) == "helped":
            continue
        alone = f"alone {span(switch.alone['ratio'], 'times')}, but " if switch.alone else ""
        what = "slower with it than without" if word == "hurt" else "no gain beyond the noise"
        why = f"{alone}beside all the others {said(gain)}: {what}"
        found.append({"name": switch.technique, "why": why, "word": word})
    guilty = (row for row in report["guard"] if verdict_word(row["verdict"]) in GUILTY)
    return found + [
        {"name": row["technique"], "why": _guilt(row), "word": "worse"} for row in guilty
    ]


def unmeasured(report: Mapping[str, Any]) -> list[str]:
    """What was dropped, what failed, and which sections of the page have nothing to show."""
    arms = report["arms"]
    found = list(report["design"]["dropped"])
    found += [
        f"{a['name']}: {a['verdict']}" for a in arms if verdict_word(a["verdict"]) == "failed"
    ]
    untested = (row for row in report["guard"] if verdict_word(row["verdict"]) == "not tested")
    found += [f"Equal quality of {row['technique']}: {_guilt(row)}" for row in untested]
    lines = (row for row in report["invariance"] if verdict_word(row["verdict"]) == "not tested")
    found += [f"Invariance, {row['what']}: {_guilt(row)}" for row in lines]
    ledgers = [arm["ledger"] for arm in (arms[0], result_of(arms))]
    absent = {
        "noise: no second copy of the baseline ran": report["noise"]["ratio"] is None,
        "the proof of equal quality that each switch owes": not report["guard"],
        "independence of the loss from packing, splits and neighbours": not report["invariance"],
        "where a step's time goes": not any(any_known(x["step"]) for x in ledgers),
        "what memory holds": not any(any_known(x["memory"]) for x in ledgers),
        "MFU": not any(arm["mfu"] is not None for arm in arms),
        "what else the machine did": not any(arm["foreign_load"] for arm in arms),
        "energy": not report["cost"]["energy"]["kwh_per_million_tokens"],
        "cost: no price was given": report["cost"]["per_million_tokens"] is None,
    }
    return found + [f"Not measured: {what}" for what, missing in absent.items() if missing]


def any_known(terms: Mapping[str, float | None]) -> bool:
    return any(value is not None for value in terms.values())


def more_rounds(arm: Mapping[str, Any], design: Mapping[str, Any]) -> str | None:
    """How many more rounds would decide an arm's verdict, and how long they take; None: decided.

    By the variance that was seen (`hasten.measure.significance.rounds_needed`).
    """
    needed, seconds = arm["rounds_needed"], design["round_seconds"]
    if needed is None:
        return None
    rounds = "1 more round" if needed == 1 else f"{amount(needed)} more rounds"
    if not isinstance(needed, int) or seconds is None:
        return rounds
    return f"{rounds}, about {duration(needed * seconds)}"


def load_of_others(arms: Sequence[Arm]) -> str | None:
    """How much of the processor others used while the arms had their turns; None: not measured."""
    load = [value for arm in arms for value in arm["foreign_load"] if value is not None]
    if not load:
        return None
    mean, most = words(statistics.fmean(load), "percent"), words(max(load), "percent")
    return f"others used {mean} of the processor during the rounds, {most} at most"


def said(ratio: Interval | None) -> str:
    """A ratio with its interval, in words."""
    return NOT_MEASURED if ratio is None else span(ratio.summary(), "times")


def word_of(ratio: Interval, floor: float | None) -> str:
    """The ratio's verdict beyond the noise floor of its report."""
    if floor is None or not 0 <= floor < 1:
        return verdict(ratio)
    return verdict(ratio, max(floor, LEAST_FLOOR))


def _guilt(row: Mapping[str, Any]) -> str:
    """A line of the guard in words: its verdict and the reason for it."""
    reason = row["text"] or (
        f"found {amount(row['found'])}" if row["found"] is not None else "no reason given"
    )
    return f"{row['verdict']}: {reason}"


def amount(value: object) -> str:
    """A number or text that a guard found, as it is printed."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return words(float(value), "found") if number else str(value)  # type: ignore[arg-type]


def _in_turn(arm: Arm, base: Arm) -> bool:
    """Whether the arm's ratio is that of its rounds over the baseline's, as far as it is known."""
    pairs = zip(arm["rounds"], base["rounds"], strict=False)
    ratios = [a / b for a, b in pairs if _sensible(a) and _sensible(b)]
    told = arm["ratio"]["median"]
    if arm is base or arm["beside"] or told is None or not ratios:
        return True
    return math.isclose(statistics.median(ratios), told, rel_tol=_SAME)


def _is_known(luck: Mapping[str, float | None] | None) -> bool:
    return luck is not None and all(map(_sensible, luck.values()))


def _sensible(value: float | None) -> bool:
    low, high = _SENSIBLE
    return value is not None and math.isfinite(value) and low < value < high


# The table of arms, the same in the terminal, in Markdown, on the page and in a model's card.


@dataclass(frozen=True)
class ReportTable:
    """The arms as rows of text: a heading for each column, and for each arm its cells by column."""

    columns: dict[str, str]
    rows: list[dict[str, str]]


def table_of(report: Mapping[str, Any]) -> ReportTable:
    """What each arm did: its own effect first, then the ratio to the baseline, then its quality.

    Where every effect is against the baseline anyway, there is no second column of it.
    """
    arms, base = report["arms"], report["arms"][0]["name"]
    ladder = bool(ladder_of(arms))
    others = list(dict.fromkeys(arm["against"] for arm in arms if arm["against"]))
    against_ = "the row above" if ladder else " or ".join(others) or base
    columns = {
        "name": "arm",
        "effect": f"against {against_} [95 %]",
        "verdict": "effect",
        "ratio": f"against {base} [95 %]",
        "speed": "tokens/s",
        "quality": "quality",
        "memory": "peak memory",
        "loss": "held-out loss",
    }
    if set(others) <= {base} and not ladder:
        del columns["ratio"]
    rows = []
    for number, arm in enumerate(arms):
        usual = arms[number - 1]["name"] if ladder and number else base
        rows.append(
            {
                "name": arm["name"],
                "effect": effect_words(arm, usual),
                "verdict": verdict_word(arm["verdict"]),
                "ratio": span(arm["ratio"], "times"),
                "speed": words(arm["tokens_per_second"]["median"], "amount"),
                "quality": verdict_word(arm["quality"]) or "–",
                "memory": words(arm["peak_memory_bytes"], "memory"),
                "loss": words(arm["held_out_loss"], "loss"),
            }
        )
    return ReportTable(columns, rows)


def effect_words(arm: Arm, usual: str | None = None) -> str:
    """An arm's own effect with its interval, and against which arm if that isn't the usual one."""
    if arm["kind"] == "again":
        return span(arm["ratio"], "times")
    if verdict_word(arm["verdict"]) == "baseline":
        return "–"
    found = span(arm["effect"] or NOTHING, "times")
    return found if arm["against"] in (None, usual) else f"{found} of {arm['against']}"


def arms_that_hurt(arms: Sequence[Arm]) -> set[str]:
    """Names of the arms to be shown in red: slower than what they belong beside.

    Not those that leave a technique out: there it is good news for the technique.
    """
    return {
        a["name"] for a in arms if verdict_word(a["verdict"]) == "hurt" and a["kind"] != "left out"
    }


# Rows of the page that several arms make together: the machine, the fastest, proofs, the ledger.
#
# `hardware` alone is free in form, so its entries are used only where they are what they seem.


def machine(hardware: Mapping[str, Any]) -> str:
    """The machine in one line: accelerators if it trained on them, texts, cores, memory."""
    used = [] if hardware.get("device") == "cpu" else hardware.get("accelerators")
    every = [a.get("name") for a in used if isinstance(a, dict)] if isinstance(used, list) else []
    names = Counter(name for name in every if isinstance(name, str))
    said = [f"{count} × {name}" for name, count in names.items()]
    said += [v for key, v in hardware.items() if isinstance(v, str) and v and key != "device"]
    cores, memory = hardware.get("usable_cores"), hardware.get("memory_limit_bytes")
    said += [f"{cores} cores"] if isinstance(cores, int) else []
    return " · ".join([*said, words(memory, "memory")] if isinstance(memory, int) else said)


def lead_of(report: Mapping[str, Any]) -> Arm:
    """The arm of the headline: the fastest of equal quality if it helped, else the result."""
    best = fastest_of_equal_quality(report)
    if best is None or on_the_whole(best, report) != "helped":
        return result_of(report["arms"])
    return best


def proofs(arms: Sequence[Arm]) -> list[dict[str, Any]]:
    """What each technique did, arms that say the same in one row, techniques in their order."""
    uses = [(arm["name"], row) for arm in arms for row in arm["acted"]]
    users = Counter(row["technique"] for _, row in uses)
    found: dict[tuple[str, bool | None, str], list[str]] = {}
    for technique in users:
        for name, row in uses:
            if row["technique"] == technique:
                found.setdefault((technique, row["acted"], row["evidence"]), []).append(name)
    rows = []
    for (technique, acted, evidence), names in found.items():
        every_user = len(names) == users[technique] > 1
        said = f"all {len(names)} with it" if every_user else ", ".join(names)
        rows.append({"technique": technique, "acted": acted, "evidence": evidence, "arms": said})
    return rows


def terms(arms: Sequence[Arm], part: str, unit: str) -> list[dict[str, Any]]:
    """The ledger's `part` before and after: one row per term that either arm measured."""
    first, last = arms[0]["ledger"][part], result_of(arms)["ledger"][part]
    rows = []
    for number, name in enumerate(first, start=1):
        pair = first[name], last[name]
        if pair != (None, None):
            said = [words(value, unit) for value in pair]
            rows.append({"name": name, "number": number, "before": said[0], "after": said[1]})
    return rows


def steadiness(arms: Sequence[Arm]) -> list[dict[str, Any]]:
    """How even each arm's steps were, the ledger's figures where there are any."""
    rows = []
    for arm in arms:
        step, found = arm["step_seconds"], arm["ledger"]["stability"]
        load = [value for value in arm["foreign_load"] if value is not None]
        rows.append(
            {
                "name": arm["name"],
                "p50": step["p50"] if found["p50"] is None else found["p50"],
                "p99": step["p99"] if found["p99"] is None else found["p99"],
                "spread": found["relative_spread"],
                "stalls": found["stalls"],
                "load": max(load, default=None),
                "warmup": arm["warmup"]["seconds"],
                "compile": arm["warmup"]["compile_seconds"],
                "mfu": arm["mfu"],
            }
        )
    return rows


def has_cost(cost: Mapping[str, Any]) -> bool:
    """Whether anything of money or energy is known."""
    parts = (cost["experiment"], cost["payback"], cost["energy"])
    return cost["per_million_tokens"] is not None or any(map(any_known, parts))


def priced(prices: Mapping[str, Any] | None, arm: Arm) -> float | None:
    """An arm's entry in an object from arm names to numbers."""
    value = (prices or {}).get(arm["name"])
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
