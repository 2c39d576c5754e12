"""Draw the demo's table as docs/images/gains.svg, with the drawings of the report.

    python scripts/gains_picture.py

The table is the one between the markers ``<!-- demo table -->`` of benchmarks/results/demo.md.
"""

from __future__ import annotations

import re
from pathlib import Path

from hasten.report.svg import Bar, bar_chart

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "benchmarks" / "results" / "demo.md"
PICTURE = ROOT / "docs" / "images" / "gains.svg"
WIDTH = 800  # CSS pixels
STYLE = """
svg { --page: #fff; --ink: #16191d; --muted: #565e68; --rule: #dcdfe3; --gain: #1f5fbf;
  --base: #4f5761; --other: #8b939c; background: var(--page); }
@media (prefers-color-scheme: dark) { svg { --page: #14171a; --ink: #e6e9ec; --muted: #a2abb5;
  --rule: #343a41; --gain: #7fb0ff; --base: #b4bcc5; --other: #68717b; } }
text { font: 13px system-ui, sans-serif; fill: var(--ink); stroke: var(--page); stroke-width: 4px;
  paint-order: stroke; }
.tick { font-size: 12px; fill: var(--muted); } .middle { text-anchor: middle; }
.end { text-anchor: end; } .grid { stroke: var(--rule); } .origin { stroke: var(--muted); }
.whisker { stroke: var(--ink); stroke-width: 1.5; } .bar.gain { fill: var(--gain); }
.bar.base { fill: var(--base); } .bar.other { fill: var(--other); }
"""


def bars_of(page: str) -> list[Bar]:
    """Bars of the demo's table: each begins at the ratio of the row above, baseline first."""
    table = page.split("<!-- demo table -->\n")[1].split("<!-- /demo table -->")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    bars = [Bar("baseline", "1.00×", 1.0, tone="base")]
    for name, _, effect, ratio, *_ in (row for row in rows if row and row[0].startswith("+")):
        median, low, high = map(float, re.findall(r"\d+\.\d+", ratio))
        tone = "gain" if effect == "helped" else "other"
        bars.append(Bar(name, ratio, median, low, high, tone, start=bars[-1].value))
    return bars


def drawing_of(page: str) -> str:
    """The SVG file for the table of a page."""
    title = "Tokens per second against the baseline, one technique more in each row"
    chart = bar_chart(title, bars_of(page), WIDTH, 1, lambda value: f"{value:.3g}×")
    return chart.replace("</desc>", f"</desc><style>{STYLE}</style>", 1) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(drawing_of(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
