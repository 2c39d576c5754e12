"""Whole runs on shards with compressed gradients: what learns, resumes, is skipped and refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hasten.core.setup import Session
from hasten.core.technique import Technique
from hasten.machine.environment import World
from hasten.techniques.adapter import LoRA
from hasten.techniques.batch import GradientAccumulation
from hasten.techniques.communication.compress import Half, PowerSGD, Quantised, TopK
from hasten.techniques.communication.local import LocalSteps
from hasten.techniques.layout.ddp import DDP
from hasten.techniques.layout.fsdp import FSDP2
from hasten.techniques.layout.hybrid import Hybrid
from hasten.techniques.layout.tensor import TensorParallel
from hasten.techniques.precision import BF16MasterWeights
from ranks import on_ranks, once_on_ranks
from tiny import examples, language_job, restore, run, session_of, state_of_all_ranks, tiny_model
from told import refusal

HALF = Half(minimum=0, check_every=1)
INT8 = Quantised(minimum=0, check_every=1)
INT4 = Quantised(bits=4, minimum=0, check_every=1)
BETWEEN = Quantised(minimum=0, check_every=1, scope="hosts")


def session(
    world: World,
    *techniques: Technique,
    layout: Technique | None = None,
    architecture: str = "llama",
    steps: int = 4,
) -> Session:
    job = language_job(lambda: tiny_model(architecture), data=examples(16), steps=steps)
    return session_of(job, layout or FSDP2(), *techniques, architecture=architecture, world=world)


def seen(found: Session, communication: Technique) -> dict[str, Any]:
    metrics = run(found)
    proof = communication.check_effect(found)
    exchange = found.setup.communication.shards  # type: ignore[attr-defined]
    return {
        "sent": [m.comm_bytes for m in metrics],
        "sent in all": exchange.sent_bytes,
        "a pass or step": exchange.predicted(),
        "exposed": [m.exposed_comm_seconds for m in metrics],
        "losses": [m.loss for m in metrics],
        "norms": [m.grad_norm for m in metrics],
        "skipped": sum(m.skipped for m in metrics),
        "effective": proof.effective,
        "said": proof.evidence,
        "held norms": sum(_sum(p) for n, p in found.module.named_parameters() if "norm" in n),
    }


def _sum(parameter: Tensor) -> float:
    """Of what this rank holds of it."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return float(local.detach().double().sum())


COMMUNICATIONS: tuple[Technique, ...] = (HALF, INT8, INT4, TopK(minimum=0, dense_share=0.0))
EACH = GradientAccumulation(micro_batch_size=2)
BESIDE: dict[str, tuple[Technique, tuple[Technique, ...]]] = {
    "accumulated": (FSDP2(), (EACH,)),
    "whole gradients": (FSDP2(whole_gradients=True), (EACH,)),
    "bf16": (FSDP2(), (BF16MasterWeights(),)),
    "adapters": (FSDP2(), (LoRA(),)),
}


def runs(world: World) -> dict[str, Any]:
    found = {
        str(communication): seen(session(world, communication), communication)
        for communication in COMMUNICATIONS
    }
    for name, (layout, others) in BESIDE.items():
        found[name] = seen(session(world, INT8, *others, layout=layout), INT8)
    found["experts"] = seen(session(world, INT8, architecture="deepseek_v3"), INT8)
    plain = run(session(world))
    found["plain"] = {"losses": [m.loss for m in plain], "sent": [m.comm_bytes for m in plain]}
    dense = Quantised(minimum=0, dense_share=1.0)
    found["dense"] = seen(session(world, dense), dense)
    return found


def resumed(
    world: World,
    communication: Technique,
    before: Technique,
    after: Technique,
    whole: list[float] | None = None,
) -> dict[str, Any]:
    """Saved after 3 of 4 steps under one layout, read back by a fresh session under another.

    ``whole``: losses of a run under the second that never ended.
    """
    whole = whole or [m.loss for m in run(session(world, communication, layout=after))]
    first = session(world, communication, layout=before, steps=3)
    run(first)
    saved = state_of_all_ranks(first)
    again = session(world, communication, layout=after)
    restore(again, *saved)
    return {
        "own memory": _same(_memory(first), _memory(again)),
        "ranks": len(saved[1]["ranks"]),
        "rest": [m.loss for m in run(again)],
        "whole": whole[3:],
    }


def _memory(found: Session) -> dict[str, Tensor]:
    communication: Any = found.setup.communication
    travel = (
        communication.shards.state()
        if communication.shards
        else communication.compressor.state_dict()["travel"]
    )
    kept: dict[str, Tensor] = travel["residual"]
    return kept


def _same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether the same is remembered of the same weights, and something."""
    alike = one.keys() == other.keys()
    return alike and len(one) > 0 and all(torch.equal(one[k], other[k]) for k in one)


def merged(world: World) -> dict[str, Any]:
    """The memory of three ranks, read by two: the mean is kept. Of other shapes: left behind."""
    found = session(world, INT4, steps=3)
    run(found)
    held: Any = found.setup.communication
    mine = held.shards.state()
    name = next(iter(mine["residual"]))
    filled = torch.full_like
    states = [
        {
            "technique": "quantised",
            "memory": {
                "travel": {**mine, "residual": {name: filled(mine["residual"][name], value)}}
            },
        }
        for value in (1.0, 2.0, 6.0)
    ]
    held.load_state_dict(states)
    mean = float(held.shards.state()["residual"][name].mean())
    said = [INT4.check_effect(found).evidence]
    states[0]["memory"]["travel"]["residual"][name] = torch.ones(3)
    held.load_state_dict(states)
    said.append(INT4.check_effect(found).evidence)
    wrong = states[:1] * world.size
    return {"mean": mean, "said": [*said, refusal(held.load_state_dict, wrong)]}


def overflow(world: World) -> dict[str, Any]:
    """A gradient that is infinite on rank 1 in the third step."""
    found, passes = session(world, INT8), []
    model: Any = found.model

    def spoil(grad: Tensor) -> Tensor:
        passes.append(0)
        return grad * torch.inf if len(passes) == 3 and world.rank == 1 else grad

    def watch(module: nn.Module, given: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(spoil)

    model.model.layers[1].mlp.register_forward_hook(watch)
    return seen(found, INT8)


REFUSED: dict[str, tuple[Technique, Technique]] = {
    "matrices": (FSDP2(), PowerSGD()),
    "momentum": (FSDP2(), TopK(momentum=0.9)),
    "apart": (FSDP2(), LocalSteps()),
    "no host": (FSDP2(), BETWEEN),
    "same examples": (TensorParallel(), Half()),
}


def refused(world: World, cases: dict[str, tuple[Technique, Technique]]) -> dict[str, str]:
    return {
        name: refusal(session, world, communication, layout=layout)
        for name, (layout, communication) in cases.items()
    }


def on_two(world: World) -> dict[str, Any]:
    found = runs(world)
    whole = found[str(INT4)]["losses"]
    return {
        "runs": found,
        "resumed": resumed(world, INT4, FSDP2(), FSDP2(), whole),
        "from copies of the whole": resumed(world, INT4, DDP(), FSDP2(), whole),
        "merged": merged(world),
        "overflow": overflow(world),
        "refused": refused(world, REFUSED),
    }


COPIES: dict[str, tuple[Technique, Technique]] = {
    "pieces": (FSDP2(replicas=2), BETWEEN),
    "cut layers": (Hybrid(dp=2, tp=2), HALF),
    "pieces of cut layers": (Hybrid(shard=2, tp=2), HALF),  # of both
}
CUT = ("cut layers", "pieces of cut layers")  # which exchange as copies do that are whole


def copies(world: World, name: str) -> dict[str, Any]:
    layout, communication = COPIES[name]
    found = seen(session(world, communication, EACH, layout=layout, steps=3), communication)
    plain = run(session(world, EACH, layout=layout, steps=3))
    return found | {"plain": [m.loss for m in plain]}


def on_four(world: World) -> dict[str, Any]:
    """Copies of pieces."""
    found: dict[str, Any] = {"pieces": copies(world, "pieces")}
    pieces = FSDP2(replicas=2)
    found["resumed"] = resumed(world, BETWEEN, pieces, pieces)
    cases = {"everywhere": (pieces, INT8), "blocks": (Hybrid(dp=2, tp=2), INT8)}
    found["refused"] = refused(world, cases)
    return found


def on_four_long(world: World) -> dict[str, Any]:
    return {name: copies(world, name) for name in CUT}


found = once_on_ranks(on_two)
four = once_on_ranks(on_four, 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*map(str, COMMUNICATIONS), *BESIDE, "experts"])
def test_a_run_on_shards_acts_and_learns(found: list[Any], name: str) -> None:
    one, two = (rank["runs"][name] for rank in found)
    assert one["losses"] == two["losses"]
    assert one["norms"] == two["norms"]
    assert one["effective"], one["said"]
    assert "bytes sent by this rank" in one["said"]
    assert one["losses"][-1] < one["losses"][0]


@pytest.mark.parametrize(("place", "bound"), [(0, 2e-3), (1, 0.02), (2, 0.1), (3, 0.5)])
def test_losses_stay_near_those_of_full_gradients(
    found: list[Any], place: int, bound: float
) -> None:
    plain = found[0]["runs"]["plain"]["losses"]
    losses = found[0]["runs"][str(COMMUNICATIONS[place])]["losses"]
    assert losses[0] == plain[0]
    assert losses == pytest.approx(plain, rel=bound)
    assert losses != plain


@pytest.mark.slow
def test_bytes_of_each_step_are_those_of_its_passes(found: list[Any], four: list[Any]) -> None:
    """A step sends what a pass does, or its passes together; how long it took isn't known."""
    for rank in found:
        runs = rank["runs"]
        for name, case in runs.items():
            assert sum(case["sent"]) == case["sent in all"] if name != "plain" else True
        assert set(runs["plain"]["sent"]) == {None}
        assert set(runs[str(COMMUNICATIONS[0])]["sent"]) == {
            runs[str(COMMUNICATIONS[0])]["a pass or step"]
        }
        assert set(runs["accumulated"]["exposed"]) == {None}
    for rank in four:
        case = rank["pieces"]
        assert sum(case["sent"]) == case["sent in all"]
        assert case["sent"][-1] == case["a pass or step"]  # past the dense start


def test_a_start_that_never_ends_is_the_plain_layout(found: list[Any]) -> None:
    runs = found[0]["runs"]
    assert runs["dense"]["losses"] == runs["plain"]["losses"]
    assert not runs["dense"]["effective"]


@pytest.mark.parametrize("way", ["resumed", "from copies of the whole"])
def test_a_checkpoint_has_the_memory_of_each_rank(found: list[Any], way: str) -> None:
    """What DDP's exchange remembers is of the same weights, so that a run may change over."""
    for rank in found:
        seen = rank[way]
        assert seen["own memory"]
        assert seen["ranks"] == 2
        assert seen["rest"] == pytest.approx(seen["whole"], rel=0.02)


def test_another_number_of_ranks_goes_on_with_the_mean(found: list[Any]) -> None:
    for rank in found:
        assert rank["merged"]["mean"] == 3.0
        mean, left, wrong = rank["merged"]["said"]
        assert "mean of 3 ranks" in mean
        assert "the memory of 3 ranks was left behind" in left
        assert "remembers 3 numbers" in wrong
        assert "resume with the plan that wrote it" in wrong


def test_a_step_that_is_infinite_on_one_rank_is_skipped_by_all(found: list[Any]) -> None:
    one, two = (rank["overflow"] for rank in found)
    assert one["skipped"] == two["skipped"] == 1
    assert one["losses"] == two["losses"]
    assert one["losses"][-1] < one["losses"][0]


def test_copies_exchange_small_gradients_and_stay_alike(four: list[Any]) -> None:
    check_copies(four, "pieces")


@pytest.mark.long
def test_copies_of_cut_layers_do_so_too(tmp_path: Path) -> None:
    found = on_ranks(on_four_long, tmp_path, 4)
    for name in CUT:
        check_copies(found, name)


def check_copies(four: list[Any], name: str) -> None:
    """Their weights are compared after each step."""
    for rank in four:
        seen = rank[name]
        assert seen["effective"], seen["said"]
        assert ("to other copies" in seen["said"]) == (name != "pieces of cut layers")
        assert seen["losses"] == four[0][name]["losses"]
        assert seen["losses"][0] == pytest.approx(seen["plain"][0], rel=1e-6)
        assert seen["losses"] == pytest.approx(seen["plain"], rel=0.02)
    held = [rank[name]["held norms"] for rank in four]
    if name != "pieces":  # ranks that share a layer hold its norms whole
        assert held[0] == held[1]
        assert held[2] == held[3]


def test_copies_go_on_with_the_memory_of_their_shards(four: list[Any]) -> None:
    for rank in four:
        assert rank["resumed"]["own memory"]
        assert rank["resumed"]["rest"] == pytest.approx(rank["resumed"]["whole"], rel=0.02)


WORDS = {
    "matrices": "powersgd needs whole gradients",
    "momentum": "momentum correction needs whole gradients",
    "apart": "take half, quantised or topk",
    "no host": "has one copy of the model",
    "same examples": "no gradients travel between ranks",
}


def test_what_cannot_enter_is_refused_in_one_sentence(found: list[Any], four: list[Any]) -> None:
    for rank in found:
        assert set(rank["refused"]) == set(REFUSED)
        for name, words in WORDS.items():
            assert words in rank["refused"][name], name
            assert ". " not in rank["refused"][name]
    assert "set scope: hosts" in four[0]["refused"]["everywhere"]
    assert "take half as the communication" in four[0]["refused"]["blocks"]
