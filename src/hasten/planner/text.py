"""A plan in words and tables, as ``hasten estimate`` prints it, and as one page with drawings."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from hasten.formatting import fitted
from hasten.models.architecture import Architecture
from hasten.planner.advice import PARTS, HardwareOption, LayoutChange, RejectedLayout, Shape
from hasten.planner.candidate import JobCost, PlanCandidate, Span, layout_text, spending
from hasten.planner.layout import PlannedJob, PlannedLayout
from hasten.planner.numbers import calibrated
from hasten.planner.planning import ClusterPlan
from hasten.planner.simulate import draw_schedule, micro_batch, stages
from hasten.recipe.price import Price
from hasten.report.markup import html_page, html_table
from hasten.report.svg import Bar, bar_chart

WIDTH = 100  # characters of a line where nobody says how many
BAR = 28  # characters of a waterfall's longest bar


def heading(cluster_plan: ClusterPlan, seconds: float, assumed: Sequence[str]) -> str:
    """Heading of the report: the request, the search, and the assumptions."""
    cluster = cluster_plan.cluster
    lines = [
        request_line(cluster_plan),
        f"{cluster.nodes} x {cluster.per_node} {cluster.device.name}, {cluster.topology}: "
        f"{cluster_plan.layouts:,} layouts in {seconds:.1f} s",
        f"brackets: P10-P90, {basis(cluster_plan)}",
    ]
    if assumed:
        lines.append(f"not specified, so assumed: {' '.join(assumed)}")
    return "\n".join(lines)


def request_line(cluster_plan: ClusterPlan) -> str:
    """Model and job in a line."""
    model, job = cluster_plan.model, cluster_plan.job
    size = f"{model.parameters() / 1e9:.3g} B parameters"
    if model.moe:
        size += f", {model.active_parameters() / 1e9:.3g} B active"
    return (
        f"{model.name} ({size}), {job.task}, {job.global_batch:,} sequences of {job.sequence:,} "
        "tokens a step"
    )


def layouts_table(
    best: Sequence[PlanCandidate], job: PlannedJob, price: Price | None, width: int = WIDTH
) -> str:
    """A row per layout, the quickest first."""
    head = ["layout", "step s", "tokens/s/GPU", "MFU", "exposed", "memory GB", "time", "GPU hours"]
    rows = _rows(best, head, job, price)
    if not job.tokens:
        rows[0][6:8] = ["time/B tokens", "GPU hours/B tokens"]
    return "\n" + fitted([[str(number or ""), *row] for number, row in enumerate(rows)], width)


def _rows(
    candidates: Sequence[PlanCandidate], head: Sequence[str], job: PlannedJob, price: Price | None
) -> list[list[str]]:
    """These columns of each candidate, the head first; the money last where there is a price."""
    rows = [[*head, *([price.currency] if price else [])]]
    for one in candidates:
        cost = spending(one, job, price)
        cells = {
            "nodes": str(one.cluster.nodes),
            "layout": layout_text(one.layout),
            "step s": spanned(one.step_seconds),
            "tokens/s/GPU": spanned(one.tokens_per_second_per_device),
            "MFU": shares(one.mfu_span),
            "exposed": f"{one.exposed / one.step_seconds.middle:.0%}",
            "memory GB": spanned(one.memory_bytes.times(1e-9)),
            "memory P90 GB": f"{one.memory_bytes.high / 1e9:.1f}",
            "time": lasting(cost.seconds),
            "GPU hours": spanned(cost.device_hours),
        }
        rows.append([*map(cells.__getitem__, head), *([spanned(cost.money)] if cost.money else [])])
    return rows


def waterfalls(one: PlanCandidate) -> str:
    """Where the first layout's step and memory go."""
    how = "pipeline simulated" if one.simulated else "closed forms"
    lines = [f"\nstep of 1 ({how}; {one.micro_batches} micro-batches a rank)"]
    lines += _bars({PARTS[k]: v for k, v in one.step_parts.items()}, 1.0, "s")
    if len(set(one.stage_layers)) > 1:
        runs = [(n, len(list(same))) for n, same in itertools.groupby(one.stage_layers)]
        dealt = ", ".join(f"{count} x {n}" for n, count in runs)
        lines.append(f"  layers per stage, so that none is slow: {dealt}")
    has = one.cluster.device.memory_bytes
    lines.append(
        f"memory of its fullest rank: {(has - one.memory_bytes.high) / 1e9:.1f} of "
        f"{has / 1e9:.0f} GB stay free at P90"
    )
    lines += _bars(one.memory_parts, 1e9, "GB")
    return "\n".join(lines)


def spent(cost: JobCost, one: PlanCandidate) -> str:
    """Device hours, money, energy: of the first layout."""
    what = f"{cost.tokens:.4g} tokens"
    lines = [
        f"\n1 takes {lasting(cost.seconds)}, {spanned(cost.device_hours)} GPU hours for {what}"
    ]
    if cost.money is None:
        lines[0] += "; money: no price given (--price FILE)"
    else:
        lines[0] += f", {spanned(cost.money)} {cost.currency}"
    if cost.kwh_at_most is None:
        lines.append(f"energy: the power limit of {one.cluster.device.name} isn't known here")
    else:
        lines.append(
            f"energy: {cost.kwh_at_most:.3g} kWh at most, GPUs at their power limit throughout; "
            "hosts, network and cooling come on top"
        )
    lines.append("not in it: evaluations, checkpoints, failures and restarts")
    return "\n".join(lines)


def front(
    candidates: Sequence[PlanCandidate], job: PlannedJob, price: Price | None, width: int = WIDTH
) -> str:
    """Table of candidates that no other beats in time, memory and device hours at once."""
    head = ("nodes", "layout", "step s", "memory P90 GB", "time", "GPU hours")
    rows = _rows(candidates, head, job, price)
    return "\nnothing beats these in time, memory and GPU hours together\n" + fitted(rows, width)


def rejections(nearest: Sequence[RejectedLayout], counted: Sequence[str]) -> str:
    """Why not the next ones."""
    lines = ["\nwhy not"]
    lines += [f"  {layout_text(r.layout)}: {r.reason}" for r in nearest]
    return "\n".join([*lines, *(f"  left out: {rule}" for rule in counted)])


def changes_table(changes: Sequence[LayoutChange], width: int = WIDTH) -> str:
    """Table of changes: their effect on a rate of 1, and the best layout after each.

    The values are ratios of two predictions, in which common errors cancel: they have no
    interval.
    """
    rows = [["what would change it (ratios of predictions)", "rate of 1", "of the best then", ""]]
    for change in changes:
        note = change.note if change.layout is None else layout_text(change.layout)
        rows.append([change.what, percent(change.same_layout), percent(change.best_layout), note])
    return "\n" + fitted(rows, width) + "\n"


def why_text(layout: PlannedLayout, reasons: Sequence[str], one: PlanCandidate | None) -> str:
    """The answer to ``--why``, with what is predicted of the layout where it can be."""
    if not reasons:
        return f"{layout_text(layout)}: that is the plan's first"
    lines = [f"why not {layout_text(layout)}:", *(f"  {sentence}" for sentence in reasons)]
    if one is not None:
        lines.append(
            f"  predicted: step {spanned(one.step_seconds)} s, "
            f"{spanned(one.tokens_per_second_per_device)} tokens/s/GPU, MFU "
            f"{shares(one.mfu_span)}, memory {spanned(one.memory_bytes.times(1e-9))} GB"
        )
    return "\n".join(lines)


def what_if_text(change: str, now: ClusterPlan, then: ClusterPlan) -> str:
    """The answer to ``--what-if``."""
    one, other = now.best[0], then.best[0]
    rate = one.step_seconds.middle / other.step_seconds.middle
    hours = [spending(candidate, now.job).device_hours.middle for candidate in (one, other)]
    return (
        f"with {change}: {layout_text(other.layout)}, step {spanned(other.step_seconds)} s, "
        f"{percent(rate)} in rate, {hours[1] / hours[0]:.2f} x the GPU hours "
        f"({spanned(spending(other, now.job).device_hours)})"
    )


def devices_table(choices: Sequence[HardwareOption], job: PlannedJob) -> str:
    """The same job on as many devices of each kind."""
    rows = [["device", "layout", "step s", "GPU hours", "worth, of the plan's price per hour"]]
    for choice in choices:
        one = choice.best
        if one is None:
            rows.append([choice.device, "none", "-", "-", choice.reason.partition("; ")[0]])
            continue
        hours = spanned(spending(one, job).device_hours)
        worth = f"{choice.price_ratio:.2f} x"
        rows.append(
            [choice.device, layout_text(one.layout), spanned(one.step_seconds), hours, worth]
        )
    return fitted(rows, WIDTH)


def shapes_text(shapes: Sequence[Shape], model: Architecture) -> str:
    """Neighbours of the config that train faster."""
    if not shapes:
        return f"no neighbour of {model.name} within 2 % of its parameters trains 1 % faster"
    lines = [
        "shapes of the same size that train faster (whether they learn as well isn't predicted)"
    ]
    for shape in shapes:
        lines.append(
            f"  {shape.changed}: {shape.gain:+.1%} in rate at {shape.parameters_ratio:.1%} of the "
            f"parameters; {shape.reason}"
        )
    return "\n".join(lines)


def basis(cluster_plan: ClusterPlan) -> str:
    """The source of the intervals."""
    source = provenance(cluster_plan)
    if source.get("own_runs"):
        return f"fitted to {source['own_runs']} runs of your own"
    if not source.get("records"):
        return "believed, not fitted to any measurement"
    return (
        f"errors on held-out groups of {source['records']} published measurements "
        f"({source.get('groups')} groups, {source.get('date')})"
    )


def provenance(cluster_plan: ClusterPlan) -> dict[str, Any]:
    """Where the constants and intervals are from."""
    return dict((cluster_plan.calibration or calibrated()).provenance)


def spanned(span: Span | None) -> str:
    """``12.0 [10.1, 14.2]``."""
    if span is None:
        return "-"
    return f"{figure(span.middle)} [{figure(span.low)}, {figure(span.high)}]"


def shares(span: Span) -> str:
    """``41 [36, 45] %``."""
    return f"{spanned(span.times(100))} %"


def lasting(span: Span) -> str:
    """Seconds in the unit that suits them: ``3.4 [2.9, 4.5] days``."""
    for unit, seconds in (("days", 86_400), ("h", 3_600), ("min", 60)):
        if span.middle >= 2 * seconds:
            return f"{spanned(span.times(1 / seconds))} {unit}"
    return f"{spanned(span)} s"


def figure(value: float) -> str:
    """Three digits that count, thousands apart."""
    if value >= 1e7:
        return f"{value:.3g}"
    if value >= 100:
        return f"{float(f'{value:.3g}'):,.0f}"
    return f"{value:.3g}"


def percent(ratio: float) -> str:
    """A ratio of rates as a change: ``+7 %``."""
    if math.isnan(ratio):
        return "doesn't fit"
    change = round(100 * (ratio - 1))
    return f"{change:+d} %" if change else "0 %"


def _bars(parts: Mapping[str, float], unit: float, name: str) -> list[str]:
    most = max(parts.values()) or 1.0
    total = sum(parts.values()) or 1.0
    wide = max(map(len, parts))
    lines = []
    for label, value in parts.items():
        if abs(value) < 0.0005 * total:
            continue
        bar = "#" * max(0, round(BAR * value / most))
        lines.append(
            f"  {label.ljust(wide)}  {value / unit:8.3g} {name} {value / total:4.0%}  {bar}"
        )
    return lines


# A plan as one page that stands alone: tables, waterfalls, and the schedule's timetable.

CHART = 880  # pixels, the width of a drawing


def page(
    cluster_plan: ClusterPlan,
    price: Price | None,
    nearest: Sequence[RejectedLayout],
    changes: Sequence[LayoutChange],
) -> str:
    """The page; no scripts, nothing is loaded from elsewhere."""
    best = cluster_plan.best[0]
    cluster = cluster_plan.cluster
    step_parts = {PARTS[name]: seconds for name, seconds in best.step_parts.items()}
    sections = {
        "Layouts (figures with P10-P90)": _layouts(cluster_plan, cluster_plan.best, price),
        f"Step of {layout_text(best.layout)}": _chart("Seconds of a step", step_parts, 1.0, "s"),
        "Memory of its fullest rank": _chart("Memory", best.memory_parts, 1e9, "GB"),
        "Its pipeline": _schedule(cluster_plan, best),
        "Nothing beats these in time, memory and GPU hours together": _layouts(
            cluster_plan, cluster_plan.pareto, price
        ),
        "Why not": html_table(
            ["layout", "reason"], ([layout_text(r.layout), r.reason] for r in nearest)
        ),
        "What would change it": html_table(
            ["change", "rate of the first", "of the best then"],
            ([c.what, percent(c.same_layout), percent(c.best_layout)] for c in changes),
        ),
    }
    body = "".join(
        f"<section><h2>{escape(title)}</h2>{content}</section>"
        for title, content in sections.items()
        if content
    )
    return html_page(
        f"{cluster_plan.model.name} on {cluster.nodes} x {cluster.per_node} {cluster.device.name}",
        f"<p>{escape(request_line(cluster_plan))}<br>"
        f"Intervals: P10-P90, {escape(basis(cluster_plan))}</p>{body}",
    )


def _layouts(
    cluster_plan: ClusterPlan, chosen: Sequence[PlanCandidate], price: Price | None
) -> str:
    head = ("nodes", "layout", "step s", "tokens/s/GPU", "MFU", "memory GB", "time", "GPU hours")
    titles, *rows = _rows(chosen, head, cluster_plan.job, price)
    return html_table(titles, rows)


def _schedule(cluster_plan: ClusterPlan, one: PlanCandidate) -> str:
    """The pipeline's timetable; empty without a pipeline."""
    layout = one.layout
    if layout.pp == 1 or not one.simulated:
        return ""
    _, seconds = stages(
        cluster_plan.model,
        layout,
        micro_batch(cluster_plan.model, one, cluster_plan.job.task == "lora"),
    )
    return draw_schedule(layout.schedule, layout.pp, one.micro_batches, layout.virtual, seconds)


def _chart(title: str, parts: Mapping[str, float], unit: float, name: str) -> str:
    bars = [Bar(label, f"{v / unit:.3g} {name}", v / unit) for label, v in parts.items()]
    return bar_chart(title, bars, CHART, 0, lambda value: f"{value:g} {name}")
