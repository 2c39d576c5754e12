"""The plan as text and as a page, for ``hasten estimate``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from textwrap import indent
from typing import Any

from hasten.formatting import aligned, fitted
from hasten.planner.layout import PlannedJob, layout_text
from hasten.planner.numbers import calibrated
from hasten.planner.planning import ClusterPlan, recipe_lines
from hasten.planner.predict import PlanCandidate, Span
from hasten.recipe.price import Price
from hasten.report.markup import html_page, html_table

WIDTH = 100  # default characters of a line
PER_BILLION = 1e9  # tokens of a job without a number of tokens
PARTS = {
    "compute": "products",
    "attention": "attention",
    "head": "head and loss",
    "recompute": "recomputation",
    "tp": "tensor-parallel communication",
    "dp": "exposed gradient exchange",
    "pp": "pipeline bubble and uneven stages",
    "ep": "expert exchange",
    "optimizer": "optimizer",
    "other": "fixed costs",
}


@dataclass(frozen=True)
class JobCost:
    """Cost of a whole job, or of a billion tokens if the job has no number of tokens."""

    tokens: float
    seconds: Span
    device_hours: Span
    money: Span | None
    currency: str

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for JSON."""
        return {
            "tokens": self.tokens,
            "days": vars(self.seconds.times(1 / 86_400)),
            "device_hours": vars(self.device_hours),
            "money": vars(self.money) if self.money else None,
            "currency": self.currency or None,
        }


def spending(plan_candidate: PlanCandidate, job: PlannedJob, price: Price | None = None) -> JobCost:
    """Returns the cost of the job in a layout, without failures and evaluations."""
    tokens = job.tokens or PER_BILLION
    rate = plan_candidate.tokens_per_second_per_device
    seconds = Span(
        *(tokens / (v * plan_candidate.devices) for v in (rate.middle, rate.high, rate.low))
    )
    hours = seconds.times(plan_candidate.devices / 3600)
    paid = None
    if price is not None:
        each = (seconds.middle, seconds.low, seconds.high)
        paid = Span(*(price.money(s, plan_candidate.devices) for s in each))
    return JobCost(tokens, seconds, hours, paid, price.currency if price else "")


def heading(cluster_plan: ClusterPlan, seconds: float, assumed: Sequence[str]) -> str:
    """Returns the report's heading: the request, the search, and the assumptions."""
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
    """Returns model and job in a line."""
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
    """Returns a table with a row per layout, the fastest first."""
    rows = _rows(best, job, price)
    return "\n" + fitted([[str(number or ""), *row] for number, row in enumerate(rows)], width)


def _rows(
    candidates: Sequence[PlanCandidate], job: PlannedJob, price: Price | None
) -> list[list[str]]:
    """Returns the head and a row of each candidate, with the cost if there is a price."""
    head = ["layout", "step s", "tokens/s/GPU", "MFU", "exposed", "memory GB", "time", "GPU hours"]
    if not job.tokens:
        head[6:8] = ["time/B tokens", "GPU hours/B tokens"]
    rows = [[*head, *([price.currency] if price else [])]]
    for one in candidates:
        cost = spending(one, job, price)
        row = [
            *(layout_text(one.layout), spanned(one.step_seconds)),
            *(spanned(one.tokens_per_second_per_device), f"{spanned(one.mfu_span.times(100))} %"),
            f"{one.exposed / one.step_seconds.middle:.0%}",
            *(spanned(one.memory_bytes.times(1e-9)), lasting(cost.seconds)),
            spanned(cost.device_hours),
        ]
        rows.append([*row, *([spanned(cost.money)] if cost.money else [])])
    return rows


def recipes(best: Sequence[PlanCandidate]) -> str:
    """Returns the lines of a recipe for each layout, after a comment with the layout."""
    lines = ["\nlines for the recipe; entries of its plan replace yours of the same kind"]
    for number, one in enumerate(best, start=1):
        lines += [f"  # {number}: {layout_text(one.layout)}", indent(recipe_lines(one), "  ")]
    return "\n".join(lines)


def parts_text(one: PlanCandidate) -> str:
    """Returns the parts of a layout's step time and memory."""
    how = "pipeline simulated" if one.simulated else "closed forms"
    lines = [f"\nstep of 1 ({how}; {one.micro_batches} micro-batches a rank)"]
    lines.append(indent(aligned(_step_shares(one)), "  "))
    if len(set(one.stage_layers)) > 1:
        runs = [(n, len(list(same))) for n, same in itertools.groupby(one.stage_layers)]
        dealt = ", ".join(f"{count} x {n}" for n, count in runs)
        lines.append(f"  layers per stage, for equal times: {dealt}")
    has = one.cluster.device.memory_bytes
    lines.append(
        f"memory of its fullest rank: {(has - one.memory_bytes.high) / 1e9:.1f} of "
        f"{has / 1e9:.0f} GB stay free at P90"
    )
    lines.append(indent(aligned(_shares(one.memory_parts, 1e9, "GB")), "  "))
    phases = ", ".join(f"{phase} {figure(v / 1e9)}" for phase, v in one.host_bytes.items())
    room = one.cluster.host_memory
    of_room = f" of {figure(room / 1e9)}" if math.isfinite(room) else "; --host-memory checks it"
    lines.append(f"memory of a node of {one.cluster.per_node} ranks, GB: {phases}{of_room}")
    return "\n".join(lines)


def spent(cost: JobCost) -> str:
    """Returns a sentence on time, device hours and money of the first layout."""
    text = f"\n1 takes {lasting(cost.seconds)}, {spanned(cost.device_hours)} GPU hours"
    paid = "; money: no price given (--price FILE)"
    if cost.money is not None:
        paid = f", {spanned(cost.money)} {cost.currency}"
    return (
        f"{text} for {cost.tokens:.4g} tokens{paid}\n"
        "not included: evaluations, checkpoints, failures and restarts"
    )


def basis(cluster_plan: ClusterPlan) -> str:
    """Returns the source of the intervals."""
    source = provenance(cluster_plan)
    if source.get("own_runs"):
        return f"fitted to {source['own_runs']} runs of your own"
    if not source.get("records"):
        return "assumed, not fitted to any measurement"
    return (
        f"errors on held-out groups of {source['records']} published measurements "
        f"({source.get('groups')} groups, {source.get('date')})"
    )


def provenance(cluster_plan: ClusterPlan) -> dict[str, Any]:
    """Returns the provenance of constants and intervals."""
    return dict((cluster_plan.calibration or calibrated()).provenance)


def spanned(span: Span | None) -> str:
    """Returns a text such as ``12.0 [10.1, 14.2]``."""
    if span is None:
        return "-"
    return f"{figure(span.middle)} [{figure(span.low)}, {figure(span.high)}]"


def lasting(span: Span) -> str:
    """Returns seconds in a fitting unit, such as ``3.4 [2.9, 4.5] days``."""
    for unit, seconds in (("days", 86_400), ("h", 3_600), ("min", 60)):
        if span.middle >= 2 * seconds:
            return f"{spanned(span.times(1 / seconds))} {unit}"
    return f"{spanned(span)} s"


def figure(number: float) -> str:
    """Returns a number with three significant digits, and commas between thousands."""
    if 100 <= number < 1e7:
        return f"{float(f'{number:.3g}'):,.0f}"
    return f"{number:.3g}"


def page(cluster_plan: ClusterPlan, price: Price | None) -> str:
    """Returns the plan as an HTML page without scripts or external resources."""
    best, cluster = cluster_plan.best, cluster_plan.cluster
    first = best[0]
    sections = {
        "Layouts (figures with P10-P90)": _table(_rows(best, cluster_plan.job, price)),
        "Lines for the recipe": "".join(
            f"<h3>{escape(layout_text(one.layout))}</h3><pre>{escape(recipe_lines(one))}</pre>"
            for one in best
        ),
        f"Step of {layout_text(first.layout)}": _table(_step_shares(first)),
        "Memory of its fullest rank": _table(_shares(first.memory_parts, 1e9, "GB")),
    }
    body = "".join(
        f"<section><h2>{escape(title)}</h2>{content}</section>"
        for title, content in sections.items()
    )
    return html_page(
        f"{cluster_plan.model.name} on {cluster.nodes} x {cluster.per_node} {cluster.device.name}",
        f"<p>{escape(request_line(cluster_plan))}<br>"
        f"Intervals: P10-P90, {escape(basis(cluster_plan))}</p>{body}",
    )


def _table(rows: Sequence[Sequence[str]]) -> str:
    return html_table(rows[0], rows[1:])


def _step_shares(one: PlanCandidate) -> list[list[str]]:
    return _shares({PARTS[name]: seconds for name, seconds in one.step_parts.items()}, 1.0, "s")


def _shares(parts: Mapping[str, float], unit: float, name: str) -> list[list[str]]:
    """Returns the head and a row per part with at least 0.05 % of the total."""
    total = sum(parts.values()) or 1.0
    shown = {label: v for label, v in parts.items() if abs(v) >= 0.0005 * total}
    rows = [[label, f"{v / unit:.3g}", f"{v / total:.0%}"] for label, v in shown.items()]
    return [["part", name, "share"], *rows]
