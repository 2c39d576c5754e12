"""A profile in words and aligned tables, for the terminal and the page alike.

What wasn't measured is said to be so and never printed as zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hasten.core.timing import PARTS, step_total

NOT_MEASURED = "not measured"
Rows = Sequence[Sequence[str]]


def render_text(profile: Mapping[str, Any]) -> str:
    """The whole profile as aligned tables."""
    pieces = [head(profile)]
    for title, columns, rows in tables(profile):
        pieces.append("\n".join([title, *_aligned([columns, *rows])]))
    return "\n\n".join(pieces)


def head(profile: Mapping[str, Any]) -> str:
    """Speed, evenness and use of the device, a line each."""
    even, used = profile["ledger"]["stability"], profile["ledger"]["utilisation"]
    stall, cores = profile["data_stall_share"], profile.get("usable_cores")
    lines = [
        f"{profile['tokens_per_second']:,.0f} tokens/s, step {time_text(profile['step_seconds'])}, "
        f"padding {profile['padding_share']:.0%}, peak {_size(profile['peak_memory_bytes'])}",
        f"steps: p50 {time_text(even['p50'])}, p99 {time_text(even['p99'])}, spread "
        f"{_share(even['relative_spread'])}, {even['stalls']} stalled; data stall {_share(stall)}",
        f"MFU {_share(profile['mfu'])}; device used {_share(used)}"
        + (f" ({used * cores:.2f} of {cores} cores)" if used is not None and cores else ""),
    ]
    return "\n".join(lines)


def tables(profile: Mapping[str, Any]) -> list[tuple[str, list[str], list[list[str]]]]:
    """(title, columns, rows) of each table."""
    found = profile["operators"]
    families = [
        [row["family"], time_text(row["seconds"]), _share(row["share"]), f"{row['calls']:,}"]
        for row in found["families"]
    ]
    top = [
        [_cut(row["name"]), row["family"], time_text(row["seconds"]), _share(row["share"])]
        for row in found["top"]
    ]
    title = (
        f"Operators of one step under the profiler ({time_text(found['profiled_step_seconds'])}, "
        f"{time_text(found['outside_seconds'])} of it outside any operator), own time"
    )
    return [
        ("Where a step's time goes", ["part", "seconds", "share"], _parts(profile)),
        ("Whose the memory is", ["owner", "bytes"], _owners(profile)),
        (title, ["family", "seconds", "share", "calls"], families),
        ("The longest of them", ["operator", "family", "seconds", "share"], top),
        *_ranks(profile),
    ]


def _parts(profile: Mapping[str, Any]) -> list[list[str]]:
    step = profile["ledger"]["step"]
    whole = step_total({k: v for k, v in step.items() if v is not None})
    rows = []
    for part in PARTS:
        seconds = step[part]
        share = "between steps" if part == "checkpoint" else _share(seconds and seconds / whole)
        rows.append([part, time_text(seconds), share if seconds is not None else ""])
    return rows


def _owners(profile: Mapping[str, Any]) -> list[list[str]]:
    return [[owner, _size(found)] for owner, found in profile["ledger"]["memory"].items()]


def _ranks(profile: Mapping[str, Any]) -> list[tuple[str, list[str], list[list[str]]]]:
    if profile["parallel"] is None:
        return []
    shown = ("data", "forward", "backward", "communication", "optimizer", "idle")
    rows = [
        [str(r["rank"]), *(time_text(r["step"][part]) for part in shown)] for r in profile["ranks"]
    ]
    found, wires = profile["parallel"], _wires(profile["ranks"])
    if "text" in found:
        words = ("Efficiency", ["", ""], [["", found["text"]]])
        return [("Ranks", ["rank", *shown], rows), *wires, words]
    speeds = [
        ["all ranks", _rate(found["tokens_per_second"]), ""],
        [
            f"one rank alone x {found['ranks']}",
            _rate(found["one_rank_tokens_per_second"] * found["ranks"]),
            _share(found["efficiency_against_one_rank"]),
        ],
        [
            "all ranks without communication",
            _rate(found["without_communication_tokens_per_second"]),
            _share(found["efficiency_against_no_communication"]),
        ],
    ]
    title = (
        "Parallel efficiency; communication that shows: "
        f"{time_text(found['communication_seconds'])} a step"
    )
    return [
        ("Where each rank's time goes", ["rank", *shown], rows),
        *wires,
        (title, ["against", "tokens/s", "efficiency"], speeds),
    ]


def _wires(
    ranks: Sequence[Mapping[str, Any]],
) -> list[tuple[str, list[str], list[list[str]]]]:
    """What each rank's wire took in a step."""
    names = ("wire_seconds", "exposed_communication_seconds", "hidden_communication_seconds")
    rows = [
        [
            str(r["rank"]),
            *(time_text(r["wire"].get(name)) for name in names),
            _size(r["wire"].get("wire_bytes")),
        ]
        for r in ranks
        if r.get("wire")
    ]
    columns = ["rank", "under way", "exposed", "hidden", "sent"]
    return [("What travels in a step", columns, rows)] if rows else []


def _aligned(rows: Rows) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def time_text(seconds: float | None) -> str:
    if seconds is None:
        return NOT_MEASURED
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _size(count: float | None) -> str:
    if count is None:
        return NOT_MEASURED
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def _share(value: float | None) -> str:
    return NOT_MEASURED if value is None else f"{value:.1%}"


def _rate(value: float) -> str:
    return f"{value:,.0f}"


def _cut(name: str, most: int = 48) -> str:
    return name if len(name) <= most else name[: most - 3] + "..."
