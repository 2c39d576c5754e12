"""What is kept of a row: a JSON file that is whole after every repeat, and the page's table of all.

A file is written beside itself and then takes its name, so that a run that is stopped leaves the
repeats it had, with the word ``partial``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gpu.rows import NAMES, ROWS, TESTS
from hasten.measure.statistics import paired_ratio, spread

Found = dict[str, Any]
HEAD = (
    "| row | device | tokens/s [95 %] | goal | MFU of datasheet | of measured ceiling | "
    "peak memory | beside | plan |"
)


def write(path: Path | None, found: Found) -> None:
    """The file as a whole, or as it was before."""
    if path is None:
        return
    beside = path.with_name(path.name + ".part")
    beside.write_text(json.dumps(found, indent=1) + "\n")
    os.replace(beside, path)


def summary(repeats: Mapping[str, list[Found]], goal_arm: str = "hasten") -> Found:
    """Median and interval of each arm, and the ratio of ``hasten`` to each other within turns."""
    rates = {arm: [r["tokens_per_second"] for r in turns] for arm, turns in repeats.items()}
    whole = min((len(v) for v in rates.values()), default=0)
    if not whole:
        return {}
    found: Found = {arm: spread(values).summary() for arm, values in rates.items() if values}
    for arm, values in rates.items():
        if arm != goal_arm and goal_arm in rates:
            ratio = paired_ratio(values[:whole], rates[goal_arm][:whole]).summary()
            found[f"{goal_arm} / {arm}"] = ratio
    return found


def read(folder: Path) -> list[Found]:
    """The rows' files in a folder; anything else in it is passed over."""
    found = []
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text())
        if isinstance(content, dict) and content.get("kind") == "hasten gpu row":
            found.append(content)
    return found


def table(found: Iterable[Found]) -> str:
    """The page's table; rows of which there is no figure are called not measured."""
    known = {f["row"]: f for f in found}
    lines = [HEAD, "|" + "---|" * HEAD.count(" | ") + "---|"]
    lines += [_line(known.get(row.name), row) for row in ROWS if row.needs_gpu]
    return "\n".join([*lines, _tests_line(known.get(TESTS))])


def _tests_line(found: Found | None) -> str:
    if found is None or "exit_code" not in found:
        why = f" ({found['said']})" if found else ""
        return f"| {TESTS} | | not measured{why} | all pass | | | | | |"
    return f"| {TESTS} | {found['machine']['device_name']} | {found['said']} | all pass | | | | | |"


def _line(found: Found | None, row: Any) -> str:
    goal = f"≥ {row.goals[0]:,} / {row.goals[1]:,} / {row.goals[2]:,}" if row.goals else ""
    goal = f"≥ {row.ratio_goal}× the Trainer" if row.ratio_goal else goal
    best = (found or {}).get("summary", {}).get("hasten")
    if found is None or not best:
        why = f" ({found['said']})" if found else ""
        return f"| {row.name} | | not measured{why} | {goal} | | | | | |"
    arm = found["arms"]["hasten"]
    ratios = [f"{k}: {_interval(v, '.2f')}" for k, v in found["summary"].items() if " / " in k]
    cells = (
        row.name,
        found["machine"]["device_name"],
        _interval(best, ",.0f") + (" (partial)" if found["status"] == "partial" else ""),
        goal,
        _share(arm.get("mfu_datasheet")),
        _share(arm.get("mfu_measured")),
        f"{arm['peak_memory_bytes'] / 1e9:.1f} GB",
        "; ".join(ratios) or "; ".join(found.get("left_out", [])),
        ", ".join(arm["plan_words"]),
    )
    return "| " + " | ".join(cells) + " |"


def _interval(value: Mapping[str, float | None], form: str) -> str:
    if value["low"] is None or value["high"] is None:
        return f"{value['median']:{form}}"
    return f"{value['median']:{form}} [{value['low']:{form}}, {value['high']:{form}}]"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def listed() -> str:
    """Every row with what it is, by priority."""
    texts = {TESTS: "the tests marked gpu", **{row.name: row.what for row in ROWS}}
    return "\n".join(f"{name:18} {texts[name]}" for name in NAMES)
