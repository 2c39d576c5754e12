"""``hasten hardware``: the machine as techniques and plans see it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from hasten.cli.bench import conclusions
from hasten.cli.display import size
from hasten.core import facts
from hasten.parts.datasheet import datasheet
from hasten.recipe.ceiling import read_rates


def hardware(as_json: bool, rates_file: Path | None = None) -> None:
    """Print the facts, for people or as JSON; the rates too where a file of them is given."""
    here = facts.seen_at_start()
    known = here.hardware
    rates = read_rates(rates_file, here) if rates_file is not None else None
    if as_json:
        found = {**asdict(known), "versions": facts.versions()}
        if rates is not None:
            found["rates"] = rates.to_dict()
        print(json.dumps(found, indent=1))
        return
    print(f"processor        {known.cpu}")
    print(f"cores            {known.usable_cores} usable, {known.physical_cores} physical")
    print(f"instruction sets {', '.join(known.instruction_sets) or 'none of those that matter'}")
    print(f"memory           {size(known.memory_bytes)}, limit {size(known.memory_limit_bytes)}")
    print(f"system           {known.system}")
    for index, gpu in enumerate(known.accelerators):
        print(f"accelerator {index}    {gpu.name}, {size(gpu.memory_bytes)}, {gpu.capability}")
        row = datasheet(gpu.name)
        if row is not None and rates is None:
            print(f"datasheet        {row.bf16 / 1e12:.4g} TFLOP/s in bf16 ({row.source})")
    if not known.accelerators:
        print("accelerators     none")
    if rates is not None:
        for line in conclusions(rates):
            name, _, rest = line.partition(" ")
            print(f"{name:<16} {rest}")
        for copy in rates.copies:
            print(f"{copy.way:<16} {copy.best / 1e9:.4g} GB/s")
    for package, version in facts.versions().items():
        print(f"{package:<16} {version}")
