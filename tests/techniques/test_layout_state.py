"""A checkpoint of pieces or of experts is that of one process, whatever wrote it.

All layouts without further techniques are in test_resume_matrix.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from hasten.core.setup import Session
from hasten.core.technique import Technique
from hasten.machine.environment import World
from hasten.techniques.layout.fsdp import FSDP2
from hasten.techniques.loss import LabelledTokenLoss
from hasten.techniques.optimizer import CompactAdamW, FusedAdamW
from hasten.techniques.precision import BF16MasterWeights
from ranks import on_ranks, once_on_ranks
from techniques.expert_checkpoint_jobs import (
    ALL,
    FIRST,
    PLANS,
    Make,
    all_checkpoints,
    going_on,
    resumed,
    shared_folder,
    trained,
)
from tiny import examples, language_job, tiny_model
from told import refusal

Case = tuple[str, tuple[Technique, ...], Technique]  # model, plan, layout
CASES: dict[str, Case] = {
    "fsdp2": ("llama", (), FSDP2()),
    "fsdp2, fused": ("deepseek_v3", (LabelledTokenLoss(), FusedAdamW()), FSDP2()),
    "fsdp2, tied": ("tied", (), FSDP2()),
}
LONG = ("fsdp2", "fsdp2, tied")  # the others have it; tied pieces train in test_layout_sharded


def built(architecture: str) -> nn.Module:
    return tiny_model(tied=True) if architecture == "tied" else tiny_model(architecture)


def session_on(
    world: World,
    architecture: str,
    plan: tuple[Technique, ...],
    layout: Technique,
    steps: int,
    folder: Path | None,
) -> Session:
    job = language_job(
        lambda: built(architecture), data=examples(24), batch=4, steps=steps, lr=1e-3
    )
    known = "llama" if architecture == "tied" else architecture
    return going_on(world, job, (*plan, layout), folder, known)


def maker(case: Case) -> Make:
    return lambda world, steps, folder, other: session_on(world, *case, steps, folder)


def refused(world: World) -> list[str]:
    """What can't be part of such a checkpoint, or can't be gone on from."""
    folder, masters = shared_folder(), (BF16MasterWeights(),)
    said = refusal(session_on, world, "llama", (CompactAdamW(),), FSDP2(), FIRST, folder)
    if world.is_main:
        trained(session_on(World(), "llama", masters, FSDP2(), FIRST, folder))
    dist.barrier()
    return [said, refusal(session_on, world, "llama", masters, FSDP2(), ALL, folder)]


def on_two(world: World) -> dict[str, Any]:
    makers = {name: maker(case) for name, case in CASES.items() if name not in LONG}
    return {"resumed": resumed(world, makers, straight_on=World()), "refused": refused(world)}


def on_two_long(world: World) -> dict[str, Any]:
    makers = {name: maker(CASES[name]) for name in LONG}
    return {"resumed": resumed(world, makers, straight_on=World())}


WITHIN = 5e-6  # float32, a step of AdamW after three


found = once_on_ranks(on_two)


def check(resumed: dict[str, Any], names: Any) -> None:
    for name in names:
        for way in ("ranks to ranks", "one to ranks", "ranks to one"):
            case = resumed[f"{name}: {way}"]
            assert case["weights"] < WITHIN, (name, way)
            assert case["losses"] < WITHIN, (name, way)


@pytest.mark.slow
def test_a_run_goes_on_with_pieces_and_without(found: list[Any]) -> None:
    """A vocabulary of 97 on two ranks: pieces aren't of equal size."""
    check(found[0]["resumed"], [name for name in CASES if name not in LONG])


@pytest.mark.long
def test_a_run_goes_on_with_plain_pieces(tmp_path: Path) -> None:
    check(on_ranks(on_two_long, tmp_path)[0]["resumed"], LONG)


def test_what_does_not_fit_together_is_refused_on_every_rank(found: list[Any]) -> None:
    for rank in found:
        moments, masters = rank["refused"]
        assert moments.startswith("checkpoints: compact_adamw keeps moments in blocks of its own")
        assert "21 master weights and the plan's precision keeps 0" in masters


of_experts = once_on_ranks(all_checkpoints)


def test_a_run_goes_on_from_its_checkpoint_as_if_it_had_never_stopped(
    of_experts: list[Any],
) -> None:
    for name in PLANS:
        case = of_experts[0]["resumed"][f"{name}: ranks to ranks"]
        assert case == {"steps": ALL - FIRST, "weights": 0.0, "losses": 0.0, "biases": True}, name


@pytest.mark.parametrize("way", ["one to ranks", "ranks to one"])
def test_a_checkpoint_of_ranks_is_one_of_a_single_process(of_experts: list[Any], way: str) -> None:
    for name in PLANS:
        case = of_experts[0]["resumed"][f"{name}: {way}"]
        within = 0.01 if name == "bf16 masters" else 1e-5
        assert case["steps"] == ALL - FIRST
        assert case["weights"] < within
        assert case["losses"] < within
        assert case["biases"]


def test_what_a_checkpoint_of_parts_cannot_hold_is_said_before_training(
    of_experts: list[Any],
) -> None:
    [optimizer] = of_experts[0]["refused"]
    assert optimizer.startswith("checkpoints: compact_adamw keeps moments in blocks of its own")
    assert of_experts[1]["refused"] == of_experts[0]["refused"]
