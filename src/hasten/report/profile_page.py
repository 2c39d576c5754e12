"""A profile in words and as files: ``profile.json``, and a page with a timeline and the tables."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from textwrap import indent
from typing import Any

from hasten.core.timing import PARTS, step_total
from hasten.formatting import NOT_MEASURED, aligned, number_text
from hasten.report.markup import html_table, write_files

# A profile in words and aligned tables, for the terminal and the page alike.
#
# What wasn't measured is said to be so and never printed as zero.

Table = tuple[str, Sequence[str], Sequence[Sequence[str]]]  # title, columns, rows


def render_text(profile: Mapping[str, Any]) -> str:
    """The whole profile as aligned tables."""
    pieces = [head(profile)]
    for title, columns, rows in tables(profile):
        pieces.append(f"{title}\n{indent(aligned([columns, *rows]), '  ')}")
    return "\n\n".join(pieces)


def head(profile: Mapping[str, Any]) -> str:
    """Speed, evenness and use of the device, a line each."""
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
    """All tables of a profile."""
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


COLOURS = {
    "data": "#b5651d",
    "copy": "#c9a227",
    "forward": "#2a6fb0",
    "backward": "#1f4e79",
    "communication": "#a23b72",
    "optimizer": "#3a7d44",
    "checkpoint": "#6b6b6b",
    "idle": "#c4c4c4",
}
WIDTH = 920  # pixels of the timeline


def timeline(laps: Sequence[tuple[str, float]], width: int = WIDTH) -> str:
    """One step from left to right as an inline SVG; a part that came again is drawn again."""
    total_seconds = sum(seconds for _, seconds in laps)
    if not total_seconds:
        return f"<p>{NOT_MEASURED}</p>"
    marks, at = [], 0.0
    for part, seconds in laps:
        x, long = at / total_seconds * width, seconds / total_seconds * width
        at += seconds
        label = f"{part} {_time(seconds)}"
        marks.append(
            f'<rect x="{x:.2f}" y="0" width="{max(long, 0.3):.2f}" height="44" '
            f'fill="{COLOURS[part]}"><title>{escape(label)}</title></rect>'
        )
        if long > 8 * len(part):
            marks.append(f'<text x="{x + 5:.1f}" y="27" fill="#fff">{escape(part)}</text>')
    return (
        f'<svg viewBox="0 0 {width} 64" role="img" aria-label="one step, '
        f'{_time(total_seconds)}">'
        f"{''.join(marks)}<text x='0' y='60'>0</text>"
        f'<text x="{width}" y="60" text-anchor="end">{_time(total_seconds)}</text></svg>'
    )


def render_page(profile: Mapping[str, Any]) -> str:
    """One HTML file without scripts; nothing is loaded from elsewhere."""
    keys = "".join(
        f'<span><i style="background:{COLOURS[part]}"></i>{part}</span>' for part in PARTS
    )
    body = "".join(
        f"<h2>{escape(title)}</h2>{html_table(columns, rows)}"
        for title, columns, rows in tables(profile)
    )
    lines = "<br>".join(map(escape, head(profile).splitlines()))
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>hasten profile</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style><main><h1>{escape(profile.get('title', 'profile'))}</h1>"
        f"<p>{lines}</p><h2>The last measured step</h2>{timeline(profile['laps'])}"
        f'<p class="keys">{keys}</p>{body}'
        f"<p><code>{escape(profile.get('command', ''))}</code>, "
        f"{escape(profile.get('created', ''))}</p></main></html>\n"
    )


STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:0;color:#1a1a1a;background:#fff}"
    "main{max-width:960px;margin:auto;padding:24px}h1{font-size:22px}h2{font-size:17px}"
    "svg{width:100%;height:auto;font-size:13px}table{border-collapse:collapse}"
    "td,th{padding:2px 16px 2px 0;text-align:left;border-bottom:1px solid #ddd}"
    "td+td{font-variant-numeric:tabular-nums}.keys span{margin-right:14px}"
    ".keys i{display:inline-block;width:11px;height:11px;margin-right:5px}"
    "@media(prefers-color-scheme:dark){body{color:#eee;background:#161616}"
    "td,th{border-color:#444}svg text{fill:#eee}}"
)


def write_profile(profile: Mapping[str, Any], folder: Path) -> Path:
    """``profile.json`` and ``profile.html``, each complete or not there; the page's path.

    Raises:
        InputError: the folder can't be written.
    """
    text = json.dumps(profile, indent=1, allow_nan=False) + "\n"
    write_files(folder, {"profile.json": text, "profile.html": render_page(profile)})
    return folder / "profile.html"
