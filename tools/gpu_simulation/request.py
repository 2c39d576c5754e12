"""Asks a fresh process for the traces of recipes, since the device has to be there before torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_simulation.roofline import (
    HOST_CALL_SECONDS,
    HOST_VIEW_SECONDS,
    SimulatedDevice,
    simulated_device,
)
from hasten.errors import InputError

if TYPE_CHECKING:
    from hasten.recipe.schema import Recipe

SECONDS = 1800.0  # the process is given up after so long
LAST_WORDS = 300  # characters


@dataclass(frozen=True)
class RankTrace:
    """Counts of one step of a recipe on one rank.

    ``counts`` is indexed by quantity, part of the step, and name. The quantities are calls,
    launches, views, bytes, flops, seconds, syncs, copies and pageable. The name is the
    operator, or the line that waits. ``peak``, ``between_steps`` (bytes of live tensors),
    ``tokens`` and ``model_flops`` have no part and no name.
    """

    device: str
    current_device: str
    meeting: Mapping[str, str]  # what the rank asked of the process group
    plan: Sequence[str]
    layers: int
    passes: int
    tensors_on: Sequence[str]
    messages: Sequence[tuple[str, str, str, int]]  # operation, device, line, bytes
    counts: Mapping[tuple[str, str, str], float]

    def total(self, quantity: str, part: str | None = None) -> float:
        """Over all names, of one part of the step or of all."""
        return sum(
            value
            for (kind, step_part, _), value in self.counts.items()
            if kind == quantity and part in (None, step_part)
        )

    def by_name(self, quantity: str, *parts: str) -> dict[str, float]:
        """By operator or line, in these parts of the step; in all, where none is given."""
        totals: dict[str, float] = defaultdict(float)
        for (kind, step_part, name), value in self.counts.items():
            if kind == quantity and value and (not parts or step_part in parts):
                totals[name] += value
        return dict(totals)

    @property
    def device_seconds(self) -> float:
        return self.total("seconds")

    @property
    def host_seconds(self) -> float:
        """That Python needs to issue the step."""
        return HOST_CALL_SECONDS * self.total("calls") + HOST_VIEW_SECONDS * self.total("views")

    @property
    def peak_bytes(self) -> float:
        return self.total("peak")


@dataclass(frozen=True)
class SimulatedTrace:
    """A recipe's step on all of its ranks."""

    device: SimulatedDevice
    ranks: Sequence[RankTrace]

    @property
    def tokens(self) -> float:
        """Tokens of a step, all ranks together."""
        return self.ranks[0].total("tokens")

    @property
    def step_seconds(self) -> float:
        """The least, on the slowest rank; what travels between ranks isn't in it."""
        return max(max(r.device_seconds, r.host_seconds) for r in self.ranks)

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation, relative to the datasheet's rate for half formats."""
        flops = self.ranks[0].total("model_flops")
        return flops / self.step_seconds / self.device.peak / len(self.ranks)


def traces(
    recipes: Sequence[Recipe], device: str, full_model: bool = False
) -> list[SimulatedTrace | InputError]:
    """The traces of several recipes, made in one process.

    A recipe that can't be traced has an error in its position of the list.

    Args:
        full_model: trace full models and steps instead of a few layers and passes.

    Raises:
        InputError: no such device, or the process ended without an answer.
    """
    chip = simulated_device(device)
    request = {
        "device": device,
        "whole": full_model,
        "recipes": [recipe.model_dump(mode="json") for recipe in recipes],
    }
    command = [sys.executable, str(Path(__file__).with_name("worker.py"))]
    try:
        done = subprocess.run(
            command, input=json.dumps(request), capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        raise InputError(
            f"the step can't be traced by simulation: it took over {SECONDS:.0f} s"
        ) from None
    try:
        answers = json.loads(done.stdout)
    except ValueError:
        lines = done.stderr.strip().splitlines() or ["it said nothing"]
        raise InputError(
            f"the step can't be traced by simulation: the process that traces ended with code "
            f"{done.returncode}: {lines[-1][:LAST_WORDS]}"
        ) from None
    return [_read(chip, answer) for answer in answers]


def _read(device: SimulatedDevice, answer: Mapping[str, Any]) -> SimulatedTrace | InputError:
    if "refused" in answer:
        return InputError(str(answer["refused"]))
    if "failed" in answer:
        return InputError(
            f"the step can't be traced by simulation: {answer['failed']}; on a GPU it may run all "
            "the same"
        )
    ranks = []
    for values in answer["ranks"]:
        counts = {(kind, part, name): value for kind, part, name, value in values["counts"]}
        messages = [tuple(message) for message in values["messages"]]
        ranks.append(RankTrace(**{**values, "counts": counts, "messages": messages}))
    return SimulatedTrace(device, ranks)
