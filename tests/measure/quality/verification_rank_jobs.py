"""Proofs that tests make on several ranks; each returns plain JSON values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hasten.core.plan import Plan
from hasten.core.technique import Technique
from hasten.machine import environment
from hasten.machine.environment import World
from hasten.measure.worker import QualityJob
from hasten.techniques.batch import GradientAccumulation
from hasten.techniques.collate import Packed
from hasten.techniques.communication.compress import Half
from hasten.techniques.communication.local import LocalSteps
from hasten.techniques.layout.fsdp import FSDP2
from hasten.techniques.layout.pipeline import Pipeline
from hasten.techniques.layout.tensor import TensorParallel
from hasten.techniques.loss import LabelledTokenLoss
from measure.quality.verify_plants import Louder, Unscaled, bench

HONEST = (Packed(), GradientAccumulation(micro_batch_size=3), LabelledTokenLoss())
GRADIENTS: dict[str, tuple[tuple[Technique, ...], str, bool]] = {  # plan, cut, padded
    "planned": (HONEST, "planned", False),
    "whole": (HONEST, "whole", False),
    "single": (HONEST, "single", False),
    "padded": (HONEST, "whole", True),
    "sharded": ((Packed(), FSDP2()), "planned", False),
    "cut layers": ((Packed(), TensorParallel()), "planned", False),
    "stages": ((Packed(), Pipeline()), "planned", False),
    "rounded": ((Packed(), Half(minimum=0)), "planned", False),
    "unscaled": ((Packed(), Unscaled()), "planned", False),
    "louder": ((Packed(), Louder()), "planned", False),
}


def proofs(world: World) -> dict[str, Any]:
    """Every kind of order; the reference lies in the folder already."""
    place = environment.variable("HASTEN_RENDEZVOUS")
    assert place is not None
    job = QualityJob(bench(Path(place).parent, world=world), alone=False)

    def asked(do: str, *techniques: Technique, **details: Any) -> dict[str, Any]:
        details.setdefault("step", 3 if do == "gradient" else 1)
        return job.handle(do, {"plan": Plan(techniques).to_list(), **details})

    found = {
        name: asked("gradient", *plan, cut=cut, padded=padded)
        for name, (plan, cut, padded) in GRADIENTS.items()
    }
    found["leak"] = asked("leak", Packed())
    found["losses"] = asked("losses", Packed(), steps=2)
    found["again"] = asked("losses", Packed(), steps=2)
    found["train"] = asked("train", Packed(), seed=1, tokens=600)
    found["apart"] = asked("train", Packed(), LocalSteps(every=2), seed=1, tokens=600)
    return found
