"""Jobs on several ranks for the tests of guards; each returns plain JSON values."""

from __future__ import annotations

import datetime
import math
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hasten.core.health import ReplicasDifferError, StepChecks
from hasten.core.job import GlobalBatch, ShuffledOrder
from hasten.core.setup import Session
from hasten.core.step import training
from hasten.machine.environment import World
from hasten.parts.comm.groups import MeshSizes
from hasten.parts.nn.losses import WholeLogitsLoss
from hasten.techniques.layout.ddp import DDP
from tiny import examples, language_job, session_of
from told import json_lines

STEPS = 6


class BreaksOn(nn.Module):
    """The usual loss; NaN on one rank in one call."""

    def __init__(self, model: nn.Module, breaks: bool) -> None:
        super().__init__()
        self.inner, self.breaks, self.count = WholeLogitsLoss(model), breaks, 0

    def forward(self, **inputs: Any) -> tuple[Tensor, Tensor]:
        self.count += 1
        loss, labels = self.inner(**inputs)
        return (loss * math.nan if self.breaks and self.count == 3 else loss), labels


def session_on(world: World, breaks: bool = False) -> Session:
    job = language_job(steps=STEPS, data=examples(40), loss=lambda m: BreaksOn(m, breaks))
    return session_of(job, DDP(), world=world)


def flip(session: Session) -> None:
    """One bit of one weight of this rank; one of the lowest might be rounded away by an update."""
    model: Any = session.model
    weights = model.lm_head.weight.detach().view(torch.int32)
    weights[3, 4] ^= 1 << 22


def shared_file(world: World) -> Path:
    """The same new file name on all ranks."""
    names = [tempfile.mkdtemp() if world.is_main else ""]
    dist.broadcast_object_list(names)
    return Path(names[0]) / "quarantined.jsonl"


def verified(world: World) -> dict[str, Any]:
    """NaN on rank 1 in step 3; then a bit flipped on rank 1 after step 3."""
    path = shared_file(world)
    session = session_on(world, breaks=world.rank == 1)
    session.setup.step_checks = StepChecks(quarantine=path, replicas_every=1)
    steps = list(training(session))
    dist.barrier()
    job = session.setup.job
    order = ShuffledOrder([r.length for r in job.examples], GlobalBatch(8), job.seed).steps(0)
    model: Any = session.model
    return {
        "skipped": [m.skipped for m in steps],
        "finite": all(bool(torch.isfinite(p).all()) for p in session.model.parameters()),
        "weights": model.lm_head.weight[:3, :3].tolist(),
        "quarantined": json_lines(path),
        "step three": sorted(list(order)[2]),
        "flipped": _words_after_a_flip(world, 1),
    }


def _words_after_a_flip(world: World, rank: int) -> str:
    session = session_on(world)
    session.setup.step_checks = StepChecks(replicas_every=2)
    try:
        for metrics in training(session):
            if metrics.step == 3 and world.rank == rank:
                flip(session)
    except ReplicasDifferError as error:
        return str(error)
    return "nothing was seen"


def waits_for_one_that_hangs(world: World) -> dict[str, Any]:
    """Rank 1 sleeps until rank 0 has said what it has to say, and how soon (its limit is 1 s).

    Then rank 1 leaves, and rank 0 begins to form the groups of a mesh.
    """
    from hasten.launch import ranks
    from hasten.launch.ranks import LinkError, naming_ranks

    ranks.ANSWER_SECONDS = 1.0
    group = dist.new_group()  # to meet may take longer
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=1), group)
    told = Path(os.environ["HASTEN_RENDEZVOUS"]).with_name("told")
    began = time.monotonic()
    if world.rank == 1:
        with naming_ranks(world):
            while not told.exists() and time.monotonic() < began + 120:
                time.sleep(0.02)
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        return {}
    found: dict[str, Any] = {}
    try:
        with naming_ranks(world):
            dist.all_reduce(torch.zeros(1), group=group)
    except LinkError as error:
        found = {"words": str(error), "code": error.code, "seconds": time.monotonic() - began}
    told.touch()
    try:
        MeshSizes(dp=2).build("cpu")
    except RuntimeError as error:
        found["of a mesh"] = str(error)
    return found
