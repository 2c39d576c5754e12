"""Whole runs of hasten on several ranks with compressed gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hasten.core.plan import Plan
from hasten.core.session import Session, assemble
from hasten.core.setup import prepare
from hasten.core.state import restore, state_of
from hasten.core.technique import Technique
from hasten.machine.environment import World
from hasten.parts.comm import exchange
from hasten.techniques.adapter import LoRA
from hasten.techniques.batch import AdaptiveBatch, GradientAccumulation
from hasten.techniques.communication.compress import Half, PowerSGD, Quantised, TopK
from hasten.techniques.layout.ddp import DDP
from hasten.techniques.precision import Autocast, BF16MasterWeights
from tiny import examples, job_context, language_job, run, tiny_model

COMMUNICATIONS: tuple[Technique, ...] = (
    Half(minimum=0, check_every=1),
    Quantised(bits=4, minimum=0, check_every=1),
    TopK(minimum=0, check_every=1),
    PowerSGD(rank=4, minimum=0, check_every=1),
)
INT8 = Quantised(minimum=0, check_every=1)


def session(
    world: World, *techniques: Technique, architecture: str = "llama", steps: int = 8
) -> Session:
    job = language_job(lambda: tiny_model(architecture), data=examples(16), steps=steps)
    context = job_context(job, architecture, world)
    return assemble(prepare(job, Plan((DDP(), *techniques)), context))


def weights(found: Session) -> list[float]:
    """Three numbers that tell whether two ranks have the same weights."""
    flat = torch.cat([p.detach().flatten().double() for p in found.loss_module.parameters()])
    return [float(flat.sum()), float(flat.abs().sum()), float(flat[::7].sum())]


def seen(found: Session, communication: Technique) -> dict[str, Any]:
    metrics = run(found)
    proof = communication.check_effect(found)
    return {
        "losses": [m.loss for m in metrics],
        "norms": [m.grad_norm for m in metrics],
        "skipped": sum(m.skipped for m in metrics),
        "weights": weights(found),
        "effective": proof.effective,
        "said": proof.evidence,
    }


def runs(world: World) -> dict[str, Any]:
    found = {
        communication.name(): seen(session(world, communication), communication)
        for communication in COMMUNICATIONS
    }
    beside: dict[str, tuple[Technique, ...]] = {
        "gradient_accumulation": (GradientAccumulation(micro_batch_size=2),),
        "adaptive_batch": (AdaptiveBatch(initial_size=2),),
        "bf16_master_weights": (BF16MasterWeights(),),
        "lora": (LoRA(),),
    }
    for name, more in beside.items():
        found[name] = seen(session(world, INT8, *more), INT8)
    found["experts"] = seen(session(world, INT8, architecture="deepseek_v3"), INT8)
    found["plain"] = {"losses": [m.loss for m in run(session(world))]}
    return found


def resumed(world: World) -> dict[str, Any]:
    """Saved after 5 of 8 steps, read back by a fresh session."""
    communication = Quantised(bits=4, minimum=0, check_every=1)
    whole = session(world, communication)
    whole_losses = [m.loss for m in run(whole)]
    first = session(world, communication, steps=5)
    run(first)
    tensors, meta = state_of(first)
    mine = first.setup.communication.compressor.state_dict()["travel"]["residual"]  # type: ignore[attr-defined]
    # What rank 0 writes, every rank reads.
    boxes: list[Any] = [(tensors, meta)] if world.is_main else [None]
    dist.broadcast_object_list(boxes)
    tensors, meta = boxes[0]
    again = session(world, communication)
    restore(again, tensors, meta)
    back = again.setup.communication.compressor.state_dict()["travel"]["residual"]  # type: ignore[attr-defined]
    rest = [m.loss for m in run(again)]
    return {
        "own memory": all(torch.equal(mine[k], back[k]) for k in mine) and len(mine) > 0,
        "ranks": len(meta["slots"]["communication"]["state"]["ranks"]),
        "rest": rest,
        "whole": whole_losses[5:],
        "weights": weights(again),
    }


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
    held.load_state_dict({"technique": "quantised", "ranks": states})
    after = held.compressor.state_dict()["travel"]["residual"][name]
    return {"mean": float(after.mean()), "said": communication.check_effect(found).evidence}


def between_hosts(world: World) -> dict[str, Any]:
    """Four ranks of two faked hosts: a run, one that is resumed, and a state of three ranks."""
    exchange.host_name = lambda: f"host-{world.rank // 2}"
    found: dict[str, Any] = {}
    for communication in (
        Quantised(bits=4, minimum=0, check_every=1, scope="hosts"),
        PowerSGD(rank=4, minimum=0, check_every=1, scope="hosts", dense_share=0.0),
    ):
        whole = seen(session(world, communication), communication)
        first = session(world, communication, steps=5)
        run(first)
        boxes: list[Any] = [state_of(first)]
        dist.broadcast_object_list(boxes)
        again = session(world, communication)
        restore(again, *boxes[0])
        held: Any = first.setup.communication
        back: Any = again.setup.communication
        mine, read = (w.compressor.state_dict()["travel"]["residual"] for w in (held, back))
        state = {"technique": communication.name(), "ranks": [{}] * 3}
        whole["own memory"] = all(torch.equal(mine[k], read[k]) for k in mine)
        whole["owned"] = len(mine)  # the one bucket belongs to one rank of each host
        whole["rest"] = [m.loss for m in run(again)]
        back.load_state_dict(state)
        whole["other ranks"] = communication.check_effect(again).evidence
        found[communication.name()] = whole
    return found


def overflow(world: World) -> dict[str, Any]:
    """A gradient that is infinite on rank 1 in the fourth step."""
    found = session(world, INT8)
    weight = next(p for p in found.loss_module.parameters() if p.requires_grad)
    passes = []

    def spoil(grad: torch.Tensor) -> torch.Tensor:
        passes.append(0)
        return grad * torch.inf if len(passes) == 4 and world.rank == 1 else grad

    weight.register_hook(spoil)
    return seen(found, INT8)


def scaled(world: World) -> dict[str, Any]:
    """fp16 with a loss scale so high that the first steps overflow on every rank."""
    scale = Autocast(dtype="fp16", initial_scale=2.0**40)
    return seen(session(world, INT8, scale, steps=30), INT8)


def everything(world: World) -> dict[str, Any]:
    return {
        "runs": runs(world),
        "resumed": resumed(world),
        "merged": merged(world),
        "overflow": overflow(world),
        "scaled": scaled(world),
        "trainer": trainer(world),
    }


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
