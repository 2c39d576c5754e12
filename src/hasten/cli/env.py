"""``hasten env``: hardware and limits of this machine, and with ``--bench`` its speed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
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
    from hasten.machine.benchmark import DiskSpeed, MachineRates, ProductRate
    from hasten.parts.kernels.registry import DeviceFigures

LONGEST = 600.0  # seconds that ceilings may be measured for
WIDTH = 16  # columns of the names on the left


def env(
    context: typer.Context,
    bench: Annotated[
        bool, typer.Option("--bench", help="measure kernels and the ceilings that MFU refers to")
    ] = False,
    device: Annotated[
        str, typer.Option(help="device to measure with --bench: auto, cpu or cuda")
    ] = "auto",
    dtype: Annotated[
        list[str] | None,
        typer.Option(help="number format for --bench: bf16, fp32, fp16, tf32 or fp8; repeatable"),
    ] = None,
    seconds: Annotated[
        float, typer.Option(help="seconds for the ceilings of --bench; 0: kernels only")
    ] = 30.0,
    fresh: Fresh = False,
    rates: Annotated[
        Path | None, typer.Option(help="file of env --bench -o; its rates are shown too")
    ] = None,
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
        used = {"bench", "device", "dtype", "seconds", "fresh", "output", "as_json"}
        refuse_unused(context, used, "with --bench")
        measure_machine(device, dtype, seconds, fresh, output, as_json)
        return
    refuse_unused(context, {"rates", "disk", "no_measure", "as_json"}, "without --bench")
    from hasten.core import context as facts
    from hasten.parts.kernels import registry
    from hasten.recipe.peak_flops import read_rates
    from hasten.training.recording import machine_facts

    job = facts.seen_at_start()
    stored = read_rates(rates, job) if rates is not None else None
    machine, speed = machine_facts(), "not measured" if no_measure else _speed(disk)
    figures = registry.stored_figures if no_measure else registry.figures_here
    kernels = figures(job.device)
    if as_json:
        say(json.dumps(_as_data(job, machine, speed, stored, kernels), indent=1))
    else:
        _print_lines(job, machine, speed, stored, kernels)


# ``hasten env --bench``: what kernels gain on this machine, by which plans are chosen, and the
# ceilings that MFU and other speeds refer to.


def measure_machine(
    device: str,
    dtype: list[str] | None,
    seconds: float,
    fresh: bool,
    output: Path | None,
    as_json: bool,
) -> None:
    from hasten.core import context as facts
    from hasten.machine.benchmark import checked_dtypes, measure
    from hasten.parts.kernels import registry
    from hasten.progress import Display
    from hasten.recipe.peak_flops import device_name, write_rates

    if device not in ("auto", "cpu", "cuda"):
        raise InputError(f"--device is {device!r}; give auto, cpu or cuda")
    context = facts.seen_at_start()
    if device == "cuda" and not context.hardware.accelerators:
        raise InputError("--device: this machine has no CUDA device; give auto or cpu")
    if device == "cpu":
        context = replace(context, device="cpu")
    if not (1 <= seconds <= LONGEST or (seconds == 0 and output is None)):
        raise InputError(
            f"--seconds is {seconds:g}; give 1 to {LONGEST:g}, or 0 without --output "
            "for kernels only"
        )
    try:
        formats = checked_dtypes(context.device, dtype)
    except ValueError as error:
        raise InputError(f"--dtype: {error}") from error
    writable("--output", output)
    figures = registry.figures_here(context.device, fresh)
    data: dict[str, Any] = {"kernels": asdict(figures)}
    with text_to_stderr(as_json):
        show_kernels(figures)
        if seconds:
            with Display() as display:
                rates = measure(
                    context.device,
                    device_name(context),
                    formats,
                    seconds,
                    context.hardware.memory_limit_bytes,
                    display.show,
                )
            show(rates)
            data["rates"] = rates.to_dict()
            if output is not None:
                write_rates(rates, output)
                say(f"written: {output} (in a recipe: `ceiling: {output}`)")
    if as_json:
        say(json.dumps(data, indent=1))


def show_kernels(figures: DeviceFigures) -> None:
    """Each way of each operation: its rate, its speed against the first one, its largest error."""
    from hasten.parts.kernels import registry

    columns = ("operation", "way", "rate", "speed [95 %]", "error", "allowed")
    rows: list[tuple[str, ...]] = []
    first: dict[str, str] = {}
    for variant in registry.variants():
        proof, times = figures.proofs.get(variant.key), figures.times.get(variant.key)
        if proof is None or proof.absent:
            continue
        name = variant.operation.name
        opens = name not in first
        base = first.setdefault(name, variant.key)
        gain = None if opens else figures.gain(base, variant.key)
        unit = {"byte": "GB/s"}.get(variant.operation.unit, f"G{variant.operation.unit}/s")
        rate = "" if times is None else f"{times.rate / 1e9:.4g} {unit}"
        errors = (f"{proof.error:.1e}", f"{proof.bound:.0e}")
        rows.append((name if opens else "", variant.name, rate, str(gain or ""), *errors))
    show_table(columns, rows, unbroken=columns)
    for variant in registry.variants():
        proof = figures.proofs.get(variant.key)
        if proof is not None and proof.fault:
            say(f"{variant.key}: {proof.fault}; it is left out of plans")
    say(
        f"{figures.device}, one thread, {figures.cpu_seconds:.1f} s of processor time, "
        f"{figures.measured_at}; hasten env --bench --fresh measures again"
    )


def show(rates: MachineRates) -> None:
    """The rates as tables, the best of each format against the datasheet where there is one."""
    threads = f", threads: {rates.threads}" if rates.device == "cpu" else ""
    say(f"{rates.device_name or rates.device}{threads}, torch {rates.torch}, {rates.measured_at}")
    products = []
    for product in rates.products:
        crown = " *" if product is rates.best([product.dtype]) else ""
        figures = f"{product.best / 1e12:.4g}{crown}", f"{product.median / 1e12:.4g}"
        products.append((_shape(product), product.dtype, *figures, str(product.repeats)))
    show_table(("product", "format", "best TFLOP/s", "median", "repeats"), products)
    copies = [
        (copy.way, f"{copy.best / 1e9:.4g}", f"{copy.median / 1e9:.4g}", str(copy.repeats))
        for copy in rates.copies
    ]
    show_table(("memory", "best GB/s", "median", "repeats"), copies)
    for line in rates.skipped:
        say(f"not measured: {line}")
    for line in conclusions(rates):
        say(line)


def conclusions(rates: MachineRates) -> list[str]:
    """The ceiling in a line, and its share of the maker's figure."""
    from hasten.machine.accelerators import datasheet

    best = rates.best()
    lines = []
    if best is not None:
        lines.append(f"ceiling {best.best / 1e12:.4g} TFLOP/s ({best.dtype}, {_shape(best)})")
    row = datasheet(rates.device_name) if rates.device != "cpu" else None
    bf16 = rates.best(["bf16"])
    if row is not None:
        share = f", of which {bf16.best / row.peak16:.0%} was reached" if bf16 else ""
        lines.append(
            f"datasheet {row.peak16 / 1e12:.4g} TFLOP/s in bf16{share}, memory "
            f"{row.memory_rate / 1e9:.4g} GB/s ({row.name}: {row.source})"
        )
    return lines


def _shape(product: ProductRate) -> str:
    return f"{product.m}x{product.k} by {product.k}x{product.n}"


def check_hardware() -> dict[str, Any]:
    """Prints what ``hasten env`` prints, without the disk's speed, and returns its JSON data."""
    from hasten.core import context as facts
    from hasten.parts.kernels import registry
    from hasten.training.recording import machine_facts

    job_context, machine, speed = facts.seen_at_start(), machine_facts(), "not measured"
    kernels = registry.stored_figures(job_context.device)
    _print_lines(job_context, machine, speed, None, kernels)
    return _as_data(job_context, machine, speed, None, kernels)


def _as_data(
    context: JobContext,
    machine: dict[str, Any],
    speed: DiskSpeed | str,
    rates: MachineRates | None,
    kernels: DeviceFigures | None,
) -> dict[str, Any]:
    from hasten.machine import host
    from hasten.machine.benchmark import DiskSpeed

    data = {**asdict(context.hardware), **machine, "versions": host.versions()}
    data["disk_speed"] = asdict(speed) if isinstance(speed, DiskSpeed) else None
    data["kernels"] = None if kernels is None else asdict(kernels)
    if rates is not None:
        data["rates"] = rates.to_dict()
    return data


def _print_lines(
    context: JobContext,
    machine: dict[str, Any],
    speed: DiskSpeed | str,
    rates: MachineRates | None,
    kernels: DeviceFigures | None,
) -> None:
    for name, text in _lines(context, machine, speed, rates):
        say(f"{name:<{WIDTH}} {text}")
    if kernels is None:
        say(f"{'kernels':<{WIDTH}} not measured: run hasten env --bench")
    else:
        show_kernels(kernels)


def _speed(folder: Path | None) -> DiskSpeed | str:
    """The disk's speed, or why there is none."""
    from hasten.machine.benchmark import measure_disk

    try:
        return measure_disk(folder or Path())
    except ValueError as error:
        if folder is None:  # nobody asked for this one
            return f"not measured: {error}"
        raise InputError(f"--disk: {error}") from error


def _lines(
    context: JobContext, machine: dict[str, Any], speed: DiskSpeed | str, rates: MachineRates | None
) -> Iterator[tuple[str, str]]:
    from hasten.machine import host

    hardware = context.hardware
    yield "CPU", hardware.cpu
    yield "cores", f"{hardware.usable_cores} usable, {hardware.physical_cores} physical"
    sets = ", ".join(hardware.instruction_sets) or "none of those that matter"
    yield "instruction sets", sets
    for node in machine["numa"] if len(machine["numa"]) > 1 else ():
        distances = " ".join(map(str, node["distances"]))
        memory = "" if node["memory_bytes"] is None else f"{size(node['memory_bytes'])}, "
        yield f"NUMA node {node['number']}", f"cores {node['cpus']}, {memory}distances {distances}"
    yield "memory", f"{size(hardware.memory_bytes)}, limit {size(hardware.memory_limit_bytes)}"
    yield from _limits(machine["limits"])
    yield "system", hardware.system
    yield from _gpus(context, machine, rates)
    yield from _disks(machine["disks"], speed)
    yield from _network(machine["network"])
    if rates is not None:
        for line in conclusions(rates):
            name, _, text = line.partition(" ")
            yield name, text.strip()
        for copy in rates.copies:
            yield copy.way, f"{copy.best / 1e9:.4g} GB/s"
    yield from host.versions().items()


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


def _gpus(
    context: JobContext, machine: dict[str, Any], rates: MachineRates | None
) -> Iterator[tuple[str, str]]:
    """Accelerators as PyTorch counts them, maybe fewer than the driver; links by the driver."""
    from hasten.machine.accelerators import datasheet

    accelerators = context.hardware.accelerators
    for index, gpu in enumerate(accelerators):
        yield f"accelerator {index}", f"{gpu.name}, {size(gpu.memory_bytes)}, {gpu.capability}"
        row = datasheet(gpu.name)
        if row is not None and rates is None:
            yield "datasheet", f"{row.peak16 / 1e12:.4g} TFLOP/s in bf16 ({row.source})"
    if not accelerators:
        count = len(machine["gpus"])
        yield "GPUs", f"none for PyTorch, {count} for the driver" if count else "none"
    if machine["driver"] is not None:
        yield "driver", machine["driver"]
    for index, gpu in enumerate(machine["gpus"]):
        details = [gpu["pcie"], f"{gpu['nvlinks']} NVLinks up" if gpu["nvlinks"] else None]
        if gpu["power_limit_watts"] is not None:
            details.append(f"at most {gpu['power_limit_watts']:.0f} W")
        if gpu["mig"]:
            details.append("split by MIG")
        yield f"GPU {index}", ", ".join(word for word in details if word)
    for index, row in enumerate(machine["gpu_paths"]):
        yield f"GPU {index} to", " ".join(row)


def _disks(disks: list[dict[str, Any]], speed: DiskSpeed | str) -> Iterator[tuple[str, str]]:
    for disk in disks:
        spins = ", with platters" if disk["spins"] else ""
        room = f"{size(disk['free_bytes'])} free of {size(disk['size_bytes'])}"
        yield "disk", f"{disk['path']}, {disk['kind']}, {room}{spins}"
    if isinstance(speed, str):
        yield "disk speed", speed
    else:
        read = "read not measured: the file stayed in memory"
        if speed.read is not None:
            read = f"reads {speed.read / 1e6:,.0f} MB/s"
        yield (
            "disk speed",
            f"{Path(speed.path).absolute()}: writes {speed.write / 1e6:,.0f} MB/s, {read}, "
            f"{speed.flush_seconds * 1e3:.2g} ms to be safe (a burst of {speed.bytes >> 20} MiB)",
        )


def _network(cards: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    for card in cards:
        rate = card["bits_per_second"]
        details = [card["kind"], f"{rate / 1e9:g} Gbit/s" if rate else "rate not said"]
        if card["driver"]:
            details.append(card["driver"])
        if card["numa_node"] is not None:
            details.append(f"NUMA node {card['numa_node']}")
        yield f"network {card['name']}"[:WIDTH], ", ".join(details)
