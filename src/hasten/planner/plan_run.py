"""A finished run, predicted as it ran, beside what it measured: for ``plan`` and ``report``."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from hasten.errors import InputError
from hasten.machine.accelerators import PCIE4, device
from hasten.planner import actual
from hasten.planner.candidate import candidate, words
from hasten.planner.cluster import Cluster, own_machine
from hasten.planner.constants import Calibration
from hasten.planner.layout import Layouts
from hasten.planner.plan_given import own_run
from hasten.planner.plan_text import aligned
from hasten.planner.predict import predict

LINK = 10e9  # bytes/s between ranks of a processor: through memory
RATES = ("ceiling.json",)  # files of hasten bench that a run may have kept
UNCALIBRATED = "fitted to published measurements of GPUs; --calibrate RUN fits to this machine"


def is_run(name: str) -> bool:
    """Whether a name is the folder of a run rather than of a model."""
    return (Path(name) / "metrics.jsonl").is_file() and (Path(name) / "recipe.yaml").is_file()


def closed(
    folder: Path,
    cluster: Cluster,
    calibration: Calibration | None = None,
    stack: str | None = None,
) -> str:
    """The table: each term predicted and measured, and whether it lies in its interval."""
    head, terms = _closing(folder, cluster, calibration, stack)
    shown = aligned(actual.table(terms))
    return f"{head}\n{shown}" + ("" if calibration else f"\n{UNCALIBRATED}")


def predicted_section(folder: Path) -> dict[str, Any] | None:
    """The same for ``report.predicted``; None where the folder holds no run to predict."""
    if not is_run(str(folder)):
        return None
    try:
        head, terms = _closing(folder, machine_of(folder))
    except InputError:
        return None
    rows = [dataclasses.asdict(term) for term in terms]
    return {"text": f"{head}; {UNCALIBRATED}", "rows": rows}


def _closing(
    folder: Path,
    cluster: Cluster,
    calibration: Calibration | None = None,
    stack: str | None = None,
) -> tuple[str, list[actual.Term]]:
    run = own_run(folder, cluster)
    rows = Layouts.of([run.layout])
    told = predict(run.architecture, run.cluster, run.job, rows, calibration, stack)
    one = candidate(told, rows, 0, run.cluster, run.job)
    head = f"{folder}, {words(run.layout)}: predicted as it ran on {run.cluster.device.name}"
    return head, actual.closing(one, folder)


def machine_of(folder: Path) -> Cluster:
    """What the run ran on: its GPU by name, or rates that were measured there and kept.

    Raises:
        InputError: nobody knows the machine's rates; says how to measure them.
    """
    summary = _object(folder / "summary.json")
    hardware = summary.get("hardware")
    hardware = hardware if isinstance(hardware, dict) else {}
    chips = hardware.get("accelerators")
    if isinstance(chips, list) and chips and isinstance(chips[0], dict):
        chip = device(str(chips[0].get("name")))
        count = len(chips)
        if summary.get("world_size", 1) not in range(1, count + 1):
            raise InputError(
                f"{folder}: it ran on several hosts of {count} {chip.name}, and how those are "
                f"wired stands nowhere: hasten plan {folder} --gpu {chip.name} --cluster fat_tree "
                f"--nodes N --gpus-per-node {count}"
            )
        joined = chip.link if count <= chip.per_node else PCIE4 * 1e9
        return Cluster(chip, 1, count, joined, joined, topology="single_node")
    for name in RATES:
        rates = _object(folder / name)
        if rates.get("kind") == "hasten machine rates":
            memory = float(hardware.get("memory_limit_bytes") or 16e9)
            own = own_machine(rates, memory_bytes=memory, link=LINK)
            return dataclasses.replace(own, device=dataclasses.replace(own.device, units=1))
    raise InputError(
        f"{folder}: it ran on a processor, whose rates no datasheet tells: hasten bench --json "
        f"bench.json, then hasten plan {folder} --gpu bench.json --memory GB"
    )


def predicted_lines(folder: Path) -> str:
    """For a run's report: the table, or one line that says what is missing for it."""
    try:
        return "\n" + closed(folder, machine_of(folder))
    except InputError as error:
        return f"predicted against measured: {error}"


def _object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
