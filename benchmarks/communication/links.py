"""The links of bench_communication.py's table, and how its minutes are dealt over them: in short
sittings.

A sitting is one lab with all of a link's methods in turns. A table that was cut off goes on with
the link that has had the least of its share.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SITTING = 600.0  # seconds, of which the first go into starting and a round to warm up
LEAST = 90.0  # in less there is no round
AGAINST = ("apart", "alone", "ddp")  # denominators, where they are among the methods


@dataclass(frozen=True)
class Link:
    """A rate as tools/netlab takes it (None: no limit), and a share of the table's time."""

    rate: str | None
    delay_ms: float
    methods: tuple[str, ...]
    share: float
    steps: Mapping[str, int]  # of a turn, where a step takes seconds


DENOMINATORS = ("apart", "alone")
LINKS = {
    "100 Mbit/s": Link(
        "100mbit",
        0.0,
        (*DENOMINATORS, "ddp", "int4", "powersgd:16", "topk:0.05", "diloco:20", "stream"),
        0.4,
        {"ddp": 3, "int4": 8, "topk:0.05": 10},
    ),
    "1 Gbit/s": Link(
        "1gbit",
        0.0,
        (*DENOMINATORS, "ddp", "bf16", "int8", "int4", "powersgd:16", "stream"),
        0.25,
        {},
    ),
    "no limit": Link(None, 0.0, (*DENOMINATORS, "ddp", "int8", "stream"), 0.15, {}),
    "10 Mbit/s, 20 ms": Link(
        "10mbit", 20.0, (*DENOMINATORS, "diloco:50", "stream:14", "stream"), 0.2, {}
    ),
}


def next_link(sittings: Sequence[Mapping[str, Any]], minutes: float) -> tuple[str, float] | None:
    """The link that lacks the largest part of its time, and the seconds of its next sitting.

    A link that has had no sitting gets one, however little the minutes are.
    """
    spent = dict.fromkeys(LINKS, 0.0)
    for sitting in sittings:
        spent[sitting["link"]] = spent.get(sitting["link"], 0.0) + sitting["seconds"]
    for name in LINKS:
        if not spent[name]:
            return name, max(LEAST, min(SITTING, 60 * minutes * LINKS[name].share))
    missing = {name: 60 * minutes * link.share - spent[name] for name, link in LINKS.items()}
    name = max(missing, key=lambda n: missing[n])
    return (name, min(missing[name], SITTING)) if missing[name] >= LEAST else None


def together(sittings: Sequence[Mapping[str, Any]], link: str) -> dict[str, dict[str, list[float]]]:
    """Each method's figures of all rounds of all sittings on a link, in their order."""
    found: dict[str, dict[str, list[float]]] = {}
    for sitting in sittings:
        if sitting["link"] != link:
            continue
        for method, row in sitting["found"].items():
            into = found.setdefault(method, {})
            for key, values in row.items():
                if isinstance(values, list):
                    into.setdefault(key, []).extend(values)
    return found


def share(found: Mapping[str, Any], other: str, row: Mapping[str, Any]) -> str:
    """Throughput as a share of another method's, the median over rounds and its range."""
    if other not in found:
        return "-"
    pairs = zip(found[other]["seconds"], row["seconds"], strict=True)
    ratios = sorted(100 * a / b for a, b in pairs)
    return f"{statistics.median(ratios):.0f} % ({ratios[0]:.0f}-{ratios[-1]:.0f})"


def rows(found: Mapping[str, Mapping[str, list[float]]]) -> list[str]:
    """The table of a link; exposed and hidden seconds are rank 0's."""
    lines = [
        f"| method | s/step | {' | '.join(f'of {a}' for a in AGAINST)} | MB/step and host "
        "| exposed s/step | hidden s/step | rounds |",
        "|---" * (6 + len(AGAINST)) + "|",
    ]
    for name, row in found.items():
        shares = [share(found, other, row) for other in AGAINST]
        middle = [statistics.median(row[k]) for k in ("waited", "hidden")]
        lines.append(
            f"| {name} | {statistics.median(row['seconds']):.3f} | {' | '.join(shares)} | "
            f"{statistics.mean(row['bytes']) / 1e6:.3f} | {middle[0]:.3f} | {middle[1]:.3f} | "
            f"{len(row['seconds'])} |"
        )
    return lines


def sent_bytes() -> int:
    """Bytes that this host's interface has sent; 0 if ranks are plain processes."""
    if os.environ.get("GLOO_SOCKET_IFNAME") != "eth0":
        return 0
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "eth0":
            return int(numbers.split()[8])
    return 0
