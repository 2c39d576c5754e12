"""Whole runs with compressed gradients; tests/contract/test_communication_contract has the rest."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hasten.core.layout import NoCompression
from hasten.core.setup import Session
from hasten.core.step import training
from hasten.core.technique import Technique
from hasten.core.timing import StepMetrics
from hasten.errors import InputError
from hasten.integrations.optimized_trainer import OptimizedTrainer
from hasten.machine.environment import World
from hasten.parts.comm import exchange
from hasten.parts.comm.gradient_compressor import GradientCompressor
from hasten.techniques.batch import AdaptiveBatch
from hasten.techniques.communication.compress import Half, PowerSGD, Quantised, TopK, technique_of
from hasten.techniques.communication.local import LocalSteps, Stream
from hasten.techniques.layout.ddp import DDP
from ranks import on_ranks, once_on_ranks
from tiny import examples, language_job, restore, run, session_of, state_of_all_ranks, tiny_model

COMMUNICATIONS: tuple[Technique, ...] = (
    Half(minimum=0, check_every=1),
    Quantised(bits=4, minimum=0, check_every=1),
    TopK(minimum=0, check_every=1),
)
INT8 = Quantised(minimum=0, check_every=1)


def session(
    world: World, *techniques: Technique, architecture: str = "llama", steps: int = 5
) -> Session:
    job = language_job(lambda: tiny_model(architecture), data=examples(16), steps=steps)
    return session_of(job, DDP(), *techniques, architecture=architecture, world=world)


def weights(found: Session) -> list[float]:
    """Three numbers that tell whether two ranks have the same weights."""
    flat = torch.cat([p.detach().flatten().double() for p in found.loss_module.parameters()])
    return [float(flat.sum()), float(flat.abs().sum()), float(flat[::7].sum())]


def seen(found: Session, communication: Technique) -> dict[str, Any]:
    return described(found, communication, run(found))


def described(
    found: Session, communication: Technique, metrics: list[StepMetrics]
) -> dict[str, Any]:
    proof = communication.check_effect(found)
    return {
        "losses": [m.loss for m in metrics],
        "norms": [m.grad_norm for m in metrics],
        "weights": weights(found),
        "effective": proof.effective,
        "said": proof.evidence,
    }


def runs(world: World) -> dict[str, Any]:
    found = {
        communication.name(): seen(session(world, communication), communication)
        for communication in COMMUNICATIONS
    }
    found["adaptive_batch"] = seen(session(world, INT8, AdaptiveBatch(initial_size=2)), INT8)
    found["plain"] = {"losses": [m.loss for m in run(session(world))]}
    return found


def merged(world: World) -> dict[str, Any]:
    """The memory of three ranks, read by two: the mean is kept."""
    communication = Quantised(bits=4, minimum=0)
    found = session(world, communication)
    run(found)
    held: Any = found.setup.communication
    mine = held.compressor.state_dict()
    name = next(iter(mine["travel"]["residual"]))
    shape = mine["travel"]["residual"][name]
    states = []
    for value in (1.0, 2.0, 6.0):
        travel = {**mine["travel"], "residual": {name: torch.full_like(shape, value)}}
        states.append({**mine, "travel": travel})
    held.load_state_dict([{"technique": "quantised", "memory": state} for state in states])
    after = held.compressor.state_dict()["travel"]["residual"][name]
    return {"mean": float(after.mean()), "said": communication.check_effect(found).evidence}


def between_hosts(world: World) -> dict[str, Any]:
    """Four ranks of two faked hosts: a run, its last step again, and a state of three ranks."""
    exchange.host_name = lambda: f"host-{world.rank // 2}"
    found: dict[str, Any] = {}
    for communication in (
        Quantised(bits=4, minimum=0, check_every=1, scope="hosts"),
        PowerSGD(rank=4, minimum=0, check_every=1, scope="hosts", dense_share=0.0),
    ):
        first = session(world, communication)
        steps = training(first)
        metrics = [next(steps) for _ in range(4)]
        held: Any = first.setup.communication
        saved, mine = state_of_all_ranks(first), copy.deepcopy(_memory(held))
        whole = described(first, communication, [*metrics, *steps])
        again = session(world, communication)
        restore(again, *saved)
        back: Any = again.setup.communication
        read = _memory(back)
        state = [{"technique": communication.name(), "memory": {}}] * 3
        whole["own memory"] = all(torch.equal(mine[k], read[k]) for k in mine)
        whole["owned"] = len(mine)  # the one bucket belongs to one rank of each host
        whole["rest"] = [m.loss for m in run(again)]
        back.load_state_dict(state)
        whole["other ranks"] = communication.check_effect(again).evidence
        found[communication.name()] = whole
    return found


def _memory(held: Any) -> dict[str, Tensor]:
    """What this rank's gradients were rounded by, for each bucket that is its own."""
    found: dict[str, Tensor] = held.compressor.state_dict()["travel"]["residual"]
    return found


def everything(world: World) -> dict[str, Any]:
    return {"runs": runs(world), "merged": merged(world), "trainer": trainer(world)}


def trainer(world: World) -> dict[str, Any]:
    """OptimizedTrainer with the switch, and with a compressor in its place."""
    from torch.utils.data import DataLoader, TensorDataset

    from hasten import GradientCompressor, OptimizedTrainer

    found: dict[str, Any] = {}
    part = GradientCompressor(0.1, "topk", "gloo", minimum=0)
    for name, switch in (("switch", True), ("part", part)):
        torch.manual_seed(world.rank)
        x = torch.randn(64, 80)
        loader = DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=16)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(80, 80), nn.ReLU(), nn.Linear(80, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        host = OptimizedTrainer(model, optimizer, nn.CrossEntropyLoss(), compress_gradients=switch)
        summary = host.train(loader, epochs=4)
        found[name] = {
            "switch": summary["switches"]["compress_gradients"],
            "losses": list(summary["epoch_losses"].values()),
            "sum": float(sum(p.detach().double().sum() for p in model.parameters())),
        }
    return found


found = once_on_ranks(everything)


def test_steps_that_are_cut_anew_act_learn_and_keep_replicas_alike(found: list[Any]) -> None:
    one, two = (rank["runs"]["adaptive_batch"] for rank in found)
    assert one["weights"] == two["weights"]
    assert one["effective"], one["said"]
    assert "bytes sent by this rank" in one["said"]
    assert one["losses"][-1] < one["losses"][0]


@pytest.mark.parametrize(("name", "bound"), [("half", 2e-3), ("quantised", 0.1), ("topk", 0.5)])
def test_the_first_losses_are_those_of_full_gradients(
    found: list[Any], name: str, bound: float
) -> None:
    plain = found[0]["runs"]["plain"]["losses"]
    losses = found[0]["runs"][name]["losses"]
    assert losses[:3] == pytest.approx(plain[:3], rel=1e-6)  # two steps under DDP go in full
    assert losses == pytest.approx(plain, rel=bound)


def test_another_number_of_ranks_goes_on_with_the_mean(found: list[Any]) -> None:
    for rank in found:
        assert rank["merged"]["mean"] == 3.0
        assert "mean of 3 ranks" in rank["merged"]["said"]


def test_between_hosts_a_run_learns_resumes_and_keeps_replicas_alike(tmp_path: Path) -> None:
    four = on_ranks(between_hosts, tmp_path, world=4)
    for name in ("quantised", "powersgd"):
        found = [rank[name] for rank in four]
        assert len({tuple(rank["weights"]) for rank in found}) == 1
        for rank in found:
            assert rank["effective"], rank["said"]
            assert "by its host to others" in rank["said"]
            assert rank["losses"][-1] < rank["losses"][0]
            assert rank["own memory"]
            assert (rank["owned"] > 0) == (rank in (found[0], found[2]))
            assert rank["rest"] == pytest.approx(rank["losses"][4:], rel=0.02)
            assert "the memory of 3 ranks was left behind" in rank["other ranks"]


@pytest.mark.parametrize(("name", "said"), [("switch", "quantised"), ("part", "topk(ratio=0.1")])
def test_the_optimized_trainer_compresses(found: list[Any], name: str, said: str) -> None:
    one, two = (rank["trainer"][name] for rank in found)
    assert one["switch"].startswith(said)
    assert one["sum"] == two["sum"]
    assert one["losses"][-1] < one["losses"][0]


def test_one_rank_has_the_plain_wire() -> None:
    for technique in (Half(), Quantised(), TopK(), PowerSGD()):
        session = session_of(language_job(), technique)
        assert isinstance(session.setup.communication, NoCompression)
        assert not technique.check_effect(session).effective


@pytest.mark.parametrize(
    ("method", "technique"),
    [
        ("half", Half("fp16")),
        ("bf16", Half()),
        ("int8", Quantised()),
        ("int4", Quantised(4)),
        ("topk", TopK(0.05, dense_share=0.0)),
        ("powersgd", PowerSGD(dense_share=0.0)),
        ("diloco", LocalSteps(every=20)),
        ("stream", Stream()),
    ],
)
def test_a_compressor_stands_for_its_technique(method: str, technique: Any) -> None:
    assert technique_of(GradientCompressor(0.05, method, "gloo")) == technique


def test_a_compressor_between_hosts_stands_for_one_too() -> None:
    compressor = GradientCompressor(0.1, "topk", "gloo", scope="hosts")
    assert technique_of(compressor) == TopK(0.1, dense_share=0.0, scope="hosts")


def test_a_switch_that_is_no_compression_is_refused() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    for compressor in (
        GradientCompressor(sparsity_method="none", communication_backend="gloo"),
        GradientCompressor(dense_steps=5, communication_backend="gloo"),
    ):
        with pytest.raises(InputError):
            OptimizedTrainer(model, optimizer, nn.MSELoss(), compress_gradients=compressor)
