"""``hasten env``: hardware and limits of this machine, and with ``--bench`` its speed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hasten.cli.arguments import (
    AsJson,
    Fresh,
    output_option,
    refuse_unused,
    text_to_stderr,
    writable,
)
from hasten.cli.output import say, show_table
from hasten.errors import InputError
from hasten.formatting import size

if TYPE_CHECKING:
    from hasten.core.context import JobContext
    from hasten.machine.benchmark import DiskSpeed, MachineRates
    from hasten.parts.kernels.registry import DeviceFigures

LONGEST = 600.0  # seconds that ceilings may be measured for
WIDTH = 16  # columns of the names on the left


def env(
    context: typer.Context,
    bench: Annotated[
        bool, typer.Option("--bench", help="measure kernels and the ceilings that MFU refers to")
    ] = False,
    seconds: Annotated[
        float, typer.Option(help="seconds for the ceilings of --bench; 0: kernels only")
    ] = 30.0,
    fresh: Fresh = False,
    disk: Annotated[
        Path | None, typer.Option(help="folder on the disk to measure; default: this folder")
    ] = None,
    no_measure: Annotated[
        bool, typer.Option("--no-measure", help="don't measure the disk (64 MiB) and the kernels")
    ] = False,
    output: Annotated[
        Path | None, output_option("rates of --bench, a JSON file for a recipe's ceiling")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show or benchmark this machine."""
    if bench:
        refuse_unused(context, {"bench", "seconds", "fresh", "output", "as_json"}, "with --bench")
        measure_machine(seconds, fresh, output, as_json)
        return
    refuse_unused(context, {"disk", "no_measure", "as_json"}, "without --bench")
    from hasten.core import context as facts
    from hasten.parts.kernels import registry

    job = facts.seen_at_start()
    speed = None if no_measure else _disk_speed(disk)
    kernels = (registry.stored_figures if no_measure else registry.figures_here)(job.device)
    machine = _machine(job, speed, kernels)
    if as_json:
        say(json.dumps(machine, indent=1))
    else:
        _show_machine(machine, kernels)


def measure_machine(seconds: float, fresh: bool, output: Path | None, as_json: bool) -> None:
    """Measures the gains of kernels, which choose plans, and the ceilings of MFU."""
    from hasten.core import context as facts
    from hasten.machine.benchmark import measure
    from hasten.parts.kernels import registry
    from hasten.progress import Display
    from hasten.recipe.peak_flops import device_name, write_rates

    context = facts.seen_at_start()
    if not (1 <= seconds <= LONGEST or (seconds == 0 and output is None)):
        raise InputError(
            f"--seconds is {seconds:g}; give 1 to {LONGEST:g}, or 0 without --output "
            "for kernels only"
        )
    writable("--output", output)
    figures = registry.figures_here(context.device, fresh)
    measured: dict[str, Any] = {"kernels": asdict(figures)}
    with text_to_stderr(as_json):
        show_kernels(figures)
        if seconds:
            name, limit = device_name(context), context.hardware.memory_limit_bytes
            with Display() as display:
                rates = measure(context.device, name, None, seconds, limit, display.show)
            show_rates(rates)
            measured["rates"] = rates.to_dict()
            if output is not None:
                write_rates(rates, output)
                say(f"written: {output} (in a recipe: `ceiling: {output}`)")
    if as_json:
        say(json.dumps(measured, indent=1))


def show_kernels(figures: DeviceFigures) -> None:
    """Prints each variant of each operation: rate, speed relative to the first, error."""
    from hasten.parts.kernels import registry

    columns = ("operation", "variant", "rate", "speed [95 %]", "error", "allowed")
    rows: list[tuple[str, ...]] = []
    faults: list[str] = []
    first: dict[str, str] = {}
    for variant in registry.variants():
        proof, times = figures.proofs.get(variant.key), figures.times.get(variant.key)
        if proof is None or proof.absent:
            continue
        name, unit = variant.operation.name, variant.operation.unit
        opens = name not in first
        base = first.setdefault(name, variant.key)
        gain = None if opens else figures.gain(base, variant.key)
        per_second = "GB/s" if unit == "byte" else f"G{unit}/s"
        rate = "" if times is None else f"{times.rate / 1e9:.4g} {per_second}"
        errors = (f"{proof.error:.1e}", f"{proof.bound:.0e}")
        rows.append((name if opens else "", variant.name, rate, str(gain or ""), *errors))
        if proof.fault:
            faults.append(f"{variant.key}: {proof.fault}; it is left out of plans")
    show_table(columns, rows, unbroken=columns)
    for fault in faults:
        say(fault)
    say(
        f"{figures.device}, one thread, {figures.cpu_seconds:.1f} s of processor time, "
        f"{figures.measured_at}; hasten env --bench --fresh measures again"
    )


def show_rates(rates: MachineRates) -> None:
    """Prints the rates as tables, and the ceiling as a share of the datasheet's figure."""
    from hasten.machine.accelerators import datasheet

    threads = f", threads: {rates.threads}" if rates.device == "cpu" else ""
    say(f"{rates.device_name or rates.device}{threads}, torch {rates.torch}, {rates.measured_at}")
    for what, unit, scale, rows in (
        ("product", "TFLOP/s", 1e12, rates.products),
        ("memory", "GB/s", 1e9, rates.copies),
    ):
        cells = [
            (
                *(f"{r.dtype} {r.what}".strip(), f"{r.best / scale:.4g}"),
                *(f"{r.median / scale:.4g}", str(r.repeats)),
            )
            for r in rows
        ]
        show_table((what, f"best {unit}", "median", "repeats"), cells)
    best, bf16 = rates.best(), rates.best(["bf16"])
    if best is not None:
        say(f"ceiling {best.best / 1e12:.4g} TFLOP/s ({best.dtype} {best.what})")
    sheet = datasheet(rates.device_name) if rates.device != "cpu" else None
    if sheet is not None:
        share = f", of which {bf16.best / sheet.peak16:.0%} was reached" if bf16 else ""
        say(
            f"datasheet {sheet.peak16 / 1e12:.4g} TFLOP/s in bf16{share}, memory "
            f"{sheet.memory_rate / 1e9:.4g} GB/s ({sheet.name}: {sheet.source})"
        )


def check_hardware() -> dict[str, Any]:
    """Prints the output of ``hasten env`` without the disk's speed, and returns it as JSON data."""
    from hasten.core import context as facts
    from hasten.parts.kernels import registry

    context = facts.seen_at_start()
    kernels = registry.stored_figures(context.device)
    machine = _machine(context, None, kernels)
    _show_machine(machine, kernels)
    return machine


def _machine(
    context: JobContext, speed: DiskSpeed | str | None, kernels: DeviceFigures | None
) -> dict[str, Any]:
    from hasten.machine import host
    from hasten.training.recording import machine_facts

    return {
        **asdict(context.hardware),
        **machine_facts(),
        "versions": host.versions(),
        "disk_speed": speed if speed is None or isinstance(speed, str) else asdict(speed),
        "kernels": None if kernels is None else asdict(kernels),
    }


def _disk_speed(folder: Path | None) -> DiskSpeed | str:
    """Returns the disk's speed, or why it isn't measured."""
    from hasten.machine.benchmark import measure_disk

    try:
        return measure_disk(folder or Path())
    except ValueError as error:
        if folder is None:  # no --disk
            return f"not measured: {error}"
        raise InputError(f"--disk: {error}") from error


def _show_machine(machine: Mapping[str, Any], kernels: DeviceFigures | None) -> None:
    parts = (_processor(machine), _limits(machine["limits"]), _gpus(machine), _disks(machine))
    for name, text in (*chain(*parts), *_network(machine["network"]), *machine["versions"].items()):
        say(f"{name:<{WIDTH}} {text}")
    if kernels is None:
        say(f"{'kernels':<{WIDTH}} not measured: run hasten env --bench")
    else:
        show_kernels(kernels)


def _processor(machine: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "CPU", machine["cpu"]
    yield "cores", f"{machine['usable_cores']} usable, {machine['physical_cores']} physical"
    sets = ", ".join(machine["instruction_sets"]) or "none that hasten's kernels use"
    yield "instruction sets", sets
    for node in machine["numa"] if len(machine["numa"]) > 1 else ():
        distances = " ".join(map(str, node["distances"]))
        memory = "" if node["memory_bytes"] is None else f"{size(node['memory_bytes'])}, "
        yield f"NUMA node {node['number']}", f"cores {node['cpus']}, {memory}distances {distances}"
    yield "memory", f"{size(machine['memory_bytes'])}, limit {size(machine['memory_limit_bytes'])}"
    yield "system", machine["system"]


def _limits(limits: dict[str, Any]) -> Iterator[tuple[str, str]]:
    labels = {
        "cpus": f"{limits['cpus'] or 0:g} processors",
        "memory_bytes": f"{size(limits['memory_bytes'] or 0)} of memory",
        "swap_bytes": f"{size(limits['swap_bytes'] or 0)} of swap",
        "processes": f"{limits['processes']} processes",
        "shared_memory_bytes": f"{size(limits['shared_memory_bytes'] or 0)} of /dev/shm",
        "open_files": f"{limits['open_files']} open files",
    }
    text = ", ".join(text for name, text in labels.items() if limits[name] is not None)
    yield "limits", text or "none that can be read"
    if limits["container"] is not None:
        yield "container", limits["container"]


def _gpus(machine: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields PyTorch's accelerators, then the driver's GPUs, of which there may be more."""
    from hasten.machine.accelerators import datasheet

    gpus = machine["gpus"]
    for index, gpu in enumerate(machine["accelerators"]):
        yield (
            f"accelerator {index}",
            f"{gpu['name']}, {size(gpu['memory_bytes'])}, {gpu['capability']}",
        )
        sheet = datasheet(gpu["name"])
        if sheet is not None:
            yield "datasheet", f"{sheet.peak16 / 1e12:.4g} TFLOP/s in bf16 ({sheet.source})"
    if not machine["accelerators"]:
        yield "GPUs", f"none for PyTorch, {len(gpus)} for the driver" if gpus else "none"
    if machine["driver"] is not None:
        yield "driver", machine["driver"]
    for index, gpu in enumerate(gpus):
        watts = gpu["power_limit_watts"]
        details = (
            gpu["pcie"],
            f"{gpu['nvlinks']} NVLinks up" if gpu["nvlinks"] else "",
            f"at most {watts:.0f} W" if watts is not None else "",
            "split by MIG" if gpu["mig"] else "",
        )
        yield f"GPU {index}", ", ".join(filter(None, details))
    for index, row in enumerate(machine["gpu_paths"]):
        yield f"GPU {index} to", " ".join(row)


def _disks(machine: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for disk in machine["disks"]:
        spins = ", with platters" if disk["spins"] else ""
        room = f"{size(disk['free_bytes'])} free of {size(disk['size_bytes'])}"
        yield "disk", f"{disk['path']}, {disk['kind']}, {room}{spins}"
    speed = machine["disk_speed"]
    if not isinstance(speed, dict):
        yield "disk speed", speed or "not measured"
        return
    read = "not measured" if speed["read"] is None else f"{speed['read'] / 1e6:,.0f} MB/s"
    yield (
        "disk speed",
        f"{Path(speed['path']).absolute()}: writes {speed['write'] / 1e6:,.0f} MB/s, reads {read}, "
        f"{speed['flush_seconds'] * 1e3:.2g} ms for a flush ({speed['bytes'] >> 20} MiB)",
    )


def _network(cards: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    for card in cards:
        rate = card["bits_per_second"]
        details = [card["kind"], f"{rate / 1e9:g} Gbit/s" if rate else "rate unknown"]
        if card["driver"]:
            details.append(card["driver"])
        if card["numa_node"] is not None:
            details.append(f"NUMA node {card['numa_node']}")
        yield f"network {card['name']}"[:WIDTH], ", ".join(details)
