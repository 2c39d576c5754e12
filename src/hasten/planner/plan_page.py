"""A plan as one page that stands alone: tables, waterfalls, and the schedule's timetable."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from hasten.errors import InputError
from hasten.planner import plan_text as text
from hasten.planner.advice import Change
from hasten.planner.candidate import Candidate, words
from hasten.planner.planning import ClusterPlan
from hasten.planner.reasons import PARTS, Rejected
from hasten.planner.resimulate import micro_batch, stages
from hasten.planner.spending import PerHour, spending
from hasten.planner.timetable import draw_schedule

STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:0;color:#1a1a1a;background:#fff}"
    "main{max-width:1080px;margin:auto;padding:24px;overflow-x:auto}h1{font-size:22px}"
    "h2{font-size:17px}svg{width:100%;height:auto}table{border-collapse:collapse}"
    "td,th{padding:2px 14px 2px 0;text-align:left;border-bottom:1px solid #ddd}"
    "td+td{font-variant-numeric:tabular-nums}.bar{background:#2a6fb0;height:12px}"
    "@media(prefers-color-scheme:dark){body{color:#eee;background:#161616}"
    "td,th{border-color:#444}}"
)


def page(
    found: ClusterPlan,
    price: PerHour | None,
    nearest: Sequence[Rejected],
    changes: Sequence[Change],
) -> str:
    """The page; no scripts, nothing is loaded from elsewhere."""
    best = found.best[0]
    here = f"{found.cluster.nodes} x {found.cluster.per_node} {found.cluster.device.name}"
    body = [
        f"<h1>{escape(found.model.name)} on {escape(here)}</h1>",
        f"<p>{escape(text.asked(found))}<br>Intervals: P10-P90, {escape(text.basis(found))}</p>",
        "<h2>Layouts (figures with P10-P90)</h2>",
        _layouts(found, found.best, price),
        f"<h2>Step of {escape(words(best.layout))}</h2>",
        _bars({PARTS[k]: v for k, v in best.step_parts.items()}, 1.0, "s"),
        "<h2>Memory of its fullest rank</h2>",
        _bars(best.memory_parts, 1e9, "GB"),
        *_schedule(found, best),
        "<h2>Nothing beats these in time, memory and GPU hours together</h2>",
        _layouts(found, found.pareto, price),
        "<h2>Why not</h2>",
        _table([["layout", "reason"], *([words(r.layout), r.reason] for r in nearest)]),
        "<h2>What would change it</h2>",
        _table(
            [["change", "rate of the first", "of the best then"]]
            + [[c.what, text.percent(c.same_layout), text.percent(c.best_layout)] for c in changes]
        ),
    ]
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>hasten plan</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style><main>{''.join(body)}</main></html>\n"
    )


def write(path: Path, content: str) -> None:
    """The file, complete or not there.

    Raises:
        InputError: the folder doesn't exist, or nothing can be written there.
    """
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    except OSError as error:
        raise InputError(f"{path} can't be written: {error.strerror or error}") from error
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(content)
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except OSError as error:
        Path(name).unlink(missing_ok=True)
        raise InputError(f"{path} can't be written: {error.strerror or error}") from error
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _layouts(found: ClusterPlan, chosen: Sequence[Candidate], price: PerHour | None) -> str:
    rows = [["nodes", "layout", "step s", "tokens/s/GPU", "MFU", "memory GB", "time"]]
    rows[0] += ["GPU hours", *([price.currency] if price else [])]
    for one in chosen:
        cost = spending(one, found.job, price)
        row = [str(one.cluster.nodes), words(one.layout), text.spanned(one.step_seconds)]
        row += [text.spanned(one.tokens_per_second_per_device), text.shares(one.mfu_span)]
        row += [text.spanned(one.memory_bytes.times(1e-9))]
        row += [text.lasting(cost.seconds), text.spanned(cost.device_hours)]
        rows.append([*row, *([text.spanned(cost.money)] if cost.money else [])])
    return _table(rows)


def _schedule(found: ClusterPlan, one: Candidate) -> list[str]:
    """The pipeline's timetable, where there is a pipeline."""
    layout = one.layout
    if layout.pp == 1 or not one.simulated:
        return []
    _, seconds = stages(
        found.model, layout, micro_batch(found.model, one, found.job.task == "lora")
    )
    drawn = draw_schedule(layout.schedule, layout.pp, one.micro_batches, layout.virtual, seconds)
    return ["<h2>Its pipeline</h2>", drawn]


def _bars(parts: Mapping[str, float], unit: float, name: str) -> str:
    most = max(parts.values()) or 1.0
    rows = "".join(
        f"<tr><td>{escape(label)}</td><td>{value / unit:.3g} {name}</td><td>"
        f'<div class="bar" style="width:{max(0.0, 320 * value / most):.0f}px"></div></td></tr>'
        for label, value in parts.items()
    )
    return f"<table>{rows}</table>"


def _table(rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(c)}</{tag}>" for c in cells) + "</tr>"

    return f"<table>{line(rows[0], 'th')}{''.join(line(row, 'td') for row in rows[1:])}</table>"
