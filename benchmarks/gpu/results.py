"""What is kept of a row: a JSON file that is whole after every repeat; the table and report of all.

A file is written beside itself and then takes its name, so that a run that is stopped leaves the
repeats it had, with the word ``partial``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gpu.rows import KERNELS, NAMES, ROWS, TESTS, Row
from hasten.measure.statistics import paired_ratio, spread

Found = dict[str, Any]
HEAD = (
    "| row | device | tokens/s [95 %] | goal | of paper | MFU of datasheet | of measured ceiling | "
    "peak memory | beside | plan |"
)
PARTS = ("forward", "backward", "optimizer")


def write(path: Path | None, found: Found) -> None:
    """The file as a whole, or as it was before."""
    if path is None:
        return
    beside = path.with_name(path.name + ".part")
    beside.write_text(json.dumps(found, indent=1) + "\n")
    os.replace(beside, path)


def summary(repeats: Mapping[str, list[Found]], goal_variant: str = "hasten") -> Found:
    """Median and interval of each variant, and the ratio of ``hasten`` to each other within
    turns.
    """
    rates = {variant: [r["tokens_per_second"] for r in turns] for variant, turns in repeats.items()}
    whole = min((len(v) for v in rates.values()), default=0)
    if not whole:
        return {}
    found: Found = {
        variant: spread(values).summary() for variant, values in rates.items() if values
    }
    for variant, values in rates.items():
        if variant != goal_variant and goal_variant in rates:
            ratio = paired_ratio(values[:whole], rates[goal_variant][:whole]).summary()
            found[f"{goal_variant} / {variant}"] = ratio
    return found


def read(folder: Path) -> list[Found]:
    """The rows' files in a folder; anything else in it is passed over."""
    found = []
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text())
        if isinstance(content, dict) and content.get("kind") == "hasten gpu row":
            found.append(content)
    return found


def report(folder: Path) -> str:
    """The table of a folder's rows, what each row says of itself, and kernels that are wrong."""
    found = read(folder)
    known = {f["row"]: f for f in found}
    measured = [f for f in found if "machine" in f]
    blocks = ["# hasten on a GPU"]
    if any(f.get("rehearsal") for f in found):
        blocks.append("**A rehearsal on a simulated GPU: no figure here was measured.**")
    if measured:
        first = measured[0]
        versions = ", ".join(f"{k} {v}" for k, v in first["machine"]["versions"].items())
        blocks.append(f"{first['machine']['device_name']}, {first['at']}; {versions}")
    blocks += [table(found), _kernels(known.get(KERNELS))]
    blocks += [f"```\n{said_of(known[name])}\n```" for name in NAMES if name in known]
    return "\n\n".join(block for block in blocks if block)


def _kernels(found: Found | None) -> str:
    wrong = [v for v in (found or {}).get("verdicts", []) if v["why"]]
    return "\n".join(f"- {v['kernel']}: {v['why']}" for v in wrong)


def said_of(found: Found) -> str:
    """A row's outcome in a few lines."""
    lines = [f"{found['row']}: {found['status']}" + (f", {found['said']}" if found["said"] else "")]
    for variant, value in {} if found.get("rehearsal") else found.get("summary", {}).items():
        lines.append(f"  {variant}: {_interval(value, ',.2f')}")
    for name, variant in found.get("variants", {}).items():
        lines.append(f"  {name}: {', '.join(variant['plan_words'])}")
        lines += [
            f"    {line}" for line in (*_beside_paper(found, variant), *variant.get("proofs", []))
        ]
    lines += [f"  left out: {reason}" for reason in found.get("left_out", [])]
    peers = found.get("peers", {}).items()
    lines += [f"  {peer} left out: {reason}" for peer, reason in peers if reason]
    lines += [f"  {t['outcome']}: {', '.join(t['plan'])}" for t in found.get("tried", [])]
    lines += [f"  {line}" for line in found.get("tests", [])]
    return "\n".join(lines)


def _beside_paper(found: Found, variant: Found) -> list[str]:
    """Waits, peak and parts of a step as they are, beside what they are by simulation."""
    paper, seconds = variant.get("paper"), simulated_seconds(found, variant)
    if paper is None or variant.get("syncs") is None:
        return []
    peak = variant.get("peak_memory_bytes", 0)
    lines = [
        f"waits {variant['syncs']}, by simulation {paper['syncs']:.0f}; "
        f"peak {peak / 1e9:.1f} GB, by simulation {paper['peak_bytes'] / 1e9:.1f} GB"
    ]
    parts = variant.get("parts")
    if parts and seconds:
        told = (
            f"{p} {1e3 * parts.get(p, 0.0):,.0f} ms ({seconds.get(p, 0.0) * 1e3:,.0f})"
            for p in PARTS
        )
        lines.append(f"{', '.join(told)}; in brackets by simulation")
    return lines


def simulated_seconds(found: Found, variant: Found) -> Mapping[str, float]:
    """Seconds of a step's parts by simulation, on the device of the row; none where it wasn't
    traced.
    """
    by_device = (variant.get("paper") or {}).get("seconds", {})
    name = found["machine"]["device_name"].lower()
    here = [device for device in by_device if device.partition("-")[0] in name]
    return by_device[here[0]] if here else {}


def table(found: Iterable[Found]) -> str:
    """The page's table; rows of which there is no figure are called not measured."""
    known = {f["row"]: f for f in found}
    lines = [HEAD, "|" + "---|" * HEAD.count(" | ") + "---|"]
    lines.append(_words_line(KERNELS, known.get(KERNELS), "all right"))
    lines += [_line(known.get(row.name), row) for row in ROWS if row.needs_gpu]
    return "\n".join([*lines, _words_line(TESTS, known.get(TESTS), "all pass")])


def _words_line(name: str, found: Found | None, goal: str) -> str:
    """A stage without a speed."""
    if found is None or "machine" not in found:
        why = f" ({found['said']})" if found else ""
        return f"| {name} | | not measured{why} | {goal} | | | | | | |"
    return f"| {name} | {found['machine']['device_name']} | {found['said']} | {goal} | | | | | | |"


def _line(found: Found | None, row: Row) -> str:
    goal = f"≥ {row.goals[0]:,} / {row.goals[1]:,} / {row.goals[2]:,}" if row.goals else ""
    goal = f"≥ {row.ratio_goal}× the Trainer" if row.ratio_goal else goal
    best = (found or {}).get("summary", {}).get("hasten")
    if found is None or not best:
        why = f" ({found['said']})" if found else ""
        return f"| {row.name} | | not measured{why} | {goal} | | | | | | |"
    variant = found["variants"]["hasten"]
    device, plan = found["machine"]["device_name"], ", ".join(variant["plan_words"])
    if found.get("rehearsal"):
        return f"| {row.name} | {device} | rehearsed | {goal} | | | | | | {plan} |"
    ratios = [f"{k}: {_interval(v, '.2f')}" for k, v in found["summary"].items() if " / " in k]
    cells = (
        row.name,
        device,
        _interval(best, ",.0f") + (" (partial)" if found["status"] == "partial" else ""),
        goal,
        _share(_of_paper(found, variant, best["median"])),
        _share(variant.get("mfu_datasheet")),
        _share(variant.get("mfu_measured")),
        f"{variant['peak_memory_bytes'] / 1e9:.1f} GB",
        "; ".join(ratios) or "; ".join(found.get("left_out", [])),
        plan,
    )
    return "| " + " | ".join(cells) + " |"


def _of_paper(found: Found, variant: Found, rate: float) -> float | None:
    """The measured speed as a share of the most that paper allows."""
    seconds = sum(simulated_seconds(found, variant).values())
    return rate * seconds / variant["paper"]["tokens"] if seconds else None


def _interval(value: Mapping[str, float | None], form: str) -> str:
    if value["low"] is None or value["high"] is None:
        return f"{value['median']:{form}}"
    return f"{value['median']:{form}} [{value['low']:{form}}, {value['high']:{form}}]"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def listed() -> str:
    """Every row with what it is, by priority."""
    texts = {KERNELS: "each kernel on small inputs, against float64", TESTS: "the tests marked gpu"}
    texts |= {row.name: row.what for row in ROWS}
    return "\n".join(f"{name:18} {texts[name]}" for name in NAMES)
