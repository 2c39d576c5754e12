"""Published measurements as cases of the model: one record of the file, one architecture, layout.

The format is that of ``benchmarks/planner/measurements.json``: a list of records with the model's
sizes, the GPU, the parallel layout, what was measured, and where it was read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hasten.machine.accelerators import device
from hasten.models.architecture import Architecture, Experts, LatentAttention
from hasten.planner.cluster import Cluster
from hasten.planner.layout import RECOMPUTE, Layouts, PlannedJob, PlannedLayout
from hasten.planner.memory import memory
from hasten.planner.numbers import MemoryConstants, numbers

_TASKS = {"sft": "full", "full": "full", "lora": "lora", "pretrain": "pretrain", "oom": "pretrain"}
ROOM = 0.85  # of a device's memory, which people fill no further
MIXED = 1.3  # the same where software recomputes some kinds of operators more than others
# What recomputes the least first; some of a layer beside experts alone, as ``space`` has it.
LEAST_FIRST = ("none", "selective", "full"), ("none", "light", "selective", "full")
_PRECISIONS = {"tf32": "fp32", "amp": "fp16", "mxfp4": "nvfp4", "fp4": "nvfp4", "bfloat16": "bf16"}
# Formats that hasten's trainer doesn't have; ``PublishedConstants`` has their rates.
OTHER_FORMATS = ("mxfp8", "nvfp4")
_SCHEDULES = {"zb-1p": "zero_bubble", "zb-h1": "zero_bubble", "zb-2p": "zb2p", "zb-h2": "zb2p"}
_SCHEDULES |= {"gpipe": "gpipe"}


@dataclass(frozen=True)
class PublishedMeasurement:
    """One measurement and what the model needs to predict it."""

    identity: str
    group: str
    stack: str
    scope: str
    architecture: Architecture
    cluster: Cluster
    job: PlannedJob
    layout: PlannedLayout
    other_format: str  # of products, in whose stead the layout has fp8
    tokens_per_second: float | None  # per device
    memory_gb: float | None
    confidence: float
    recalled: bool
    superseded: bool
    source: str


def read_record(row: Mapping[str, Any]) -> PublishedMeasurement | None:
    """One record; None where the micro-batch isn't known, without which nothing can be said."""
    if not row.get("mbs"):
        return None
    measured, model = row.get("measured") or {}, row["model"]
    name = model.get("name", "model")
    stack = str(row.get("stack", ""))
    chip = device(row["gpu"])
    per_node = int(row.get("gpus_per_node") or chip.per_node)
    gpus = int(row["gpus"])
    cluster = Cluster(
        chip,
        nodes=max(1, -(-gpus // per_node)),
        per_node=per_node,
        intra=chip.link,
        inter=float(row.get("inter_GBps_per_gpu") or 25) * 1e9,
    )
    sequence, batch = int(row["seq"]), int(row["gbs"])
    rate = _figure(measured, "tokens_per_s_per_gpu")
    step = _figure(measured, "iter_s")
    if rate is None and step is not None and gpus > 0:
        rate = batch * sequence / (step * gpus)
    job = PlannedJob(sequence, batch, _TASKS.get(row.get("task", "pretrain"), "pretrain"))
    architecture = _architecture(model, name)
    return PublishedMeasurement(
        identity=str(row.get("id", "")),
        group=str(row.get("group") or f"{stack}|{name}|{chip.name}"),
        stack=stack,
        scope=str(row.get("scope", "core")),
        architecture=architecture,
        cluster=cluster,
        job=job,
        layout=_with_recompute(_layout(row, model), row, architecture, cluster, job),
        other_format=precision if (precision := _precision(row)) in OTHER_FORMATS else "",
        tokens_per_second=rate,
        memory_gb=_figure(measured, "memory_GB"),
        confidence=float(row.get("confidence", 1.0)),
        recalled=str(row.get("read", "")).startswith("recalled"),
        superseded=bool(row.get("superseded")),
        source=str(row.get("source", "")),
    )


def _precision(row: Mapping[str, Any]) -> str:
    """The format of its products."""
    precision = str(row.get("precision") or "bf16").lower()
    precision = "fp8" if precision.startswith("fp8") else precision
    return _PRECISIONS.get(precision, precision)


def _figure(measured: Mapping[str, Any], key: str) -> float | None:
    """A measured number; None where there is none."""
    if measured.get(key) is None:
        return None
    value = float(measured[key])
    if not 0 < value < float("inf"):
        raise ValueError(f"its {key} is {value:g}; a measurement is above 0")
    return value


def _architecture(model: Mapping[str, Any], name: str) -> Architecture:
    mla, count = model.get("mla"), int(model.get("experts") or 0)
    moe = None
    if count:
        moe = Experts(
            count=count,
            active=int(model["topk"]),
            width=int(model["moe_ffn"]),
            shared_width=int(model.get("shared_ffn") or 0),
            dense_layers=int(model.get("dense_layers") or 0),
        )
    latent = None
    if mla:
        latent = LatentAttention(mla["q_lora"], mla["kv_lora"], mla["nope"], mla["rope"], mla["v"])
    return Architecture(
        name=name,
        layers=model["layers"],
        hidden=model["hidden"],
        heads=model["heads"],
        kv_heads=model.get("kv_heads") or model["heads"],
        head_dim=model.get("head_dim") or max(1, model["hidden"] // model["heads"]),
        ffn=model["ffn"],
        vocabulary=model["vocab"],
        gated=bool(model.get("gated", True)),
        tied=bool(model.get("tied", False)),
        latent=latent,
        moe=moe,
        window=int(model.get("window") or 0),
        window_every=int(model.get("window_every") or 1),
    )


def _layout(row: Mapping[str, Any], model: Mapping[str, Any]) -> PlannedLayout:
    stages, virtual = int(row.get("pp") or 1), int(row.get("vpp") or 0)
    tensor, context = int(row.get("tp") or 1), int(row.get("cp") or 1)
    others, gpus = tensor * stages * context, int(row["gpus"])
    dp = int(row.get("dp") or 0)
    if dp * others != gpus:  # not said, or counted with another axis in it
        dp = max(1, gpus // others)
    zero = row.get("zero")
    schedule = _SCHEDULES.get(row.get("schedule", ""), "")
    if "interleaved" in str(row.get("schedule", "")) and virtual < 2:
        layers = int(model["layers"])  # as deep as it goes, where not said
        virtual = max(1, (layers if layers % stages == 0 else layers + 2) // stages)
    virtual = max(virtual, 1) if stages > 1 and not schedule else 1
    flash = bool(model.get("flash", True))
    # Sequence parallelism came with selective recomputation (arXiv 2205.05198), after those
    # that still wrote their scores; where a record says, it says.
    told = row.get("sp")
    precision = _precision(row)
    return PlannedLayout(
        dp=dp,
        tp=tensor,
        pp=stages,
        ep=int(row.get("ep") or 1),
        cp=context,
        zero=1 if zero is None else int(zero),
        micro_batch=int(row["mbs"]),
        schedule=schedule or ("interleaved" if virtual > 1 else "1f1b"),
        virtual=virtual,
        precision="fp8" if precision in OTHER_FORMATS else precision,
        sequence_parallel=flash if told is None else bool(told),
        flash=flash,
    )


def _with_recompute(
    layout: PlannedLayout,
    row: Mapping[str, Any],
    model: Architecture,
    cluster: Cluster,
    job: PlannedJob,
) -> PlannedLayout:
    """The layout with the recomputation that the record tells.

    Where hardware over model FLOPs was published, that decides; where nothing is told, the least
    that the device's memory allows by the uncalibrated count.
    """
    share = row.get("measured_hfu_over_mfu")
    told = row.get("recompute") or "none"
    word = "full" if told is True else str(told)
    if share:
        extra = float(share) - 1
        word = "none" if extra < 0.07 else "selective" if extra < 0.25 else "full"
    if word != "unknown":
        return replace(layout, recompute=word if word in RECOMPUTE else "selective")
    count = max(1, -(-job.global_batch // (layout.dp * layout.micro_batch)))
    figures = numbers(model, job.sequence)
    for word in LEAST_FIRST[model.moe is not None]:
        tried = replace(layout, recompute=word)
        columns = Layouts.of([tried])
        held = memory(figures, columns, count, MemoryConstants(), job.task == "lora").total
        room = MIXED if word == "selective" and layout.zero < 3 else ROOM
        if held[0] < room * cluster.device.memory_bytes:
            return tried
    return replace(layout, recompute="full")
