"""What the report derives from several arms together: rungs of a ladder, the fastest, the proofs.

Everything here reads a report that report_schema.py has checked; `hardware` alone is free in form,
so its entries are used only where they are what they seem.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from hasten.evidence.charts import NOT_MEASURED
from hasten.evidence.report_words import span, words
from hasten.evidence.statistics import paired_ratio

Arm = Mapping[str, Any]


def head(verdict: str) -> str:
    """The verdict's word; a reason may follow it after a colon."""
    return verdict.partition(":")[0]


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


def rungs(arms: Sequence[Arm]) -> list[str]:
    """On a ladder, each arm's speed against the arm above it; empty where the arms are no ladder.

    An arm's verdict is against the baseline, so a technique that takes back what the others gained
    shows only here.
    """
    steps = list(pairwise(arms))
    if len(steps) < 2 or any(b["techniques"][:-1] != a["techniques"] for a, b in steps):
        return []
    if any(not b["techniques"] for _, b in steps):
        return []
    return ["–", *(_against(a, b) for a, b in steps)]


def _against(one: Arm, other: Arm) -> str:
    """The speed of the other arm over the one's, paired by round, with its interval."""
    pairs = list(zip(one["rounds"], other["rounds"], strict=False))
    rounds = [(a, b) for a, b in pairs if a is not None and b is not None and a > 0 and b > 0]
    if not rounds or "failed" in (head(one["verdict"]), head(other["verdict"])):
        return NOT_MEASURED
    ratio = paired_ratio([a for a, _ in rounds], [b for _, b in rounds])
    return span(ratio.summary(), "times")


def fastest(arms: Sequence[Arm]) -> Arm | None:
    """The arm that gains more than the last one does, if there is one with a good verdict."""
    good = [arm for arm in arms if head(arm["verdict"]) in ("held", "fell short")]
    best = max(good, key=lambda arm: arm["ratio"]["median"] or 0, default=None)
    final = arms[-1]["ratio"]["median"]
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
