"""A checkpoint of any layout resumes in any other: the next losses are those of one process.

Everything is in float64, so that a difference isn't hidden by rounding. Dense models agree to
1e-12; a mixture of experts to 1e-6, since its router computes in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hasten.core.setup import Session
from hasten.core.step import training
from hasten.core.technique import Technique
from hasten.machine.environment import World
from hasten.techniques.checkpoint import Checkpoints
from hasten.techniques.layout.ddp import DDP
from hasten.techniques.layout.experts import ExpertParallel
from hasten.techniques.layout.fsdp import FSDP2
from hasten.techniques.layout.hybrid import Hybrid
from hasten.techniques.layout.pipeline import Pipeline
from pipeline_rank_jobs import language_model
from ranks import once_on_ranks
from techniques.expert_checkpoint_jobs import shared_folder
from tiny import examples, language_job, session_of

SAVED, STEPS = 2, 5
DENSE: dict[str, Technique] = {
    "ddp": DDP(),
    "fsdp2": FSDP2(),
    "copies of shards": FSDP2(replicas=2),
    "tp": Hybrid(dp=2, tp=2),
    "shard x tp": Hybrid(shard=2, tp=2),
    "pipelines": Pipeline(stages=2),
    "stages x shard": Hybrid(pp=2, shard=2),
    "stages x tp": Hybrid(pp=2, tp=2),
}
EXPERTS: dict[str, Technique] = {
    "ep": ExpertParallel(),
    "copies of ep": ExpertParallel(size=2),
    "shard x ep": Hybrid(shard=4, ep=2),
    "tp x ep": Hybrid(dp=2, tp=2, ep=2),
    "stages x ep": Hybrid(dp=2, pp=2, ep=2),
    "fsdp2 of experts": FSDP2(),
}
KINDS = {"llama": (DENSE, 1e-12), "deepseek_v3": (EXPERTS, 1e-6)}


def session_on(
    world: World, architecture: str, layout: Technique | None, folder: Path, every: int
) -> Session:
    def built() -> nn.Module:
        model: nn.Module = language_model(architecture, architecture == "llama", 3).double()
        return model

    job = language_job(built, data=examples(20), batch=4, steps=STEPS, lr=1e-3)
    plan = (Checkpoints(every), *((layout,) if layout is not None else ()))
    return session_of(job, *plan, architecture=architecture, folder=folder, world=world)


def losses(session: Session, steps: int = STEPS) -> list[float]:
    found = []
    taken = training(session)
    for metrics in taken:
        found.append(metrics.loss)
        if metrics.step == steps:
            break
    taken.close()
    session.setup.checkpoint.wait_for_writer()  # type: ignore[union-attr]
    return found


def one_after_the_other(world: World) -> dict[str, Any]:
    """Each layout goes on from the one before it, and one process from each of them."""
    torch.manual_seed(0)
    found: dict[str, Any] = {}
    for architecture, (layouts, _) in KINDS.items():
        straight = [0.0] * STEPS
        before = shared_folder()
        if world.is_main:
            one = session_on(World(), architecture, None, before, SAVED)
            straight = losses(one)
        dist.barrier()
        for name, layout in layouts.items():
            again = session_on(world, architecture, layout, before, STEPS + 1)
            again.setup.checkpoint.resume(again, before / f"step-{SAVED:08d}")
            rest = losses(again)
            own = shared_folder()
            first = losses(session_on(world, architecture, layout, own, SAVED), SAVED)
            dist.barrier()
            alone = straight[SAVED:]
            if world.is_main:
                single = session_on(World(), architecture, None, own, STEPS + 1)
                single.setup.checkpoint.resume(single)
                alone = losses(single)
            dist.barrier()
            found[name] = {
                "resumed": distance(rest, straight[SAVED:]),
                "first": distance(first, straight[:SAVED]),
                "alone": distance(alone, straight[SAVED:]),
                "steps": len(rest),
            }
            before = own
    return found


def distance(some: list[float], others: list[float]) -> float:
    return max(abs(a - b) / (abs(b) or 1.0) for a, b in zip(some, others, strict=True))


four = once_on_ranks(one_after_the_other, 4)


def cells() -> Iterator[Any]:
    for layouts, within in KINDS.values():
        for name in layouts:
            yield pytest.param(name, within, id=name)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "within"), cells())
def test_a_layout_goes_on_from_another_ones_checkpoint(
    four: list[Any], name: str, within: float
) -> None:
    case = four[0][name]
    assert case["steps"] == STEPS - SAVED
    assert case["resumed"] < within
    assert case["alone"] < within
