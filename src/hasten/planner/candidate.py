"""One layout with all that is predicted of it, in parts and with P10-P90: time, memory, spending.

Columns are for choosing among many; a ``PlanCandidate`` is for people.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from hasten.planner.cluster import Cluster
from hasten.planner.layout import Layouts, PlannedJob, PlannedLayout
from hasten.planner.predict import PredictedStep, Prediction

if TYPE_CHECKING:
    from hasten.recipe.price import Price

TRAINER_SCHEDULES = {  # of the planner -> what the technique pipeline calls it
    "gpipe": "gpipe",
    "1f1b": "1f1b",
    "interleaved": "interleaved",
    "zb1p": "zero_bubble",
}
TRAINER_CHUNKS = 2  # stages of a rank that the technique pipeline interleaves
# Of the planner -> an entry of a plan; the trainer keeps half of the bytes layer by layer.
_RECOMPUTES: Mapping[str, list[str]] = {
    "none": [],
    "full": ["activation_checkpointing"],
    "selective": ["activation_checkpointing: {budget: 0.5}"],
}
# Formats whose weights, masters and moments are as many bytes as the planner counts, fp16's aside.
_PRECISIONS: Mapping[str, list[str]] = {
    "bf16": ["bf16_master_weights"],
    "fp16": ["autocast: {dtype: fp16}"],
    "fp8": ["float8"],
    "fp32": [],
}
_COMMUNICATIONS: Mapping[str, list[str]] = {
    "none": [],
    "int8": ["quantised: {bits: 8}"],
    "int4": ["quantised: {bits: 4}"],
    "topk1": ["topk: {ratio: 0.01}"],
}
STEP_PARTS = tuple(f.name for f in fields(PredictedStep))


@dataclass(frozen=True)
class Span:
    """A figure and the interval that holds 80 % of such cases."""

    middle: float
    low: float
    high: float

    def times(self, factor: float) -> Span:
        return Span(self.middle * factor, self.low * factor, self.high * factor)


@dataclass(frozen=True)
class PlanCandidate:
    """A layout on a cluster; ``simulated`` once its schedule was played through."""

    layout: PlannedLayout
    cluster: Cluster
    micro_batches: int
    step_parts: dict[str, float]  # seconds; they add up to step_seconds.middle
    step_seconds: Span
    tokens_per_second_per_device: Span
    mfu: float
    memory_parts: dict[str, float]  # bytes; they add up to memory_bytes.middle
    memory_bytes: Span
    fits: bool
    simulated: bool = False
    stage_layers: tuple[int, ...] = ()

    @property
    def devices(self) -> int:
        return self.cluster.devices

    @property
    def mfu_span(self) -> Span:
        """MFU with the interval of the step that it is taken of."""
        step = self.step_seconds
        return Span(self.mfu, *(self.mfu * step.middle / s for s in (step.high, step.low)))

    @property
    def exposed(self) -> float:
        """Seconds of a step in which a rank does nothing but wait for others' bytes."""
        return sum(self.step_parts[part] for part in ("tp", "dp", "ep"))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "layout": asdict(self.layout),
            "device": self.cluster.device.name,
            "nodes": self.cluster.nodes,
            "devices": self.devices,
            "micro_batches": self.micro_batches,
            "step_seconds": asdict(self.step_seconds),
            "step_parts": self.step_parts,
            "exposed_comm_seconds": self.exposed,
            "tokens_per_second_per_device": asdict(self.tokens_per_second_per_device),
            "mfu": self.mfu,
            "mfu_interval": [self.mfu_span.low, self.mfu_span.high],
            "memory_bytes": asdict(self.memory_bytes),
            "memory_parts": self.memory_parts,
            "fits": self.fits,
            "simulated": self.simulated,
            "stage_layers": list(self.stage_layers),
        }


def candidate(
    prediction: Prediction, layouts: Layouts, row: int, cluster: Cluster, job: PlannedJob
) -> PlanCandidate:
    """Row ``row`` of a prediction."""
    layout = layouts.at(row)

    def span(middle: Any, low: Any, high: Any) -> Span:
        return Span(float(middle[row]), float(low[row]), float(high[row]))

    rate = prediction.tokens_per_second_per_device
    return PlanCandidate(
        layout=layout,
        cluster=cluster,
        micro_batches=micro_batches_of(layout, job),
        step_parts={name: float(getattr(prediction.step, name)[row]) for name in STEP_PARTS},
        step_seconds=span(prediction.step_seconds, prediction.step_p10, prediction.step_p90),
        tokens_per_second_per_device=span(rate, prediction.tokens_p10, prediction.tokens_p90),
        mfu=float(prediction.mfu[row]),
        memory_parts={n: float(np.atleast_1d(v)[row]) for n, v in vars(prediction.memory).items()},
        memory_bytes=span(prediction.memory_bytes, prediction.memory_p10, prediction.memory_p90),
        fits=bool(prediction.fits[row]),
    )


def micro_batches_of(layout: PlannedLayout, job: PlannedJob) -> int:
    """Micro-batches that a rank has in a step."""
    return max(1, -(-job.global_batch // (layout.dp * layout.micro_batch)))


def layout_text(layout: PlannedLayout) -> str:
    """A layout for people: what differs from one device with nothing special."""
    parts = [f"{name}={getattr(layout, name)}" for name in ("dp", "tp", "pp", "ep", "cp")]
    parts = [s for s in parts if not s.endswith("=1")] or ["dp=1"]
    if layout.dp * layout.cp > 1:
        parts.append(f"zero={layout.zero}")
    parts.append(f"micro={layout.micro_batch}")
    if layout.pp > 1:
        deep = f"x{layout.virtual}" if layout.virtual > 1 else ""
        parts.append(f"{layout.schedule}{deep}")
    if layout.recompute != "none":
        parts.append(f"recompute={layout.recompute}")
    if layout.precision not in ("bf16", "fp16"):
        parts.append(layout.precision)
    if layout.compression != "none":
        parts.append(f"gradients={layout.compression}")
    return " ".join(parts)


def recipe_lines(layout: PlannedLayout) -> str:
    """The layout as recipe lines for the trainer; '' if ``beyond_trainer`` has a reason.

    ZeRO's stages 1 and 2 keep full weights. That is FSDP2 without freeing them between
    passes.
    """
    if beyond_trainer(layout):
        return ""
    sharded = layout.zero > 0 and layout.dp > 1
    lines: list[str] = []
    plan: list[str] = []
    shown: dict[str, Any]
    if layout.pp > 1:
        schedule = TRAINER_SCHEDULES[layout.schedule]
        sizes = {"stages": layout.pp, "micro_batch_size": layout.micro_batch, "schedule": schedule}
        checkpoint = {"none": "never", "full": "always"}[layout.recompute]
        shown = {"pipeline": {**sizes, "checkpoint": checkpoint}}
    elif layout.ep > 1:
        shown = {"dp": layout.dp, "ep": layout.ep}
    elif layout.tp > 1:
        shown = {"shard" if sharded else "dp": layout.dp, "tp": layout.tp}
        shown |= {"reshard": layout.zero == 3} if sharded else {}
    elif sharded:
        shown = {"fsdp2": {"reshard": layout.zero == 3}}
    else:
        shown = {"ddp": {}} if layout.dp > 1 else {}
    lines += [f"layout: {_inline(shown)}"] if shown else []
    if layout.pp == 1:
        plan.append(f"gradient_accumulation: {{micro_batch_size: {layout.micro_batch}}}")
        plan += _RECOMPUTES[layout.recompute]
    plan += _PRECISIONS[layout.precision]
    plan += _COMMUNICATIONS[layout.compression]
    lines += [f"plan: [{', '.join(plan)}]"] if plan else []
    return "\n".join(lines)


def beyond_trainer(layout: PlannedLayout) -> str:
    """The part of the layout that hasten's trainer doesn't support; '' if it supports all."""
    lacks = ["cp"] if layout.cp > 1 else []
    others = [name for name in ("tp", "ep") if getattr(layout, name) > 1]
    if layout.pp > 1:
        lacks += [f"{name} together with pp" for name in others]
        lacks += ["zero together with pp"] if layout.zero > 1 and layout.dp > 1 else []
        lacks += [] if layout.schedule in TRAINER_SCHEDULES else [f"{layout.schedule} schedule"]
        chunks = layout.virtual if layout.schedule == "interleaved" else TRAINER_CHUNKS
        lacks += [f"interleaving of {chunks} chunks a rank"] if chunks != TRAINER_CHUNKS else []
        lacks += ["recomputation of some layers in a pipeline"] * (layout.recompute == "selective")
    elif layout.ep > 1:
        lacks += ["tp together with ep"] if layout.tp > 1 else []
        lacks += ["zero together with ep"] if layout.zero > 1 else []
        lacks += ["recomputation of some layers together with ep"] * (
            layout.recompute == "selective"
        )
    lacks += ["recomputation of norms and activations alone"] * (layout.recompute == "light")
    lacks += [] if layout.precision in _PRECISIONS else [f"products in {layout.precision}"]
    lacks += ["products in fp8 together with tp"] * (layout.precision == "fp8" and layout.tp > 1)
    if layout.compression != "none":
        cut = [name for name in ("tp", "pp", "ep") if getattr(layout, name) > 1]
        lacks += [f"compressed gradients together with {name}" for name in cut]
    return f"hasten's own trainer has no {', no '.join(lacks)} yet" if lacks else ""


def _inline(value: Any) -> str:
    """YAML in one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_inline(one)}" for key, one in value.items()) + "}"
    return str(value).lower() if isinstance(value, bool) else str(value)


# What a plan spends: days, device hours, money where the user gave a price, energy as a bound.
#
# Device hours are always told, since they hold whatever an hour costs. Prices come from the user
# alone; the package has none. Energy is a bound: every device at its power limit all the time,
# hosts, switches and cooling not counted, and only for devices whose limit is known here.

PER_BILLION = 1e9  # tokens that figures are for where a job doesn't say how many
# Power limits in watts, from the makers' datasheets, recalled; the module's own, without its host.
_WATTS = {
    400: ("a100-40gb", "a100-80gb", "a800"),
    300: ("a100-pcie", "a6000", "a40", "v100-16gb", "v100-32gb"),
    350: ("l40s", "rtx3090", "h100-pcie"),
    700: ("h100-80gb", "h200", "h800"),
    500: ("h100-96gb-hbm2e-500w",),
    1000: ("b200",),
    750: ("mi300x",),
    450: ("rtx4090",),
    150: ("a10",),
    72: ("l4",),
    70: ("t4",),
}
WATTS: Mapping[str, int] = {name: watts for watts, names in _WATTS.items() for name in names}


@dataclass(frozen=True)
class JobCost:
    """Cost of a whole job, or of a billion tokens if the job has no number of tokens."""

    tokens: float
    seconds: Span
    device_hours: Span
    money: Span | None
    currency: str
    kwh_at_most: float | None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "tokens": self.tokens,
            "days": vars(self.seconds.times(1 / 86_400)),
            "device_hours": vars(self.device_hours),
            "money": vars(self.money) if self.money else None,
            "currency": self.currency or None,
            "kwh_at_most": self.kwh_at_most,
        }


def spending(plan_candidate: PlanCandidate, job: PlannedJob, price: Price | None = None) -> JobCost:
    """Cost of the job in that layout, without failures and evaluations."""
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
    watts = WATTS.get(plan_candidate.cluster.device.name)
    energy = hours.high * watts / 1000 if watts else None
    return JobCost(tokens, seconds, hours, paid, price.currency if price else "", energy)
