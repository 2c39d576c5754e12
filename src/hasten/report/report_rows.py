"""Rows of the page that several arms make together: the machine, the fastest, proofs, the ledger.

Everything here reads a report that report_schema.py has checked; `hardware` alone is free in form,
so its entries are used only where they are what they seem.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from hasten.formatting import words
from hasten.report.report_gains import GOOD, Arm, any_known, head, result_of


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


def fastest(arms: Sequence[Arm]) -> Arm | None:
    """The arm that gains more than the result does, if there is one with a good verdict."""
    good = [arm for arm in arms if head(arm["verdict"]) in GOOD]
    best = max(good, key=lambda arm: arm["ratio"]["median"] or 0, default=None)
    final = result_of(arms)["ratio"]["median"]
    beaten = best is not None and final is not None and (best["ratio"]["median"] or 0) > final
    return best if beaten else None


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
