"""The page of ``hasten data stats -o``: one file that loads nothing, drawings inline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment

from hasten.data.statistics import BatchLayout, DataStatistics
from hasten.report.markup import write_files
from hasten.report.svg import Bar, bar_chart, visible

WIDTHS = (800, 360)  # pixels: a wide drawing and one for telephones

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{{ title }}</title>

<style>
:root { color-scheme: light dark; --page: #fff; --ink: #16191d; --muted: #565e68; --rule: #dcdfe3;
  --accent: #1f5fbf; }
@media (prefers-color-scheme: dark) { :root { --page: #14171a; --ink: #e6e9ec; --muted: #a2abb5;
  --rule: #343a41; --accent: #7fb0ff; } }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, sans-serif;
  font-variant-numeric: tabular-nums; overflow-wrap: break-word; }
main { max-width: 800px; margin: 0 auto; padding: 40px 24px 72px; }
h1, h2 { font-size: 1.25rem; font-weight: 600; } h2 { margin-top: 40px; }

dl { display: grid; grid-template-columns: max-content 1fr; gap: 4px 20px; }
dt { color: var(--muted); } dd { margin: 0; }

svg { display: block; width: 100%; height: auto; } .narrow { display: none; }
svg text { font-size: 13px; fill: var(--ink); } svg .tick { fill: var(--muted); }
svg .middle { text-anchor: middle; } svg .end { text-anchor: end; }
svg .grid, svg .origin { stroke: var(--rule); } svg .bar { fill: var(--accent); }

@media (max-width: 600px) { .wide { display: none; } .narrow { display: block; } }

</style>
</head>
<body><main>
<h1>{{ title }}</h1>
<dl>{% for key, value in facts %}<dt>{{ key }}</dt><dd>{{ value }}</dd>{% endfor %}</dl>
{% for heading, wide, narrow in drawings %}<h2>{{ heading }}</h2>
<div class="wide">{{ wide | safe }}</div><div class="narrow">{{ narrow | safe }}</div>
{% endfor %}<p>Fullest: {{ advice }}</p>
</main></body>
</html>
"""


def write_page(
    path: Path, title: str, statistics: DataStatistics, ways: Sequence[BatchLayout], advice: str
) -> None:
    """Writes the page atomically; an existing page is replaced."""
    write_files(path.parent, {path.name: page(title, statistics, ways, advice)})


def page(title: str, statistics: DataStatistics, ways: Sequence[BatchLayout], advice: str) -> str:
    """The page's HTML; every text is escaped, the drawings escape their own."""
    fullness = [Bar(way.method, f"{way.fullness:.1%}", way.fullness) for way in ways]
    drawn = (
        ("Examples by length in tokens", _histogram(statistics), lambda value: f"{value:,.0f}"),
        ("How full the positions are", fullness, lambda value: f"{value:.0%}"),
    )
    drawings = [
        (heading, *(bar_chart(heading, bars, width, 0.0, formatter) for width in WIDTHS))
        for heading, bars, formatter in drawn
    ]
    template = Environment(autoescape=True).from_string(PAGE)
    return template.render(
        title=visible(title), facts=_facts(statistics), drawings=drawings, advice=advice
    )


def _facts(statistics: DataStatistics) -> list[tuple[str, str]]:
    share = statistics.trained_tokens / statistics.tokens
    quantiles = ", ".join(f"{q} %: {n:,}" for q, n in statistics.quantiles.items())
    return [
        ("examples", f"{statistics.examples:,}, {statistics.duplicates:,} of them duplicates"),
        ("tokens", f"{statistics.tokens:,}, {share:.1%} of them trained"),
        ("tokens per example", f"{statistics.shortest:,} to {statistics.longest:,}; {quantiles}"),
    ]


def _histogram(statistics: DataStatistics) -> list[Bar]:
    bars = []
    for one in statistics.bins:
        name = f"{one.low:,}-{one.high - 1:,}" if one.high - one.low > 1 else f"{one.low:,}"
        text = f"{one.examples:,} ({one.tokens / statistics.tokens:.1%} of tokens)"
        bars.append(Bar(name, text, float(one.examples)))
    return bars
