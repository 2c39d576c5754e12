"""The contract of every communication on two ranks; those with a memory of their own, on four."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hasten.core.setup import Session
from hasten.core.state import state_of
from hasten.core.step import training
from hasten.core.technique import Technique
from hasten.machine.environment import World
from hasten.parts.comm import collectives
from hasten.techniques.adapter import LoRA
from hasten.techniques.batch import GradientAccumulation
from hasten.techniques.communication.compress import Half, PowerSGD, Quantised, TopK
from hasten.techniques.communication.local import LocalSteps, Stream
from hasten.techniques.communication.topology import Hierarchical
from hasten.techniques.layout.ddp import DDP
from hasten.techniques.precision import Autocast, BF16MasterWeights
from ranks import once_on_ranks
from tiny import examples, language_job, restore, run, session_of, state_of_all_ranks, tiny_model

COMMUNICATIONS: dict[str, Technique] = {
    "half": Half(minimum=0, check_every=1),
    "int8": Quantised(minimum=0, check_every=1),
    "int4": Quantised(bits=4, minimum=0, check_every=1),
    "topk": TopK(0.2, dense_share=0.0, minimum=0, check_every=1),
    "powersgd": PowerSGD(rank=4, dense_share=0.0, minimum=0, check_every=1),
    "hierarchical": Hierarchical(between="int4", topology="ethernet", check_every=1),
    "local_steps": LocalSteps(every=2),
    "stream": Stream(fragments=2),
}
ON_FOUR = ("int4", "topk", "powersgd", "hierarchical", "stream")
APART = ("local_steps", "stream")  # weights travel, each rank has its own steps
SPOILT = 3  # the pass of the last rank whose gradient is infinite


@dataclass(frozen=True)
class Case:
    """What stands beside the communication method."""

    beside: tuple[Technique, ...] = ()
    architecture: str = "llama"
    model: Callable[[str], nn.Module] = tiny_model
    steps: int = 4
    spoilt: bool = False


CASES = {
    "plain": Case(),
    "accumulated": Case((GradientAccumulation(micro_batch_size=1),)),
    "infinite": Case(spoilt=True),
    "overflow": Case((Autocast(dtype="fp16", initial_scale=2.0**22),), steps=8),
    "tied": Case(model=partial(tiny_model, tied=True)),
    "lora": Case((LoRA(),)),
    "bf16": Case((BF16MasterWeights(),)),
    "experts": Case(architecture="deepseek_v3"),
}


# Every communication takes a gradient that is infinite, and on two ranks some take others: what
# changes when gradients travel meets one with a memory and one without, the rest one. The rest of
# the product is run by `make test-long`.
USUAL = {
    "half": ("infinite",),
    "int8": ("infinite", "accumulated"),
    "int4": ("infinite", "experts"),
    "topk": ("infinite", "lora", "overflow"),
    "powersgd": ("infinite", "bf16"),
    "hierarchical": ("infinite",),
    "local_steps": ("infinite", "accumulated", "overflow"),
    "stream": ("infinite", "tied"),
}
NO_NORMS = ("infinite", "overflow")  # some aren't finite
REST = {name: tuple(case for case in CASES if case not in USUAL[name]) for name in COMMUNICATIONS}
ALL_ON_FOUR = dict.fromkeys(ON_FOUR, tuple(CASES))


def on_two(world: World) -> dict[str, Any]:
    return checked_contract(world, USUAL)


def rest_on_two(world: World) -> dict[str, Any]:
    return checked_contract(world, REST)


def on_four(world: World) -> dict[str, Any]:
    return checked_contract(world, ALL_ON_FOUR)


def checked_contract(world: World, cases_of: dict[str, tuple[str, ...]]) -> dict[str, Any]:
    # Two hosts of as many ranks, or of one each.
    collectives.host_name = lambda: f"host-{world.rank % 2}"
    return {
        name: {case: seen(world, COMMUNICATIONS[name], CASES[case]) for case in cases}
        | ({} if cases_of is REST else {"resumed": resumed(world, COMMUNICATIONS[name])})
        for name, cases in cases_of.items()
    }


def session(
    world: World, communication: Technique, case: Case, steps: int | None = None
) -> Session:
    job = language_job(
        lambda: case.model(case.architecture), data=examples(16), steps=steps or case.steps
    )
    return session_of(
        job, DDP(), communication, *case.beside, architecture=case.architecture, world=world
    )


def seen(world: World, communication: Technique, case: Case) -> dict[str, Any]:
    """A run: its losses, whether the communication method effective, and all weights at the end."""
    found = session(world, communication, case)
    if case.spoilt and world.rank == world.size - 1:
        spoil(found)
    metrics = run(found)
    found.synchronize()
    proof = communication.check_effect(found)
    return {
        "losses": [m.loss for m in metrics],
        "norms": [m.grad_norm for m in metrics],
        "skipped": sum(m.skipped for m in metrics),
        "weights": weights(found),
        "effective": proof.effective,
        "said": proof.evidence,
    }


def spoil(found: Session) -> None:
    weight = next(p for p in found.loss_module.parameters() if p.requires_grad)
    passes: list[int] = []

    def hook(grad: Tensor) -> Tensor:
        passes.append(0)
        return grad * torch.inf if len(passes) == SPOILT else grad

    weight.register_hook(hook)


def weights(found: Session) -> list[float]:
    """Numbers that tell whether two ranks have the same weights, and whether these are any."""
    flat = torch.cat([p.detach().flatten().double() for p in found.loss_module.parameters()])
    sums = [float(flat.sum()), float(flat.abs().sum()), float(flat[::7].sum())]
    return [s if math.isfinite(s) else -1.0 for s in sums]


def resumed(world: World, communication: Technique) -> dict[str, Any]:
    """The last of four steps, done again in a fresh session from what rank 0 wrote after three:
    what each rank remembered, and that step, beside a run that never ended."""
    steps = training(first := session(world, communication, Case()))
    for _ in range(3):
        next(steps)
    mine, saved = copy.deepcopy(state_of(first)), state_of_all_ranks(first)
    whole = [m.loss for m in steps]
    again = session(world, communication, Case())
    restore(again, *saved)
    before, after = mine[0], state_of(again)[0]
    same = before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in before)
    rest = [m.loss for m in run(again)]
    again.synchronize()
    return {
        "same": same,
        "remembered": sum("slot/communication" in name for name in before),
        "whole": whole,
        "rest": rest,
        "weights": weights(again),
    }


RANKS = {"two": USUAL, "rest": REST, "four": ALL_ON_FOUR}
every = [
    pytest.param(
        ranks, name, id=f"{ranks}-{name}", marks=[] if ranks == "two" else pytest.mark.long
    )
    for ranks in ("two", "four")
    for name in RANKS[ranks]
]
every_case = [
    pytest.param(
        *(ranks, name, case),
        id=f"{ranks}-{name}-{case}",
        marks=[] if ranks == "two" else pytest.mark.long,
    )
    for ranks, cases_of in RANKS.items()
    for name, cases in cases_of.items()
    for case in cases
]
communications = pytest.mark.parametrize(("ranks", "communication"), every)
pytestmark = pytest.mark.slow


two = once_on_ranks(on_two)
rest = once_on_ranks(rest_on_two)
four = once_on_ranks(on_four, 4)


@pytest.fixture
def found(request: pytest.FixtureRequest, ranks: str) -> list[Any]:
    """What each rank saw; each run has the time of a test of its own."""
    seen: list[Any] = request.getfixturevalue(ranks)
    return seen


@pytest.mark.parametrize(("ranks", "communication", "case"), every_case)
def test_replicas_are_the_same_and_learn(found: list[Any], communication: str, case: str) -> None:
    seen = [rank[communication][case] for rank in found]
    assert all(s["weights"] == seen[0]["weights"] for s in seen)
    assert -1.0 not in seen[0]["weights"]
    if communication not in APART and case not in NO_NORMS:
        assert all(s["norms"] == seen[0]["norms"] for s in seen)
    for rank in seen:
        assert rank["effective"], rank["said"]
        assert all(map(math.isfinite, rank["losses"]))
    # An epoch is two steps, each of other examples.
    assert sum(sum(s["losses"][-2:]) for s in seen) < sum(sum(s["losses"][:2]) for s in seen)


@communications
def test_a_gradient_that_is_infinite_on_one_rank_costs_one_step(
    found: list[Any], communication: str
) -> None:
    skipped = [rank[communication]["infinite"]["skipped"] for rank in found]
    ranks = len(found)
    assert skipped == ([0] * (ranks - 1) + [1] if communication in APART else [1] * ranks)


@pytest.mark.parametrize(
    ("ranks", "communication"),
    [row for row in every if "overflow" in RANKS[str(row.values[0])][str(row.values[1])]],
)
def test_a_loss_scale_that_overflows_is_lowered_until_steps_count(
    found: list[Any], communication: str
) -> None:
    skipped = [rank[communication]["overflow"]["skipped"] for rank in found]
    assert all(0 < s < CASES["overflow"].steps for s in skipped)
    assert len(set(skipped)) == 1 or communication in APART


@communications
def test_a_run_that_ended_goes_on_with_what_each_rank_remembered(
    found: list[Any], communication: str
) -> None:
    for rank in found:
        seen = rank[communication]["resumed"]
        assert seen["same"]
        assert seen["rest"] == pytest.approx(
            seen["whole"], rel=0.1 if communication in APART else 0.05
        )
        assert seen["weights"] == found[0][communication]["resumed"]["weights"]
    owed = sum(rank[communication]["resumed"]["remembered"] for rank in found)
    assert (owed > 0) == (communication not in ("half", *APART))
