"""Ranks with other examples or layers draw other masks of dropout, those with pieces equal ones.

A resumed run continues the same draws, whatever its layout.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hasten.core.setup import Session
from hasten.core.step import training
from hasten.core.technique import Technique
from hasten.machine.environment import World
from hasten.techniques.adapter import LoRA
from hasten.techniques.checkpoint import Checkpoints
from hasten.techniques.layout.ddp import DDP
from hasten.techniques.layout.pipeline import Pipeline
from hasten.techniques.layout.tensor import TensorParallel
from pipeline_rank_jobs import language_model
from ranks import once_on_ranks
from techniques.expert_checkpoint_jobs import shared_folder
from techniques.sharded_rank_jobs import even_examples
from tiny import language_job, session_of

LAYOUTS = {"pipeline": Pipeline(stages=2), "tensor parallel": TensorParallel(size=2), "ddp": DDP()}
pytestmark = pytest.mark.slow
PLAN = (LoRA(rank=4, targets="all-linear", dropout=0.3),)
LAYERS = 4


def session_on(
    world: World, layout: Technique | None, folder: Path | None = None, steps: int = 1
) -> Session:
    job = language_job(
        lambda: language_model("llama", layers=LAYERS).float(),
        data=even_examples(24),
        batch=4,
        steps=steps,
    )
    kept = () if folder is None else (Checkpoints(interval=1),)
    own = () if layout is None else (layout,)
    session = session_of(job, *PLAN, *kept, *own, folder=folder, world=world)
    if folder is not None:
        session.setup.checkpoint.resume(session)
    return session


def masks(session: Session) -> list[str]:
    """Which entries each dropout of a width that all layers share has dropped, in their order."""
    found: list[str] = []

    def keep(module: nn.Module, args: Any, output: Tensor) -> None:
        dropped = (output == 0).flatten()[:256]
        found.append("".join(map(str, dropped.int().tolist())))

    for module in session.loss_module.modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(keep)
    for _ in training(session):
        pass
    return found


def on_two(world: World) -> dict[str, Any]:
    drawn = {}
    for name, layout in LAYOUTS.items():
        session_on(world, layout)
        drawn[name] = torch.rand(4).tolist()
    found: dict[str, Any] = {"drawn": drawn, "masks": masks(session_on(world, LAYOUTS["pipeline"]))}
    found["plain"] = masks(session_on(World(), None))
    losses = [m.loss for m in training(session_on(world, LAYOUTS["pipeline"], steps=2))]
    folder = shared_folder()
    first = [m.loss for m in training(session_on(world, LAYOUTS["pipeline"], folder))]
    dist.barrier()
    second = [m.loss for m in training(session_on(world, LAYOUTS["pipeline"], folder, 2))]
    found["losses"] = losses, [*first, *second]
    found["resumed"] = {}
    for before, after in pairwise(["ddp", "tensor parallel", "ddp", "pipeline"]):
        folder = shared_folder()
        for _ in training(session_on(world, LAYOUTS[before], folder)):
            pass
        saved = torch.rand(4).tolist()
        dist.barrier()
        session_on(world, LAYOUTS[after], folder, 2)
        found["resumed"][f"{before} to {after}"] = saved, torch.rand(4).tolist()
    return found


ranks = once_on_ranks(on_two)


def test_stages_and_copies_draw_different_numbers_and_pieces_equal_ones(ranks: list[Any]) -> None:
    same = {name: ranks[0]["drawn"][name] == ranks[1]["drawn"][name] for name in LAYOUTS}
    assert same == {"pipeline": False, "tensor parallel": True, "ddp": False}


def test_a_pipeline_has_as_many_distinct_masks_as_one_process(ranks: list[Any]) -> None:
    plain = ranks[0]["plain"]
    on_stages = [*ranks[0]["masks"], *ranks[1]["masks"]]
    assert len(set(plain)) == len(plain) > LAYERS
    assert len(set(on_stages)) == len(on_stages) >= len(plain)


def test_a_resumed_pipeline_continues_the_draws_of_each_stage(ranks: list[Any]) -> None:
    for rank in ranks:
        straight, resumed = rank["losses"]
        assert resumed == straight


def test_after_a_resume_on_another_layout_draws_are_equal_where_layers_are_cut(
    ranks: list[Any],
) -> None:
    changes = [rank["resumed"] for rank in ranks]
    saved, drawn = zip(*(change["ddp to tensor parallel"] for change in changes), strict=True)
    assert drawn[0] == drawn[1] == saved[0]
    saved, drawn = zip(*(change["tensor parallel to ddp"] for change in changes), strict=True)
    assert drawn[0] == saved[0] != drawn[1]
    saved, drawn = zip(*(change["ddp to pipeline"] for change in changes), strict=True)
    assert drawn[0] == saved[0] != drawn[1]
