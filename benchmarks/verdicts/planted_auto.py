"""Techniques of known truth for ``plan: auto``: one slows, one does nothing, one gains.

Every variant's job waits a tenth of each step unless `Gains` is in its plan: so a gain can be
planted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hasten.core.setup import Session, Setup
from hasten.core.slot import Slot
from hasten.core.technique import EffectCheck, Fidelity, Technique
from hasten.measure.worker import Serve, recipe_job
from measure.planted_techniques import Waits

SLOWER, BURDEN = 0.25, 0.1  # of a step: 1 / 1.25 is 20 % slower, and 1.1 is gained without a tenth


class PlantedTechnique(Technique):
    """Same bits, whatever it does to the time."""

    @property
    def fidelity(self) -> Fidelity:
        return Fidelity.EXACT

    def apply(self, setup: Setup) -> None:
        return None

    def check_effect(self, session: Session) -> EffectCheck:
        return EffectCheck(True, f"was there for {session.progress.step} steps")


@dataclass(frozen=True)
class Sleeps(PlantedTechnique):
    """Sleeps for a quarter of what a step takes."""

    slot = Slot.FEED
    auto = "usual"

    def apply(self, setup: Setup) -> None:
        Waits(SLOWER).apply(setup)


@dataclass(frozen=True)
class Idles(PlantedTechnique):
    """Does nothing."""

    slot = Slot.ALLOCATOR
    auto = "usual"


@dataclass(frozen=True)
class Gains(PlantedTechnique):
    """Its plan is spared the burden."""

    slot = Slot.COLLATE
    auto = "try"


@dataclass(frozen=True)
class Burden(PlantedTechnique):
    """What a variant without `Gains` waits; no candidate."""

    slot = Slot.AVERAGE

    def apply(self, setup: Setup) -> None:
        Waits(BURDEN).apply(setup)


PLANTED = (Sleeps, Idles, Gains)


def job(arguments: Mapping[str, Any], serve: Serve) -> int:
    """A worker's training, with the burden where it belongs."""
    plan = list(arguments["plan"])
    spared = any(entry["technique"] == Gains.name() for entry in plan)
    given = {**arguments, "plan": plan if spared else [*plan, Burden().to_dict()]}
    return recipe_job(given, serve, more=(*PLANTED, Burden))
