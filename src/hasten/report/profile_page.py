"""A profile as files: ``profile.json``, and a page with one step's timeline and the tables."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from hasten.core.timing import PARTS
from hasten.report.profile_text import NOT_MEASURED, Rows, head, tables, time_text

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
    whole = sum(seconds for _, seconds in laps)
    if not whole:
        return f"<p>{NOT_MEASURED}</p>"
    marks, at = [], 0.0
    for part, seconds in laps:
        x, long = at / whole * width, seconds / whole * width
        at += seconds
        label = f"{part} {time_text(seconds)}"
        marks.append(
            f'<rect x="{x:.2f}" y="0" width="{max(long, 0.3):.2f}" height="44" '
            f'fill="{COLOURS[part]}"><title>{escape(label)}</title></rect>'
        )
        if long > 8 * len(part):
            marks.append(f'<text x="{x + 5:.1f}" y="27" fill="#fff">{escape(part)}</text>')
    return (
        f'<svg viewBox="0 0 {width} 64" role="img" aria-label="one step, {time_text(whole)}">'
        f"{''.join(marks)}<text x='0' y='60'>0</text>"
        f'<text x="{width}" y="60" text-anchor="end">{time_text(whole)}</text></svg>'
    )


def render_page(profile: Mapping[str, Any]) -> str:
    """One HTML file without scripts; nothing is loaded from elsewhere."""
    keys = "".join(
        f'<span><i style="background:{COLOURS[part]}"></i>{part}</span>' for part in PARTS
    )
    body = "".join(
        f"<h2>{escape(title)}</h2>{_html_table(columns, rows)}"
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
    """``profile.json`` and ``profile.html``, each complete or not there; the page's path."""
    _put(folder / "profile.json", json.dumps(profile, indent=1, allow_nan=False) + "\n")
    _put(folder / "profile.html", render_page(profile))
    return folder / "profile.html"


def _put(path: Path, text: str) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _html_table(columns: Sequence[str], rows: Rows) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(c)}</{tag}>" for c in cells) + "</tr>"

    return f"<table>{line(columns, 'th')}{''.join(line(row, 'td') for row in rows)}</table>"
