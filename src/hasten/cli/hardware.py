"""``hasten hardware``: the machine as techniques and plans see it."""

from __future__ import annotations

import json
from dataclasses import asdict

from hasten.cli.display import size
from hasten.core import facts


def hardware(as_json: bool) -> None:
    """Print the facts, for people or as JSON."""
    known = facts.hardware()
    if as_json:
        print(json.dumps({**asdict(known), "versions": facts.versions()}, indent=1))
        return
    print(f"processor        {known.cpu}")
    print(f"cores            {known.usable_cores} usable, {known.physical_cores} physical")
    print(f"instruction sets {', '.join(known.instruction_sets) or 'none of those that matter'}")
    print(f"memory           {size(known.memory_bytes)}, limit {size(known.memory_limit_bytes)}")
    print(f"system           {known.system}")
    for index, gpu in enumerate(known.accelerators):
        print(f"accelerator {index}    {gpu.name}, {size(gpu.memory_bytes)}, {gpu.capability}")
    if not known.accelerators:
        print("accelerators     none")
    for package, version in facts.versions().items():
        print(f"{package:<16} {version}")
