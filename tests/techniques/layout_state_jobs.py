"""Checkpoints of models in pieces: written under one layout, read under another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hasten.core.job import Stop
from hasten.core.plan import Plan
from hasten.core.session import Session, assemble
from hasten.core.setup import prepare
from hasten.core.technique import Technique
from hasten.errors import InputError
from hasten.machine.environment import World
from hasten.techniques.checkpoint import Checkpoints
from hasten.techniques.layout.fsdp import FSDP2
from hasten.techniques.layout.hybrid import Hybrid
from hasten.techniques.layout.tensor import TensorParallel
from hasten.techniques.loss import LabelledTokenLoss
from hasten.techniques.optimizer import CompactAdamW, FusedAdamW
from hasten.techniques.precision import BF16MasterWeights
from techniques.expert_checkpoint_jobs import ALL, FIRST, apart, shared_folder, trained
from tiny import examples, job_context, language_job, tiny_config, tiny_model

CASES: dict[str, tuple[str, tuple[Technique, ...], Technique]] = {
    "fsdp2": ("llama", (), FSDP2()),
    "fsdp2, fused": ("deepseek_v3", (LabelledTokenLoss(), FusedAdamW()), FSDP2()),
    "fsdp2, tied": ("tied", (), FSDP2()),
    "tensor parallel": ("llama", (), TensorParallel(size=2)),
}
ON_FOUR: dict[str, tuple[str, tuple[Technique, ...], Technique]] = {
    "fsdp2 in copies": ("llama", (), FSDP2(replicas=2)),
    "shards of pieces": ("llama", (), Hybrid(shard=2, tp=2)),
}


def built(architecture: str) -> nn.Module:
    """A tiny model; a tied one has a head and an embedding of the same weight."""
    if architecture != "tied":
        return tiny_model(architecture)
    import transformers as hf

    torch.manual_seed(0)
    config = tiny_config("llama")
    config.tie_word_embeddings = True
    model: nn.Module = hf.AutoModelForCausalLM.from_config(config)
    return model


def session_on(
    world: World,
    architecture: str,
    plan: tuple[Technique, ...],
    layout: Technique,
    steps: int,
    folder: Path | None,
) -> Session:
    job = language_job(
        lambda: built(architecture), data=examples(24), batch=4, stop=Stop(steps=steps), lr=1e-3
    )
    kept = () if folder is None else (Checkpoints(interval=FIRST),)
    own = (layout,) if world.size > 1 else ()
    context = job_context(job, "llama" if architecture == "tied" else architecture, world)
    session = assemble(prepare(job, Plan((*plan, *kept, *own)), context, folder))
    if folder is not None:
        session.setup.checkpoint.resume(session)
    return session


def resumed(world: World, cases: Any) -> dict[str, Any]:
    """Four steps in one process, beside three and one on either side."""
    found: dict[str, Any] = {}
    for name, case in cases.items():
        straight = trained(session_on(World(), *case, ALL, None)) if world.is_main else None
        of_ranks, of_one = shared_folder(), shared_folder()
        trained(session_on(world, *case, FIRST, of_ranks))
        if world.is_main:
            trained(session_on(World(), *case, FIRST, of_one))
        dist.barrier()
        for source, folder in (("ranks", of_ranks), ("one", of_one)):
            here = trained(session_on(world, *case, ALL, folder))
            found[f"{name}: {source} to ranks"] = _beside(here, straight)
            dist.barrier()  # the folder is free
        if world.is_main:
            here = trained(session_on(World(), *case, ALL, of_ranks))
            found[f"{name}: ranks to one"] = _beside(here, straight)
        dist.barrier()
    return found


def _beside(here: dict[str, Any], straight: dict[str, Any] | None) -> dict[str, Any]:
    if straight is None:
        return {}
    losses = zip(here["losses"], straight["losses"][FIRST:], strict=True)
    return {
        "weights": apart(here["weights"], straight["weights"]),
        "losses": max(abs(a - b) for a, b in losses),
    }


def refused(world: World) -> list[str]:
    """What can't be part of such a checkpoint, or can't be gone on from."""
    said, folder = [], shared_folder()
    for plan in ((CompactAdamW(),),):
        try:
            session_on(world, "llama", plan, FSDP2(), FIRST, folder)
        except InputError as error:
            said.append(str(error))
    if world.is_main:
        trained(session_on(World(), "llama", (BF16MasterWeights(),), FSDP2(), FIRST, folder))
    dist.barrier()
    try:
        session_on(world, "llama", (BF16MasterWeights(),), FSDP2(), ALL, folder)
    except InputError as error:
        said.append(str(error))
    return said


def on_two(world: World) -> dict[str, Any]:
    return {"resumed": resumed(world, CASES), "refused": refused(world)}


def on_four(world: World) -> dict[str, Any]:
    return {"resumed": resumed(world, ON_FOUR)}
