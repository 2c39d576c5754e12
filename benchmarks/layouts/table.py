"""What bench_layouts.py's rounds say: throughput of each layout against its two denominators.

    alone   one process trains by itself and the others sleep: what so many processes would do if
            nothing were shared, cores and memory's bandwidth included
    apart   as many processes train by themselves at the same time, and nothing travels: what is
            left after the machine's share is what the layout costs

A variant's ratio is taken within a round; the table has the median over rounds, and the 95 %
Student interval of the mean logarithm.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hasten.measure.statistics import paired_ratio

ALONE, APART = "alone", "apart"
LEAST = 60.0  # seconds of a sitting


@dataclass(frozen=True)
class Place:
    """Where variants run: hosts with ranks, the rate between hosts (None: one host, no limit)."""

    said: str
    hosts: int
    ranks: int
    rate: str | None = None

    @property
    def world(self) -> int:
        return self.hosts * self.ranks


PLACES = {
    "2": Place("2 processes", 1, 2),
    "4": Place("4 processes", 1, 4),
    "1gbit": Place("2 hosts with 1 Gbit/s between them", 2, 1, "1gbit"),
    "100mbit": Place("2 hosts with 100 Mbit/s between them", 2, 1, "100mbit"),
}


def due(
    sittings: Sequence[Mapping[str, Any]], places: Sequence[str], minutes: float
) -> dict[str, float]:
    """Seconds that each place has left of an even share of the minutes, where there are any.

    A place that has had no sitting gets one, however little the minutes are.
    """
    share = 60 * minutes / max(len(places), 1)
    spent = dict.fromkeys(places, 0.0)
    for sitting in sittings:
        if sitting["place"] in spent:
            spent[sitting["place"]] += sitting["seconds"]
    left = {name: share - seconds for name, seconds in spent.items()}
    return {n: max(s, LEAST) for n, s in left.items() if s >= LEAST or not spent[n]}


def together(
    sittings: Sequence[Mapping[str, Any]], place: str
) -> tuple[dict[str, Any], dict[str, str]]:
    """Rounds of all sittings at a place, by variant, and each layout's model.

    Each sitting has its own denominators, so a variant is only set beside those of its own rounds:
    sittings with other variants are left out, all but those like the last.
    """
    here = [s["found"] for s in sittings if s["place"] == place]
    alike = [found for found in here if found["models"] == here[-1]["models"]]
    rounds: dict[str, Any] = {}
    for found in alike:
        for name, row in found["variants"].items():
            into = rounds.setdefault(name, {"rate": [], "bytes": []})
            for key, values in into.items():
                values.extend(row[key])
    return rounds, alike[-1]["models"] if alike else {}


def rows(rounds: Mapping[str, Any], models: Mapping[str, str], world: int) -> list[str]:
    """The table of a place, in Markdown; efficiency is 1 where a layout costs nothing."""
    lines = [
        "| layout | model | tokens/s | of a process alone [95 %] | of processes apart [95 %] "
        "| MB a step and host | rounds |",
        "|---" * 7 + "|",
    ]
    for kind in sorted(set(models.values())):
        for way in (ALONE, APART):
            rate = rounds[f"{way} {kind}"]["rate"]
            if rate:
                lines.append(
                    f"| {way} | {kind} | {statistics.median(rate):,.0f} | | | | {len(rate)} |"
                )
    for name, kind in models.items():
        rate = rounds[name]["rate"]
        if not rate:
            continue
        against = []
        for way in (ALONE, APART):
            base = rounds[f"{way} {kind}"]["rate"]
            whole = world if way == ALONE else 1
            ratio = paired_ratio([whole * b for b in base], rate)
            around = f" [{ratio.low:.2f}, {ratio.high:.2f}]" if len(rate) > 1 else ""
            against.append(f"{ratio.median:.2f}{around}")
        sent = statistics.mean(rounds[name]["bytes"]) / 1e6
        lines.append(
            f"| {name} | {kind} | {statistics.median(rate):,.0f} | {' | '.join(against)} "
            f"| {f'{sent:.2f}' if sent else '-'} | {len(rate)} |"
        )
    return lines
