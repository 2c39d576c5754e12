"""The report in short, as Markdown that reads well in a terminal too.

The table of arms; below it the reasons behind verdicts, the noise floor, what did not pay, where
the guard objects, and the cost. The page has the rest.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hasten.formatting import span, words
from hasten.report.report_gains import GUILTY, head, result_of, unpaid
from hasten.report.report_rows import priced
from hasten.report.report_schema import read_report

_LONGEST = 400  # characters of a reason; report.json has it whole


def render_markdown(report: Mapping[str, Any]) -> str:
    """The arms as a Markdown table with notes below.

    A verdict with a reason stands in full below the table, and so does MFU. Raises InputError where
    `report` departs from docs/report-schema.md.
    """
    read = read_report(report)
    rows = [["arm", "tokens/s [95 %]", "ratio [95 %]", "peak memory", "held-out loss", "verdict"]]
    for arm in read["arms"]:
        spans = [span(arm["tokens_per_second"], "amount"), span(arm["ratio"], "times")]
        rest = [words(arm["peak_memory_bytes"], "memory"), words(arm["held_out_loss"], "loss")]
        rows.append([_cell(arm["name"]), *spans, *rest, _cell(head(arm["verdict"]))])
    notes = "".join(f"- {note}\n" for note in _notes(read))
    return f"{_table(rows)}\n{notes}" if notes else _table(rows)


def _table(rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows = [rows[0], ["-" * width for width in widths], *rows[1:]]
    padded = ([cell.ljust(n) for cell, n in zip(row, widths, strict=True)] for row in rows)
    return "".join(f"| {' | '.join(row)} |\n" for row in padded)


def _notes(read: Mapping[str, Any]) -> Iterator[str]:
    arms: Sequence[Mapping[str, Any]] = read["arms"]
    rows = unpaid(read)
    listed = {row["name"] for row in rows}
    for arm in arms:
        if arm["verdict"] != head(arm["verdict"]) and arm["name"] not in listed:
            yield f"{_cell(arm['name'])}: {_cell(arm['verdict'])}"
    for row in rows:
        open_still = "; inconclusive" in row["why"] or "beyond the noise" in row["why"]
        word = "not shown to pay" if open_still else "did not pay"
        yield f"{word}: {_cell(row['name'])}: {_cell(row['why'])}"
    if read["mfu"]:
        some = arms if len(arms) <= 4 else [arms[0], result_of(arms)]
        shares = ", ".join(f"{_cell(a['name'])} {words(a['mfu'], 'percent')}" for a in some)
        yield f"{shares} {_cell(read['mfu'])}"
    yield from _noise(read)
    for row in read["invariance"]:
        if head(row["verdict"]) in GUILTY:
            yield f"not invariant: {_cell(row['what'])}: {_cell(row['text'] or row['verdict'])}"
    yield from _money(read)


def _noise(read: Mapping[str, Any]) -> Iterator[str]:
    noise, together = read["noise"], read["interaction"]
    if noise["text"] or noise["ratio"]:
        copies = span(noise["ratio"], "times") if noise["ratio"] else "not measured"
        floor = (
            "" if noise["floor"] is None else f", noise floor {words(noise['floor'], 'percent')}"
        )
        yield _cell(noise["text"] or f"two copies of the baseline: {copies}{floor}")
    if together["text"] or together["ratio"]:
        yield _cell(
            together["text"] or f"all over the single ones: {span(together['ratio'], 'times')}"
        )


def _money(read: Mapping[str, Any]) -> Iterator[str]:
    cost = read["cost"]
    prices = cost["per_million_tokens"]
    if prices is not None:
        ends = [read["arms"][0], result_of(read["arms"])]
        said = " → ".join(words(priced(prices, arm), "price") for arm in ends[: len(read["arms"])])
        yield f"{_cell(cost['currency'] or 'cost')} per million tokens: {said}"
    experiment = cost["experiment"]
    if experiment["money"] is not None:
        spent = words(experiment["money"], "price")
        yield f"the experiment cost {spent} {_cell(cost['currency'] or '')}"
    if cost["payback"]["text"]:
        yield _cell(cost["payback"]["text"])


def _cell(text: str) -> str:
    """Text for a Markdown cell: on one line, and nothing in it means anything to Markdown."""
    line = " ".join(text.split())
    if len(line) > _LONGEST:
        line = f"{line[:_LONGEST]}…"
    escaped = re.sub(r"([\\|`*<>\[\]])", r"\\\1", line) or "–"
    # An interval is no link, and reads better without its backslashes.
    return re.sub(r"\\\[([\d.,]+, [\d.,]+)\\\](?!\()", r"[\1]", escaped)
