"""``hasten hardware``: the machine as techniques and plans see it, and what limits it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hasten.cli.bench import conclusions
from hasten.core import facts
from hasten.core.facts import Facts
from hasten.errors import InputError
from hasten.formatting import size
from hasten.machine import host
from hasten.machine.accelerators import datasheet
from hasten.machine.benchmark import DiskSpeed, MachineRates, measure_disk
from hasten.recipe.peak_flops import read_rates
from hasten.training.recording import machine

WIDTH = 16  # of the names on the left


def hardware(
    as_json: bool, rates_file: Path | None = None, disk: Path | None = None, measure: bool = True
) -> None:
    """Print the facts, for people or as JSON; the rates too where a file of them is given.

    Args:
        disk: the folder whose disk is measured; this one, as far as it can be, if left out.
        measure: whether to; it writes 64 MiB there and takes them away.
    """
    here = facts.seen_at_start()
    rates = read_rates(rates_file, here) if rates_file is not None else None
    found, speed = machine(), _speed(disk) if measure else "not measured"
    if as_json:
        told = {**asdict(here.hardware), **found, "versions": host.versions()}
        told["disk_speed"] = asdict(speed) if isinstance(speed, DiskSpeed) else None
        if rates is not None:
            told["rates"] = rates.to_dict()
        print(json.dumps(told, indent=1))
        return
    for name, text in _lines(here, found, speed, rates):
        print(f"{name:<{WIDTH}} {text}")


def _speed(folder: Path | None) -> DiskSpeed | str:
    """The disk's speed, or why there is none."""
    try:
        return measure_disk(folder or Path())
    except ValueError as error:
        if folder is None:  # nobody asked for this one
            return f"not measured: {error}"
        raise InputError(f"--disk: {error}") from error


def _lines(
    here: Facts, found: dict[str, Any], speed: DiskSpeed | str, rates: MachineRates | None
) -> Iterator[tuple[str, str]]:
    known = here.hardware
    yield "processor", known.cpu
    yield "cores", f"{known.usable_cores} usable, {known.physical_cores} physical"
    sets = ", ".join(known.instruction_sets) or "none of those that matter"
    yield "instruction sets", sets
    for node in found["numa"] if len(found["numa"]) > 1 else ():
        distances = " ".join(map(str, node["distances"]))
        memory = "" if node["memory_bytes"] is None else f"{size(node['memory_bytes'])}, "
        yield f"NUMA node {node['number']}", f"cores {node['cpus']}, {memory}distances {distances}"
    yield "memory", f"{size(known.memory_bytes)}, limit {size(known.memory_limit_bytes)}"
    yield from _limits(found["limits"])
    yield "system", known.system
    yield from _gpus(here, found, rates)
    yield from _disks(found["disks"], speed)
    yield from _network(found["network"])
    if rates is not None:
        for line in conclusions(rates):
            name, _, rest = line.partition(" ")
            yield name, rest.strip()
        for copy in rates.copies:
            yield copy.way, f"{copy.best / 1e9:.4g} GB/s"
    yield from host.versions().items()


def _limits(limits: dict[str, Any]) -> Iterator[tuple[str, str]]:
    words = {
        "cpus": f"{limits['cpus'] or 0:g} processors",
        "memory_bytes": f"{size(limits['memory_bytes'] or 0)} of memory",
        "swap_bytes": f"{size(limits['swap_bytes'] or 0)} of swap",
        "processes": f"{limits['processes']} processes",
        "shared_memory_bytes": f"{size(limits['shared_memory_bytes'] or 0)} of /dev/shm",
        "open_files": f"{limits['open_files']} open files",
    }
    text = ", ".join(text for name, text in words.items() if limits[name] is not None)
    yield "limits", text or "none that can be read"
    if limits["container"] is not None:
        yield "container", limits["container"]


def _gpus(
    here: Facts, found: dict[str, Any], rates: MachineRates | None
) -> Iterator[tuple[str, str]]:
    """As PyTorch counts them, which may see fewer than the driver; links as the driver does."""
    accelerators = here.hardware.accelerators
    for index, gpu in enumerate(accelerators):
        yield f"accelerator {index}", f"{gpu.name}, {size(gpu.memory_bytes)}, {gpu.capability}"
        row = datasheet(gpu.name)
        if row is not None and rates is None:
            yield "datasheet", f"{row.bf16 / 1e12:.4g} TFLOP/s in bf16 ({row.source})"
    if not accelerators:
        seen = len(found["gpus"])
        yield "accelerators", f"none for PyTorch, {seen} for the driver" if seen else "none"
    if found["driver"] is not None:
        yield "driver", found["driver"]
    for index, gpu in enumerate(found["gpus"]):
        words = [gpu["pcie"], f"{gpu['nvlinks']} NVLinks up" if gpu["nvlinks"] else None]
        if gpu["power_limit_watts"] is not None:
            words.append(f"at most {gpu['power_limit_watts']:.0f} W")
        if gpu["mig"]:
            words.append("split by MIG")
        yield f"GPU {index}", ", ".join(word for word in words if word)
    for index, row in enumerate(found["gpu_paths"]):
        yield f"GPU {index} to", " ".join(row)


def _disks(disks: list[dict[str, Any]], speed: DiskSpeed | str) -> Iterator[tuple[str, str]]:
    for disk in disks:
        spins = ", with platters" if disk["spins"] else ""
        room = f"{size(disk['free_bytes'])} free of {size(disk['size_bytes'])}"
        yield "disk", f"{disk['path']}, {disk['kind']}, {room}{spins}"
    if isinstance(speed, str):
        yield "disk speed", speed
    else:
        read = "read not told: the file stayed in memory"
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
        words = [card["kind"], f"{rate / 1e9:g} Gbit/s" if rate else "rate not said"]
        if card["driver"]:
            words.append(card["driver"])
        if card["numa_node"] is not None:
            words.append(f"NUMA node {card['numa_node']}")
        yield f"network {card['name']}"[:WIDTH], ", ".join(words)
