"""A checkpoint of stages is that of one process: it is read as stages, as pieces, or by one."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hasten.core.setup import Session
from hasten.core.technique import Technique
from hasten.machine.environment import World
from hasten.techniques.communication.compress import Quantised
from hasten.techniques.layout.ddp import DDP
from hasten.techniques.layout.fsdp import FSDP2
from hasten.techniques.layout.pipeline import Pipeline
from hasten.techniques.optimizer import CompactAdamW, FusedAdamW, Muon
from hasten.techniques.precision import BF16MasterWeights
from hasten.techniques.routing import BalancedRouting
from pipeline_rank_jobs import language_model
from ranks import once_on_ranks
from techniques.expert_checkpoint_jobs import (
    ALL,
    FIRST,
    Make,
    beside,
    going_on,
    resumed,
    shared_folder,
    trained,
)
from tiny import examples, language_job
from told import refusal

Case = tuple[str, bool, tuple[Technique, ...], Technique]  # model, tied, plan, layout
CASES: dict[str, Case] = {
    "tied": ("qwen2", True, (FusedAdamW(),), Pipeline(schedule="zero_bubble")),
    "tied, masters": ("llama", True, (BF16MasterWeights(),), Pipeline()),
    "balanced experts in a v": (
        *("deepseek_v3", False, (BalancedRouting(speed=0.01), Muon())),
        Pipeline(schedule="zbv"),
    ),
}
# Masters of stages train in test_layout_pipeline.
LONG_ON_TWO = ("tied, masters",)
WIRED: Case = ("llama", True, (Quantised(minimum=1, check_every=1),), Pipeline(stages=2))


def session_on(
    world: World, case: Case, steps: int, folder: Path | None, layout: Technique | None = None
) -> Session:
    architecture, tied, plan, own = case

    def built() -> nn.Module:
        # Of uneven stages: two ranks have four of a v, else two.
        layers = 5 if own == Pipeline(schedule="zbv") else 3
        model: nn.Module = language_model(architecture, tied, layers).float()
        return model

    job = language_job(built, data=examples(24), batch=4, steps=steps, lr=1e-3)
    return going_on(world, job, (*plan, layout or own), folder, architecture)


def makers(names: Iterable[str], cases: dict[str, Case]) -> dict[str, Make]:
    def maker(case: Case) -> Make:
        return lambda world, steps, folder, other: session_on(world, case, steps, folder, other)

    return {name: maker(cases[name]) for name in names}


def refused(world: World) -> list[str]:
    """A state that can't be put together, and one of another model."""
    said = []
    case = ("llama", True, (CompactAdamW(),), Pipeline())
    deeper = ("qwen2", True, (), Pipeline())
    folder = shared_folder()
    trained(session_on(world, ("llama", True, (), Pipeline()), FIRST, folder))
    dist.barrier()
    for wrong in (case, deeper):
        said.append(refusal(session_on, world, wrong, ALL, folder))
        dist.barrier()
    return said


def wired(world: World) -> dict[str, Any]:
    """What a codec left out is there again after a resume; on another layout a run goes on too.

    Losses aren't the same bits: DDP lays its buckets anew after its first step, and codecs round by
    buckets.
    """
    straight = trained(session_on(world, WIRED, ALL, None))
    folder = shared_folder()
    first = session_on(world, WIRED, FIRST, folder)
    trained(first)
    dist.barrier()
    again = session_on(world, WIRED, ALL, folder)
    left = [_left_out(session) for session in (first, again)]
    found = beside(trained(again), straight)
    dist.barrier()
    other = trained(session_on(world, WIRED, ALL, folder, DDP()))
    alike = all(torch.equal(value, left[1][name]) for name, value in left[0].items())
    return {
        **found,
        "remembered": sum(float(value.abs().sum()) for value in left[0].values()),
        "alike": alike and left[0].keys() == left[1].keys(),
        "on_ddp": other["losses"][-1],
    }


def _left_out(session: Session) -> dict[str, torch.Tensor]:
    """What this rank remembers of its stage's gradients, by name."""
    communication: Any = session.setup.communication
    found: dict[str, torch.Tensor] = communication.compressor.state_dict()["travel"]["residual"]
    return {name: value.float().flatten().clone() for name, value in found.items()}


def on_two(world: World) -> dict[str, Any]:
    torch.manual_seed(0)
    usual = makers([name for name in CASES if name not in LONG_ON_TWO], CASES)
    return {"resumed": resumed(world, usual, world, FSDP2()), "refused": refused(world)}


def on_two_long(world: World) -> dict[str, Any]:
    torch.manual_seed(0)
    return {"resumed": resumed(world, makers(LONG_ON_TWO, CASES), world, FSDP2())}


def on_four(world: World) -> dict[str, Any]:
    return {"wired": wired(world)}


WITHIN = 2e-5  # float32, a step of AdamW after three
ROUGHER = {"tied, masters": 1e-2}  # bf16 on one side in another order


two = once_on_ranks(on_two)
two_long = once_on_ranks(on_two_long)
four = once_on_ranks(on_four, 4)


def check(resumed: dict[str, Any], name: str, way: str) -> None:
    case, within = resumed[f"{name}: {way}"], ROUGHER.get(name, WITHIN)
    assert case["steps"] == ALL - FIRST
    assert case["weights"] < within
    assert case["losses"] < within
    assert case["biases"]


EACH_ON_TWO = pytest.mark.parametrize(
    ("ranks", "name"),
    [("two", name) for name in CASES if name not in LONG_ON_TWO]
    + [pytest.param("two_long", name, marks=pytest.mark.long) for name in LONG_ON_TWO],
)


@pytest.mark.slow
@EACH_ON_TWO
def test_a_pipeline_goes_on_as_if_it_had_never_stopped(
    request: pytest.FixtureRequest, ranks: str, name: str
) -> None:
    case = request.getfixturevalue(ranks)[0]["resumed"][f"{name}: ranks to ranks"]
    assert case == {"steps": ALL - FIRST, "weights": 0.0, "losses": 0.0, "biases": True}


@pytest.mark.parametrize("way", ["one to ranks", "ranks to one"])
@EACH_ON_TWO
def test_its_checkpoint_is_one_of_a_single_process(
    request: pytest.FixtureRequest, ranks: str, name: str, way: str
) -> None:
    check(request.getfixturevalue(ranks)[0]["resumed"], name, way)


def test_another_layout_goes_on_from_it(two: list[Any]) -> None:
    check(two[0]["resumed"], "tied", "ranks to another layout")


@pytest.mark.long  # so it is in test_communication_sharded
def test_what_the_wire_left_out_is_remembered_after_a_resume(four: list[Any]) -> None:
    for rank in four:
        assert rank["wired"]["alike"]
        assert rank["wired"]["remembered"] > 0
    assert four[0]["wired"]["losses"] < 1e-3
    assert four[0]["wired"]["on_ddp"] > 0  # a rank goes on with what it knows of its own weights


def test_what_cannot_be_put_together_is_said_on_every_rank(two: list[Any]) -> None:
    for rank in two:
        moments, model = rank["refused"]
        assert moments.startswith("checkpoints: compact_adamw keeps moments in blocks of its own")
        assert model.startswith("the checkpoint is of another model")
