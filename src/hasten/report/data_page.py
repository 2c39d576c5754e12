"""The page of ``hasten data stats -o``: one file without external content, with inline drawings."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from hasten.data.statistics import BatchLayout, Bin, DataStatistics
from hasten.machine.files import write_result
from hasten.report.markup import html_page, html_table
from hasten.report.svg import Bar, bar_chart, visible

WIDTHS = (800, 360)  # pixels: a wide drawing and one for phones


def write_page(
    path: Path, title: str, statistics: DataStatistics, ways: Sequence[BatchLayout], advice: str
) -> None:
    """Writes the page atomically; an existing page is replaced."""
    write_result(path, page(title, statistics, ways, advice))


def facts_of(statistics: DataStatistics) -> list[tuple[str, str]]:
    """Returns counts of examples and tokens, each with its name."""
    share = statistics.trained_tokens / statistics.tokens
    quantiles = ", ".join(f"{q} %: {n:,}" for q, n in statistics.quantiles.items())
    one = "example" if statistics.shared_share is None else "pair"
    facts = [
        (f"{one}s", f"{statistics.examples:,}, {statistics.duplicates:,} of them duplicates"),
        ("tokens", f"{statistics.tokens:,}, {share:.1%} of them trained"),
        (f"tokens/{one}", f"{statistics.shortest:,} to {statistics.longest:,}; {quantiles}"),
    ]
    if statistics.shared_share is not None:
        saved = f"{statistics.shared_share:.1%} of the tokens with packed (shared_prompt)"
        facts += [
            ("longest row", f"{statistics.longest_row:,} tokens: a prompt with one answer"),
            ("shared prompts", f"save {saved}"),
        ]
    return facts


def bin_name(one: Bin) -> str:
    """Returns the lengths in a bin, in words."""
    return f"{one.low:,}-{one.high - 1:,}" if one.high - one.low > 1 else f"{one.low:,}"


def page(title: str, statistics: DataStatistics, ways: Sequence[BatchLayout], advice: str) -> str:
    """Returns the page; every text is escaped, and drawings escape their own."""
    lengths = []
    for one in statistics.bins:
        text = f"{one.examples:,} ({one.tokens / statistics.tokens:.1%} of tokens)"
        lengths.append(Bar(bin_name(one), text, float(one.examples)))
    name = "Example" if statistics.shared_share is None else "Pair"
    fullness = [Bar(way.method, f"{way.fullness:.1%}", way.fullness) for way in ways]
    drawn = (
        (f"{name}s by length in tokens", lengths, lambda value: f"{value:,.0f}"),
        ("How full the positions are", fullness, lambda value: f"{value:.0%}"),
    )
    body = [html_table(("", ""), facts_of(statistics))]
    for heading, bars, formatter in drawn:
        wide, narrow = (bar_chart(heading, bars, width, 0.0, formatter) for width in WIDTHS)
        body.append(f"<section><h2>{heading}</h2>")
        body.append(f'<div class="wide">{wide}</div><div class="narrow">{narrow}</div></section>')
    return html_page(visible(title), f"{''.join(body)}<p>Fullest: {escape(advice)}</p>")
