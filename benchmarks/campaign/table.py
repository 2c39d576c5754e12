"""What the ledger's lines say together: a table of Markdown, and what went wrong, by kind."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping

from campaign.faults import FAULTS, TRAINERS, Fault
from campaign.ledger import Ledger, Tally

MACHINE = "2 cores Intel Xeon with AMX bf16, 25 GB, torch 2.13.0 CPU"


def table(ledger: Ledger) -> str:
    """The whole report: counts, kinds, seconds, and where they come from."""
    parts = [_counts(ledger), _kinds(ledger), _seconds(ledger), _origin(ledger)]
    return "\n\n".join(part for part in parts if part)


def _counts(ledger: Ledger) -> str:
    names = " | ".join(TRAINERS.values())
    lines = [f"| fault | {names} | of hasten's full count |", "|---" * (len(TRAINERS) + 2) + "|"]
    for fault in FAULTS:
        cells = [_cell(fault, ledger.tally(name, fault.name), name) for name in TRAINERS]
        done = min(ledger.tally("hasten", fault.name).cases / fault.wanted["hasten"], 1.0)
        lines.append(f"| {fault.row} (`{fault.name}`) | {' | '.join(cells)} | {done:.0%} |")
    return "\n".join(lines)


def _cell(fault: Fault, tally: Tally, trainer: str) -> str:
    if trainer not in fault.wanted:
        return "-"
    if not tally.cases:
        return "not possible here" if tally.skipped else "not run"
    return f"{tally.good:,} of {tally.cases:,}"


def _kinds(ledger: Ledger) -> str:
    lines = ["| trainer | fault | what came of it | cases |", "|---|---|---|---|"]
    for label, fault, tally in _tallies(ledger):
        for kind, count in tally.kinds.most_common():
            lines.append(f"| {label} | `{fault.name}` | {kind} | {count:,} |")
    return "\n".join(lines) if len(lines) > 2 else ""


def _seconds(ledger: Ledger) -> str:
    lines = ["| seconds | cases | median | longest |", "|---|---|---|---|"]
    for _, fault, tally in _tallies(ledger):
        for name, values in sorted(tally.numbers.items()):
            middle = statistics.median(values)
            what = f"`{fault.name}`: {name.removeprefix('seconds ').removeprefix('seconds, ')}"
            lines.append(f"| {what} | {len(values):,} | {middle:.2f} s | {max(values):.2f} s |")
    return "\n".join(lines) if len(lines) > 2 else ""


def _origin(ledger: Ledger) -> str:
    if not ledger.lines:
        return "nothing was run"
    days = sorted({line["at"][:10] for line in ledger.lines})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    hours = sum(line["seconds"] for line in ledger.lines) / 3600
    versions: Mapping[str, str] = ledger.lines[-1]["about"]
    told = ", ".join(f"{name} {value}" for name, value in versions.items())
    return f"{when}, {hours:.1f} h in all; {told}"


def _tallies(ledger: Ledger) -> Iterator[tuple[str, Fault, Tally]]:
    """Those with cases, trainer by trainer."""
    for name, label in TRAINERS.items():
        for fault in FAULTS:
            tally = ledger.tally(name, fault.name)
            if tally.cases:
                yield label, fault, tally
