"""A profile as text and as files: ``profile.json``, and a page with a timeline and tables."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from textwrap import indent
from typing import Any

from hasten.core.timing import PARTS, step_total
from hasten.formatting import NOT_MEASURED, aligned, number_text
from hasten.machine.files import write_result
from hasten.report.markup import html_page, html_table
from hasten.report.svg import rect, svg_text

# A profile as text and aligned tables, for the terminal and the page.
#
# Values that weren't measured are marked so, and never printed as zero.

Table = tuple[str, Sequence[str], Sequence[Sequence[str]]]  # title, columns, rows


def render_text(profile: Mapping[str, Any]) -> str:
    """Returns the full profile as aligned tables."""
    pieces = [head(profile)]
    for title, columns, rows in tables(profile):
        pieces.append(f"{title}\n{indent(aligned([columns, *rows]), '  ')}")
    return "\n\n".join(pieces)


def head(profile: Mapping[str, Any]) -> str:
    """Returns speed, evenness and use of the device, a line each."""
    even, used = profile["ledger"]["stability"], profile["ledger"]["utilisation"]
    stall, cores = profile["data_stall_share"], profile.get("usable_cores")
    lines = [
        f"{profile['tokens_per_second']:,.0f} tokens/s, step {_time(profile['step_seconds'])}, "
        f"padding {profile['padding_share']:.0%}, peak {_size(profile['peak_memory_bytes'])}",
        f"steps: p50 {_time(even['p50'])}, p99 {_time(even['p99'])}, spread "
        f"{_share(even['relative_spread'])}, {even['stalls']} stalled; data stall {_share(stall)}",
        f"MFU {_share(profile['mfu'])}; device used {_share(used)}"
        + (f" ({used * cores:.2f} of {cores} cores)" if used is not None and cores else ""),
    ]
    return "\n".join(lines)


def tables(profile: Mapping[str, Any]) -> list[Table]:
    """Returns all tables of a profile."""
    operators, ledger = profile["operators"], profile["ledger"]
    total = step_total({k: v for k, v in ledger["step"].items() if v is not None})
    parts = []
    for part in PARTS:
        taken = ledger["step"][part]
        share = "between steps" if part == "checkpoint" else _share(taken and taken / total)
        parts.append([part, _time(taken), "" if taken is None else share])
    owners = [[owner, _size(count)] for owner, count in ledger["memory"].items()]
    families = [
        [row["family"], _time(row["seconds"]), _share(row["share"]), f"{row['calls']:,}"]
        for row in operators["families"]
    ]
    top = [
        [_cut(row["name"]), row["family"], _time(row["seconds"]), _share(row["share"])]
        for row in operators["top"]
    ]
    title = (
        f"Operators of one step under the profiler "
        f"({_time(operators['profiled_step_seconds'])}, "
        f"{_time(operators['outside_seconds'])} of it outside any operator), own time"
    )
    return [
        ("Where a step's time goes", ["part", "seconds", "share"], parts),
        ("Memory by owner", ["owner", "bytes"], owners),
        (title, ["family", "seconds", "share", "calls"], families),
        ("The longest of them", ["operator", "family", "seconds", "share"], top),
        *_ranks(profile),
    ]


def _ranks(profile: Mapping[str, Any]) -> list[Table]:
    if profile["parallel"] is None:
        return []
    shown = ("data", "forward", "backward", "communication", "optimizer", "idle")
    rows = [[str(r["rank"]), *(_time(r["step"][part]) for part in shown)] for r in profile["ranks"]]
    parallel, communications = profile["parallel"], _communication(profile["ranks"])
    if "text" in parallel:
        efficiency = ("Efficiency", ["", ""], [["", parallel["text"]]])
        return [("Ranks", ["rank", *shown], rows), *communications, efficiency]
    speeds = [
        ["all ranks", f"{parallel['tokens_per_second']:,.0f}", ""],
        [
            f"one rank alone x {parallel['ranks']}",
            f"{parallel['one_rank_tokens_per_second'] * parallel['ranks']:,.0f}",
            _share(parallel["efficiency_against_one_rank"]),
        ],
        [
            "all ranks without communication",
            f"{parallel['without_communication_tokens_per_second']:,.0f}",
            _share(parallel["efficiency_against_no_communication"]),
        ],
    ]
    title = (
        "Parallel efficiency; communication that shows: "
        f"{_time(parallel['communication_seconds'])} a step"
    )
    return [
        ("Where each rank's time goes", ["rank", *shown], rows),
        *communications,
        (title, ["against", "tokens/s", "efficiency"], speeds),
    ]


def _communication(ranks: Sequence[Mapping[str, Any]]) -> list[Table]:
    names = ("comm_seconds", "exposed_comm_seconds", "hidden_communication_seconds")
    rows = [
        [
            str(r["rank"]),
            *(_time(r["communication"].get(name)) for name in names),
            _size(r["communication"].get("comm_bytes")),
        ]
        for r in ranks
        if r.get("communication")
    ]
    columns = ["rank", "under way", "exposed", "hidden", "sent"]
    return [("What travels in a step", columns, rows)] if rows else []


def _time(seconds: float | None) -> str:
    return number_text(seconds, "seconds")


def _size(count: float | None) -> str:
    return number_text(count, "memory")


def _share(value: float | None) -> str:
    return number_text(value, "percent")


def _cut(name: str, most: int = 48) -> str:
    return name if len(name) <= most else name[: most - 3] + "..."


WIDTH = 920  # pixels of the timeline


def timeline(laps: Sequence[tuple[str, float]]) -> str:
    """Returns one step from left to right as inline SVG; repeated parts are drawn again."""
    total_seconds = sum(seconds for _, seconds in laps)
    if not total_seconds:
        return f"<p>{NOT_MEASURED}</p>"
    marks, at = [], 0.0
    for part, seconds in laps:
        x, width = at / total_seconds * WIDTH, seconds / total_seconds * WIDTH
        at += seconds
        css = f"part s{PARTS.index(part) + 1}"
        marks.append(rect(css, x, 0, max(width, 0.3), 44, f"{part} {_time(seconds)}"))
        if width > 8 * len(part):
            marks.append(svg_text("inside", x + 5, 27, part))
    ends = svg_text("tick", 0, 60, "0") + svg_text("tick end", WIDTH, 60, _time(total_seconds))
    return (
        f'<svg viewBox="0 0 {WIDTH} 64" role="img" aria-label="one step, {_time(total_seconds)}">'
        f"{''.join(marks)}{ends}</svg>"
    )


def render_page(profile: Mapping[str, Any]) -> str:
    """Returns one HTML file without scripts and external content."""
    keys = "".join(
        f'<span class="item"><span class="key part box s{number}"></span>{part}</span>'
        for number, part in enumerate(PARTS, start=1)
    )
    sections = "".join(
        f"<section><h2>{escape(title)}</h2>{html_table(columns, rows)}</section>"
        for title, columns, rows in tables(profile)
    )
    lines = "<br>".join(map(escape, head(profile).splitlines()))
    body = (
        f"<p>{lines}</p><section><h2>The last measured step</h2>{timeline(profile['laps'])}"
        f'<p class="legend">{keys}</p></section>{sections}'
        f"<p><code>{escape(profile.get('command', ''))}</code>, "
        f"{escape(profile.get('created', ''))}</p>"
    )
    return html_page(profile.get("title", "profile"), body)


def write_profile(profile: Mapping[str, Any], folder: Path) -> Path:
    """Writes ``profile.json`` and ``profile.html`` atomically; returns the page's path.

    Raises:
        InputError: the folder can't be written.
    """
    text = json.dumps(profile, indent=1, allow_nan=False) + "\n"
    page = render_page(profile)
    write_result(folder / "profile.json", text)
    write_result(folder / "profile.html", page)
    return folder / "profile.html"
