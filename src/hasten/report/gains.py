"""What the report derives from several arms together: rungs, each switch in company, what gained.

An arm's own verdict is against the baseline. Two questions need two other arms: what a rung of a
ladder adds to the rung below, and what a technique still gains beside all the others. Both are
ratios paired by round, as everywhere; everything here reads a report that schema.py checked.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from hasten.formatting import NOT_MEASURED, duration, span, words
from hasten.measure.quality.requirements import FAILED
from hasten.measure.significance import LEAST_FLOOR
from hasten.measure.statistics import Interval, Luck, paired_ratio, verdict

Arm = Mapping[str, Any]
GOOD = ("held", "fell short")
GUILTY = FAILED
_SAME = 1e-3  # by which a ratio may differ from its rounds' for being rounded
_SENSIBLE = (1e-50, 1e50)  # tokens per second; beyond, logarithms and their squares lose meaning


@dataclass(frozen=True)
class SwitchGain:
    """One technique with its gain alone, and beside all the others (all over all without it)."""

    technique: str
    alone: Arm | None
    beside: Interval | None


def head(text: str) -> str:
    """The verdict's word; a reason may follow it after a colon."""
    return text.partition(":")[0]


def result_of(arms: Sequence[Arm]) -> Arm:
    """The arm that the head of the page compares with the baseline: all of it, or the last."""
    whole = [arm for arm in arms if arm["kind"] == "all"]
    plain = [arm for arm in arms if arm["kind"] not in ("again", "left out")]
    return (whole or plain or arms)[-1]


def against(one: Arm, other: Arm, base: Arm) -> Interval | None:
    """The speed of the other arm over the one's, paired by round; None if they can't be paired.

    Where rounds of the baseline ran beside each of them (`beside`), each is divided by its own
    first, for then the two arms needn't have run in the same turns. Without these an arm whose
    own ratio isn't that of its rounds over the baseline's has run in other turns.
    """
    if "failed" in (head(one["verdict"]), head(other["verdict"])):
        return None
    sides = [_relative(one), _relative(other)]
    if any(side is None for side in sides):
        if not (_in_turn(one, base) and _in_turn(other, base)):
            return None
        sides = [one["rounds"], other["rounds"]]
    pairs = list(zip(*(side or [] for side in sides), strict=False))
    known = [(a, b) for a, b in pairs if _sensible(a) and _sensible(b)]
    if not known:
        return None
    ratio = paired_ratio([a for a, _ in known], [b for _, b in known])
    return Luck(**other["luck"]).widened(ratio) if other.get("luck") else ratio


def ladder_of(arms: Sequence[Arm]) -> list[Arm]:
    """The baseline and the arms that each add one technique to the one above; empty if none do."""
    rungs = [a for a in arms[1:] if a["kind"] in (None, "ladder", "all")]
    if not any(a["kind"] in (None, "ladder") for a in rungs):
        return []
    steps = list(pairwise([arms[0], *rungs]))
    if len(steps) < 2 or any(b["techniques"][:-1] != a["techniques"] for a, b in steps):
        return []
    return [] if any(not b["techniques"] for _, b in steps) else [arms[0], *rungs]


def rungs(arms: Sequence[Arm]) -> dict[str, str]:
    """On a ladder, each arm's speed against the arm above it, by name; empty without a ladder.

    A technique that takes back what the others gained shows only here.
    """
    ladder = ladder_of(arms)
    found = {b["name"]: said(against(a, b, arms[0])) for a, b in pairwise(ladder)}
    return {ladder[0]["name"]: "–", **found} if ladder else {}


def slower_than_above(arms: Sequence[Arm]) -> set[str]:
    """Names of arms whose whole interval against the row above lies below 1.

    Rows are compared where the lower one has what the upper one has, and more.
    """
    found = set()
    for above, arm in pairwise([arms[0], *compared(arms)]):
        if set(above["techniques"]) < set(arm["techniques"]):
            ratio = against(above, arm, arms[0])
            if ratio is not None and ratio.high < 1:
                found.add(arm["name"])
    return found


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
        beside = against(without[0], final, arms[0]) if without else None
        if alone or beside is not None:
            found.append(SwitchGain(technique, alone[0] if alone else None, beside))
    return found


def fastest_of_equal_quality(report: Mapping[str, Any]) -> Arm | None:
    """The fastest arm whose model isn't worse; None where nothing was measured.

    Equal quality is a held-out loss within the report's margin of the baseline's after equal
    tokens, and nothing that the guard found. The baseline is one of these arms.
    """
    base: Arm = report["arms"][0]
    if base["tokens_per_second"]["median"] is None:
        return None
    most = (base["held_out_loss"] or 0.0) * (1 + ((report["quality"] or {}).get("margin") or 0.0))
    equal = [
        arm
        for arm in compared(report["arms"])
        if arm["ratio"]["median"] is not None
        and arm["held_out_loss"] is not None
        and arm["held_out_loss"] <= most
        and head(arm["verdict"]) not in ("failed", "harmed")
    ]
    every: list[Arm] = [base, *equal]
    return max(every, key=lambda arm: arm["ratio"]["median"] or 0.0)


def compared(arms: Sequence[Arm]) -> list[Arm]:
    """The arms whose own speed says whether something pays."""
    return [a for a in arms[1:] if a["kind"] not in ("again", "left out")]


def unpaid(report: Mapping[str, Any]) -> list[dict[str, str]]:
    """What did not pay, each with its reason: `name` and `why`, one entry per arm or switch."""
    arms, floor, found = report["arms"], report["noise"]["floor"], []
    for arm in compared(arms):
        if head(arm["verdict"]) in ("harmed", "no effect", "inconclusive"):
            found.append({"name": arm["name"], "why": f"{_ratio(arm)}; {arm['verdict']}"})
    listed = {row["name"] for row in found}
    for below, rung in pairwise(ladder_of(arms)):
        gain = against(below, rung, arms[0])
        if gain is not None and rung["name"] not in listed and word_of(gain, floor) not in GOOD:
            why = f"against the arm above it {said(gain)}: {_no_gain(gain, report)}"
            found.append({"name": rung["name"], "why": why})
    for switch in switches(arms):
        gain = switch.beside
        listed_alone = switch.alone is not None and switch.alone["name"] in listed
        if gain is not None and not listed_alone and word_of(gain, floor) not in GOOD:
            alone = f"alone {_ratio(switch.alone)}, but " if switch.alone else ""
            why = f"{alone}beside all the others {said(gain)}: {_no_gain(gain, report)}"
            found.append({"name": switch.technique, "why": why})
    guilty = (row for row in report["guard"] if head(row["verdict"]) in GUILTY)
    return found + [{"name": row["technique"], "why": _guilt(row)} for row in guilty]


def unmeasured(report: Mapping[str, Any]) -> list[str]:
    """What was dropped, what failed, and which sections of the page have nothing to show."""
    arms = report["arms"]
    found = list(report["design"]["dropped"])
    found += [f"{a['name']}: {a['verdict']}" for a in arms if head(a["verdict"]) == "failed"]
    untested = (row for row in report["guard"] if head(row["verdict"]) == "not tested")
    found += [f"Equal quality of {row['technique']}: {_guilt(row)}" for row in untested]
    lines = (row for row in report["invariance"] if head(row["verdict"]) == "not tested")
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
    if not isinstance(needed, int) or seconds is None:
        return f"{amount(needed)} more rounds"
    return f"{needed} more rounds, about {duration(needed * seconds)}"


def busyness(arms: Sequence[Arm]) -> str | None:
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
    """The ratio's verdict beyond the noise floor of its report, without a claim."""
    if floor is None or not 0 <= floor < 1:
        return verdict(ratio)
    return verdict(ratio, None, max(floor, LEAST_FLOOR))


def _no_gain(ratio: Interval, report: Mapping[str, Any]) -> str:
    slower = word_of(ratio, report["noise"]["floor"]) == "harmed"
    return "slower with it than without" if slower else "no gain beyond the noise"


def _ratio(arm: Arm) -> str:
    return span(arm["ratio"], "times")


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


def _relative(arm: Arm) -> list[float | None] | None:
    """The arm's rounds over the baseline's beside them; None where those aren't known."""
    if not arm["beside"] or len(arm["beside"]) != len(arm["rounds"]):
        return None
    pairs = zip(arm["rounds"], arm["beside"], strict=True)
    return [a / b if _sensible(a) and _sensible(b) else None for a, b in pairs]


def _in_turn(arm: Arm, base: Arm) -> bool:
    """Whether the arm's ratio is that of its rounds over the baseline's, as far as it is known."""
    pairs = zip(arm["rounds"], base["rounds"], strict=False)
    ratios = [a / b for a, b in pairs if _sensible(a) and _sensible(b)]
    told = arm["ratio"]["median"]
    if arm is base or told is None or not ratios:
        return True
    return math.isclose(statistics.median(ratios), told, rel_tol=_SAME)


def _sensible(value: float | None) -> bool:
    low, high = _SENSIBLE
    return value is not None and math.isfinite(value) and low < value < high


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
    """The arm of the headline: the fastest of equal quality with a good verdict, or the result."""
    final, best = result_of(report["arms"]), fastest_of_equal_quality(report)
    if best is None or head(best["verdict"]) not in GOOD:
        return final
    return best if (best["ratio"]["median"] or 0) > (final["ratio"]["median"] or 0) else final


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
