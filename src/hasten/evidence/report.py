"""The report: one measured job as report.json, as a page that stands alone, and as a small table.

The input is plain data, described key by key in docs/report-schema.md.

1. report_schema.py makes it JSON and checks it, report_rows.py derives what several arms say
   together, report_words.py says its numbers.
2. The arms become drawings (charts.py), and all of it becomes a page (report.html.jinja).
3. Both files are rendered before either is written, and each appears by a rename, so that no
   reader ever sees half a report.

Its texts come from models and other people's files, so none is trusted: the template escapes them
all, `visible` shows what hides, and the page forbids itself scripts and network.
"""

import json
import os
import re
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from hasten.errors import InputError
from hasten.evidence.charts import (
    NOT_MEASURED,
    Bar,
    Curve,
    Strip,
    bar_chart,
    line_chart,
    strip_chart,
    thin,
)
from hasten.evidence.report_rows import fastest, head, machine, proofs, rungs
from hasten.evidence.report_schema import as_json, read_report
from hasten.evidence.report_words import UNITS, outline, span, words

_EMBEDDED = 200_000  # bytes of JSON in the page, which as a whole shall stay below 500 kB
_WIDTHS = (800, 340)  # pixels of a drawing for wide and for narrow screens
_CURVES = (390, 250)  # pixels, width and height


def write_report(report: Mapping[str, Any], folder: Path) -> Path:
    """Write report.json and report.html into `folder` (made if missing); the path of the page.

    Raises InputError where `report` departs from docs/report-schema.md, with no file changed, or
    where the folder can't be written.
    """
    plain, read = as_json(report, "report"), read_report(report)
    page = _page(plain, read)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _replace(folder / "report.json", json.dumps(plain) + "\n")
        return _replace(folder / "report.html", page)
    except OSError as error:
        raise InputError(
            f"The report can't be written to {folder} ({error.strerror}): name another folder."
        ) from error


def render_markdown(report: Mapping[str, Any]) -> str:
    """The arms as a Markdown table, aligned so that it reads well in a terminal too.

    A verdict with a reason stands in full below the table, and so does MFU. Raises InputError where
    `report` departs from docs/report-schema.md.
    """
    rows = [["arm", "tokens/s [95 %]", "ratio [95 %]", "peak memory", "held-out loss", "verdict"]]
    read = read_report(report)
    arms = read["arms"]
    for arm in arms:
        spans = [span(arm["tokens_per_second"], "amount"), span(arm["ratio"], "times")]
        rest = [words(arm["peak_memory_bytes"], "memory"), words(arm["held_out_loss"], "loss")]
        rows.append([_cell(arm["name"]), *spans, *rest, _cell(head(arm["verdict"]))])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths])
    padded = ([cell.ljust(n) for cell, n in zip(row, widths, strict=True)] for row in rows)
    table = "".join(f"| {' | '.join(row)} |\n" for row in padded)
    reasons = [arm for arm in arms if arm["verdict"] != head(arm["verdict"])]
    notes = "".join(f"- {_cell(arm['name'])}: {_cell(arm['verdict'])}\n" for arm in reasons)
    if read["mfu"]:
        shares = ", ".join(f"{_cell(a['name'])} {words(a['mfu'], 'percent')}" for a in arms)
        notes += f"- {shares} {_cell(read['mfu'])}\n"
    return f"{table}\n{notes}" if notes else table


def _page(plain: Mapping[str, Any], read: dict[str, Any]) -> str:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"words": words, "span": span, "outline": outline}
    data, complete = _embedded(plain)
    arms = read["arms"]
    return environment.get_template("report.html.jinja").render(
        report=read,
        machine=machine(read["hardware"]),
        drawings=_drawings(arms),
        rungs=rungs(arms),
        fastest=fastest(arms),
        proofs=proofs(arms),
        data=data,
        complete=complete,
    )


def _drawings(arms: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Every drawing by its name; those with a row per arm once wide and once narrow."""
    speeds, memories, strips = [], [], []
    most = max(arm["peak_memory_bytes"] or 0 for arm in arms)
    unit, sign = (1e9, "GB") if most >= 1e9 else (1e6, "MB")
    for arm in arms:
        hue = {"held": "gain", "fell short": "gain", "harmed": "harm"}.get(
            head(arm["verdict"]), "other"
        )
        name, tone, used = arm["name"], _tone(arm, arms), arm["peak_memory_bytes"]
        median, low, high = (arm["ratio"][end] for end in ("median", "low", "high"))
        speeds.append(Bar(name, span(arm["ratio"], "times"), median, low, high, hue))
        memories.append(Bar(name, _used(arm, arms[0]), used and used / unit, tone=tone))
        strips.append(Strip(name, _reach(arm["rounds"]), arm["rounds"], tone))
    tokens, ordered = UNITS["tokens"], [arms[0], *arms[:0:-1]]

    def curves(key: str) -> list[Curve]:  # on top the baseline, then the final arm
        return [Curve(arm["name"], arm[key], _tone(arm, arms)) for arm in ordered]

    return {
        "ratio": [
            bar_chart("Speed against the baseline", speeds, w, 1, lambda v: f"{v:.3g}×")
            for w in _WIDTHS
        ],
        "memory": [
            bar_chart("Peak memory", memories, w, 0, lambda v: f"{v:g} {sign}") for w in _WIDTHS
        ],
        "rounds": [strip_chart("Speed in each round", strips, w) for w in _WIDTHS],
        "held_out": [line_chart("Held-out loss", curves("held_out_curve"), _CURVES, tokens)],
        "training": [line_chart("Training loss", curves("loss_curve"), _CURVES, tokens)],
    }


def _tone(arm: Mapping[str, Any], arms: list[dict[str, Any]]) -> str:
    return "base" if arm is arms[0] else "final" if arm is arms[-1] else "other"


def _used(arm: Mapping[str, Any], base: Mapping[str, Any]) -> str:
    """An arm's peak memory with its change from the baseline."""
    used, before = arm["peak_memory_bytes"], base["peak_memory_bytes"]
    known = arm is not base and used is not None and before
    return words(used, "memory") + (f" ({words(used / before - 1, 'change')})" if known else "")


def _reach(rounds: list[float | None]) -> str:
    """How far an arm's rounds lie from their median."""
    if not (known := [value for value in rounds if value]):
        return NOT_MEASURED
    middle = statistics.median(known)
    return " to ".join(words(end / middle - 1, "change") for end in (min(known), max(known)))


def _embedded(plain: Mapping[str, Any]) -> tuple[str, bool]:
    """The report as JSON that can't end its script element, and whether nothing was left out.

    Where the whole would make the page too heavy, curves become means; report.json keeps all.
    """
    for most in (None, 200, 50):
        arms = plain["arms"] if most is None else [_thinned(arm, most) for arm in plain["arms"]]
        text = json.dumps({**plain, "arms": arms})
        if len(text) <= _EMBEDDED:
            break
    else:
        text = json.dumps({"schema": 1, "left_out": "too large for this page: see report.json"})
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text, most is None


def _thinned(arm: Mapping[str, Any], most: int) -> dict[str, Any]:
    curves = {key: thin(arm[key], most) for key in ("loss_curve", "held_out_curve") if arm.get(key)}
    return {**arm, **curves}


def _cell(text: str) -> str:
    """Text for a Markdown cell: on one line, and nothing in it means anything to Markdown."""
    return re.sub(r"([\\|`*<>\[\]])", r"\\\1", " ".join(text.split())) or "–"


def _replace(path: Path, text: str) -> Path:
    """Write the file beside its place, then rename it there in one act."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8")
        return draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
