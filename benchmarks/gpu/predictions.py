"""What a step of each choice takes by simulation: memory, waits, seconds by part on several
devices.

`gpu.simulated` traces the figures and writes ``paper.json``; here they are read. They say which
choices a device has room for, and what a measured step is compared with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from gpu.rows import Choice, Row

FILE = Path(__file__).with_name("predictions.json")
RESERVE = 3e9  # bytes: the driver's context, workspaces of libraries
FRAGMENTS = 1.03  # what the allocator can't use of what it holds


@dataclass(frozen=True)
class SimulatedStep:
    """One step of a choice, of the whole model.

    Args:
        peak_bytes: of live tensors at most.
        syncs: times that the host waits for the device.
        tokens: of the step.
        seconds: of each part, by device; a lower bound.
    """

    peak_bytes: float
    syncs: float
    tokens: float
    seconds: Mapping[str, Mapping[str, float]]

    @property
    def needed_bytes(self) -> float:
        """That a device must have free."""
        return FRAGMENTS * self.peak_bytes + RESERVE

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def choice_key(row: Row, choice: Choice) -> str:
    """Names a choice of a row in the file."""
    plan = ", ".join(str(technique) for technique in choice.techniques(row.batch))
    return f"{plan}; {choice.weights}, {choice.examples} x {row.length}"


@cache
def kept_steps(file: Path = FILE) -> Mapping[str, Mapping[str, SimulatedStep]]:
    """What was traced, by row and choice."""
    found = json.loads(file.read_text()) if file.exists() else {}
    return {
        row: {key: SimulatedStep(**step) for key, step in steps.items()}
        for row, steps in found.items()
    }


def simulated_step(row: Row, choice: Choice) -> SimulatedStep | None:
    """A choice's step; None where it wasn't traced."""
    return kept_steps().get(row.name, {}).get(choice_key(row, choice))
