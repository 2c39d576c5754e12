"""Trainings of the communication method's benchmark on a rank: whole, and paused on the way."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

from hasten.machine.environment import World

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from communication import rank

STEPS = 24
METHODS = ("ddp", "int4", "stream:2", "diloco:5")


def paused(world: World) -> dict[str, Any]:
    """Of each method: a training at once, and one that pauses and is asked for again."""
    draw = torch.Generator().manual_seed(5)
    text = torch.randint(32, 126, (rank.EVAL_DATA + 100_000,), generator=draw, dtype=torch.uint8)
    found = {}
    for name in METHODS:
        place = Path(os.environ["HASTEN_RENDEZVOUS"]).with_name(name.replace(":", "_"))
        spec = {"method": name, "size": "tiny", "seed": 0, "steps": STEPS, "rate": 1e-3, "rows": 4}
        spec["paused"] = str(place)
        whole = rank.loss(spec, world.rank, text)
        first = rank.loss({**spec, "seconds": 0.0}, world.rank, text)
        second = rank.loss(spec, world.rank, text)
        found[name] = {"whole": whole, "first": first, "second": second}
    return found
