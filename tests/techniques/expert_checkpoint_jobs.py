"""Checkpoints that were written on some ranks and are read on others or on one; experts' own."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from hasten.core.job import Job
from hasten.core.setup import Session
from hasten.core.step import training
from hasten.core.technique import Technique
from hasten.machine.environment import World
from hasten.techniques.checkpoint import Checkpoints
from hasten.techniques.layout.experts import ExpertParallel
from hasten.techniques.optimizer import CompactAdamW, Muon
from hasten.techniques.precision import BF16MasterWeights
from hasten.techniques.routing import BalancedRouting
from techniques.expert_session_jobs import NORM
from tiny import examples, language_job, session_of, tiny_model
from told import refusal
from whole import whole_weights

FIRST, ALL = 3, 4  # gradients travel whole in the first two steps
PLANS: dict[str, tuple[Technique, ...]] = {
    "plain": (BalancedRouting(speed=0.01),),
    "muon": (Muon(),),
    "bf16 masters": (BF16MasterWeights(),),
}


def session_on(
    world: World, steps: int, folder: Path | None, plan: tuple[Technique, ...], size: int = 2
) -> Session:
    job = language_job(
        lambda: tiny_model("deepseek_v3"),
        data=examples(24),
        batch=4,
        steps=steps,
        lr=1e-3,
        max_grad_norm=NORM,
    )
    return going_on(world, job, (*plan, ExpertParallel(size=size)), folder, "deepseek_v3")


def going_on(
    world: World, job: Job, plan: Sequence[Technique], folder: Path | None, architecture: str
) -> Session:
    """A session of a plan that ends with a layout, for ranks; it goes on from the newest checkpoint
    in its folder, and writes after FIRST."""
    *others, layout = plan
    kept = () if folder is None else (Checkpoints(interval=FIRST),)
    own = (layout,) if world.size > 1 else ()
    session = session_of(
        job, *others, *kept, *own, architecture=architecture, folder=folder, world=world
    )
    if folder is not None:
        session.setup.checkpoint.resume(session)
    return session


def trained(session: Session) -> dict[str, Any]:
    losses = [m.loss for m in training(session)]
    session.finish()
    for _ in session.versions():  # the last one is the running mean, if there is one
        weights = whole_weights(session)
    moved = [w.tolist() for name, w in weights.items() if "correction_bias" in name]
    return {"losses": losses, "weights": weights, "biases": moved}


def apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max((float((w - other[n]).abs().max()) for n, w in one.items()), default=0.0)


def shared_folder() -> Path:
    names = [tempfile.mkdtemp()] if dist.get_rank() == 0 else [""]
    dist.broadcast_object_list(names)
    return Path(names[0])


# A session that goes on from the newest checkpoint of a folder to a step; by another layout, if any
Make = Callable[[World, int, Path | None, Technique | None], Session]


def resumed(
    world: World, makers: Mapping[str, Make], straight_on: World, other: Technique | None = None
) -> dict[str, Any]:
    """Four steps with a checkpoint after the third, from which the last is done again elsewhere:
    beside those four on ``straight_on``."""
    found: dict[str, Any] = {}
    for name, make in makers.items():
        of_ranks, of_one = shared_folder(), shared_folder()
        straight: dict[str, Any] | None = trained(make(world, ALL, of_ranks, None))
        if straight_on.size == 1:
            straight = None
        if world.is_main:
            alone = trained(make(World(), ALL, of_one, None))
            straight = straight or alone
        dist.barrier()
        ways: dict[str, tuple[Path, Technique | None]] = {
            "ranks to ranks": (of_ranks, None),
            "one to ranks": (of_one, None),
        }
        if other is not None and "experts" not in name and "masters" not in name:
            ways["ranks to another layout"] = (of_ranks, other)  # which can't take those
        for way, (folder, layout) in ways.items():
            found[f"{name}: {way}"] = beside(trained(make(world, ALL, folder, layout)), straight)
            dist.barrier()  # the folder is free
        if world.is_main:
            here = trained(make(World(), ALL, of_ranks, None))
            found[f"{name}: ranks to one"] = beside(here, straight)
        dist.barrier()
    return found


def beside(here: dict[str, Any], straight: dict[str, Any] | None) -> dict[str, Any]:
    if straight is None:
        return {}
    losses = zip(here["losses"], straight["losses"][FIRST:], strict=True)
    return {
        "steps": len(here["losses"]),
        "weights": apart(here["weights"], straight["weights"]),
        "losses": max(abs(a - b) for a, b in losses),
        "biases": here["biases"] == straight["biases"],
    }


def refused(world: World) -> list[str]:
    """What can't be part of a checkpoint of parts is said before the first step."""
    return [refusal(session_on, world, FIRST, shared_folder(), (CompactAdamW(),))]


def all_checkpoints(world: World) -> dict[str, Any]:
    def maker(plan: tuple[Technique, ...]) -> Make:
        return lambda world, steps, folder, other: session_on(world, steps, folder, plan)

    makers = {name: maker(plan) for name, plan in PLANS.items()}
    found = {"refused": refused(world)}
    return {"resumed": resumed(world, makers, straight_on=world), **found}
