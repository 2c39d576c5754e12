"""Gradients of shards in fewer bytes, on several ranks; plain JSON values."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hasten.core.facts import World
from hasten.core.plan import Plan
from hasten.core.session import Session, assemble
from hasten.core.setup import prepare
from hasten.core.state import restore, state_of
from hasten.core.technique import Technique
from hasten.errors import InputError
from hasten.parts.compression.copies import CopiedShards
from hasten.parts.compression.settings import Settings
from hasten.parts.compression.sharded import ShardedGradients
from hasten.parts.layout.mesh import MeshSizes, data_mesh
from hasten.parts.layout.shard_groups import ShardGroup, rows_of
from hasten.parts.layout.sharding import shard
from hasten.techniques.adapter import LoRA
from hasten.techniques.batch import Accumulate
from hasten.techniques.layout import DDP
from hasten.techniques.layout_hybrid import Hybrid
from hasten.techniques.layout_sharded import FSDP2
from hasten.techniques.layout_tensor import TensorParallel
from hasten.techniques.precision import BF16MasterWeights
from hasten.techniques.wire import Half, PowerSGD, Quantised, TopK
from hasten.techniques.wire_local import LocalSteps
from hasten.techniques.wire_sharded import members
from tiny import job_facts, language_job, records, run, tiny_model

METHODS = ("half", "bf16", "int8", "int4", "topk")
STEPS, PASSES, DENSE, GIVEN_UP = 6, 2, 1, 3
HALF = Half(minimum=0, check_every=1)
INT8 = Quantised(minimum=0, check_every=1)
INT4 = Quantised(bits=4, minimum=0, check_every=1)
BETWEEN = Quantised(minimum=0, check_every=1, scope="hosts")


class Given(nn.Module):
    """Its gradients are what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(5, 300))  # 5 rows: shards aren't of one size
        self.vector = nn.Parameter(torch.zeros(7))
        self.frozen = nn.Parameter(torch.zeros(3, 3), requires_grad=False)

    def forward(self, matrix: Tensor, vector: Tensor) -> Tensor:
        return (self.matrix * matrix).sum() + (self.vector * vector).sum()


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Given(), Given()])
        self.last = nn.Parameter(torch.zeros(11, 40))

    def forward(self, gifts: dict[str, Tensor]) -> Tensor:
        total = (self.last * gifts["last"]).sum()
        for index, block in enumerate(self.blocks):
            total = total + block(gifts[f"blocks.{index}.matrix"], gifts[f"blocks.{index}.vector"])
        return total


def _gifts(
    shapes: dict[str, tuple[int, ...]], rank: int, step: int, turn: int
) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1000 * rank + 10 * step + turn)
    return {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}


def sums(world: World, sizes: MeshSizes, method: str) -> dict[str, Any]:
    """What was given on all ranks beside what was applied and what is still remembered."""
    module, mesh = Twice(), sizes.build("cpu")
    shapes = {n: tuple(p.shape) for n, p in module.named_parameters() if p.requires_grad}
    shard(module, data_mesh(mesh, copies=False))
    settings = Settings(method=method, minimum=0, dense_steps=DENSE)
    copied = sizes.dp > 1
    exchange = CopiedShards(settings, members(mesh)) if copied else ShardedGradients(settings)
    exchange.attach(module)
    due = {name: torch.zeros(shape) for name, shape in shapes.items()}
    applied = {name: torch.zeros(shape) for name, shape in shapes.items()}
    predicted = exchange.predicted()
    for step in range(STEPS):
        for turn in range(PASSES):
            exchange.passes(turn == PASSES - 1)
            module(_gifts(shapes, world.rank, step, turn)).backward()
        if step != GIVEN_UP:
            exchange.confirm()
            for rank in range(world.size):
                for turn in range(PASSES):
                    for name, value in _gifts(shapes, rank, step, turn).items():
                        due[name] += value / world.size
        for name, p in module.named_parameters():
            if step != GIVEN_UP and isinstance(p.grad, DTensor):
                applied[name] += p.grad.full_tensor()
            p.grad = None
    exchange.passes(True)  # the last step is over
    owed = exchange.state()["residual"]
    place = mesh.get_local_rank("shard")
    apart = max(
        float(_apart(group, due, applied, owed, copied, place).abs().max())
        for group in exchange.groups
    )
    return {
        "apart": apart,
        "remembers": sorted(owed),
        "largest": max(float(v.abs().max()) for v in due.values()),
        "sent": exchange.sent_bytes,
        "predicted": predicted,
        "numbers": sum(group.row for group in exchange.groups),
    }


def _apart(
    group: ShardGroup,
    due: dict[str, Tensor],
    applied: dict[str, Tensor],
    owed: dict[str, Tensor],
    copied: bool,
    place: int,
) -> Tensor:
    """This rank's row of what was given, less what was applied and the mean of what is owed."""
    cpu = torch.device("cpu")
    missing = rows_of(due, group, cpu)[place] - rows_of(applied, group, cpu)[place]
    if not owed:
        return missing
    if copied:
        mine = torch.cat([owed[f"shard of {w.name}"] for w in group.weights])
        held = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(held, mine)
        # Ranks are numbered with shards inside copies: those alike in place have this row.
        return missing - torch.stack(held[place :: group.ranks]).mean(0)
    rows = rows_of(owed, group, cpu)
    dist.all_reduce(rows)
    return missing - rows[place] / group.ranks


def parts_on_two(world: World) -> dict[str, Any]:
    return {method: sums(world, MeshSizes(shard=2), method) for method in METHODS}


def parts_on_four(world: World) -> dict[str, Any]:
    return {method: sums(world, MeshSizes(dp=2, shard=2), method) for method in METHODS}


def session(
    world: World,
    *techniques: Technique,
    layout: Technique | None = None,
    architecture: str = "llama",
    steps: int = 8,
) -> Session:
    job = language_job(lambda: tiny_model(architecture), data=records(16), steps=steps)
    plan = Plan((layout or FSDP2(), *techniques))
    return assemble(prepare(job, plan, job_facts(job, architecture, world)))


def seen(found: Session, wire: Technique) -> dict[str, Any]:
    metrics = run(found)
    proof = wire.probe(found)
    return {
        "losses": [m.loss for m in metrics],
        "norms": [m.grad_norm for m in metrics],
        "skipped": sum(m.skipped for m in metrics),
        "acted": proof.acted,
        "said": proof.evidence,
        "held norms": sum(_sum(p) for n, p in found.module.named_parameters() if "norm" in n),
    }


def _sum(parameter: Tensor) -> float:
    """Of what this rank holds of it."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return float(local.detach().double().sum())


WIRES: tuple[Technique, ...] = (HALF, INT8, INT4, TopK(minimum=0, dense_share=0.0))
EACH = Accumulate(micro_batch_size=2)
BESIDE: dict[str, tuple[Technique, tuple[Technique, ...]]] = {
    "accumulated": (FSDP2(), (EACH,)),
    "whole gradients": (FSDP2(whole_gradients=True), (EACH,)),
    "bf16": (FSDP2(), (BF16MasterWeights(),)),
    "adapters": (FSDP2(), (LoRA(),)),
}


def runs(world: World) -> dict[str, Any]:
    found = {str(wire): seen(session(world, wire), wire) for wire in WIRES}
    for name, (layout, others) in BESIDE.items():
        found[name] = seen(session(world, INT8, *others, layout=layout), INT8)
    found["experts"] = seen(session(world, INT8, architecture="deepseek_v3"), INT8)
    found["plain"] = {"losses": [m.loss for m in run(session(world))]}
    dense = Quantised(minimum=0, dense_share=1.0)
    found["dense"] = seen(session(world, dense), dense)
    return found


def resumed(world: World, wire: Technique, before: Technique, after: Technique) -> dict[str, Any]:
    """Saved after 5 of 8 steps under one layout, read back by a fresh session under another."""
    whole = [m.loss for m in run(session(world, wire, layout=after))]
    first = session(world, wire, layout=before, steps=5)
    run(first)
    boxes: list[Any] = [state_of(first)]
    dist.broadcast_object_list(boxes)  # what rank 0 writes, every rank reads
    again = session(world, wire, layout=after)
    restore(again, *boxes[0])
    return {
        "own memory": _same(_memory(first), _memory(again)),
        "ranks": len(boxes[0][1]["slots"]["wire"]["state"]["ranks"]),
        "rest": [m.loss for m in run(again)],
        "whole": whole[5:],
    }


def _memory(found: Session) -> dict[str, Tensor]:
    wire: Any = found.setup.wire
    travel = wire.shards.state() if wire.shards else wire.compressor.state_dict()["travel"]
    kept: dict[str, Tensor] = travel["residual"]
    return kept


def _same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether the same is remembered of the same weights, and something."""
    alike = one.keys() == other.keys()
    return alike and len(one) > 0 and all(torch.equal(one[k], other[k]) for k in one)


def merged(world: World) -> dict[str, Any]:
    """The memory of three ranks, read by two: the mean is kept. Of other shapes: left behind."""
    found = session(world, INT4)
    run(found)
    held: Any = found.setup.wire
    mine = held.shards.state()
    name = next(iter(mine["residual"]))
    filled = torch.full_like
    states = [
        {"travel": {**mine, "residual": {name: filled(mine["residual"][name], value)}}}
        for value in (1.0, 2.0, 6.0)
    ]
    held.load_state_dict({"technique": "quantised", "ranks": states})
    mean = float(held.shards.state()["residual"][name].mean())
    said = [INT4.probe(found).evidence]
    states[0]["travel"]["residual"][name] = torch.ones(3)
    held.load_state_dict({"technique": "quantised", "ranks": states})
    said.append(INT4.probe(found).evidence)
    try:
        held.load_state_dict({"technique": "quantised", "ranks": states[:1] * world.size})
    except InputError as error:
        said.append(str(error))
    return {"mean": mean, "said": said}


def overflow(world: World) -> dict[str, Any]:
    """A gradient that is infinite on rank 1 in the fourth step."""
    found, passes = session(world, INT8), []
    model: Any = found.model

    def spoil(grad: Tensor) -> Tensor:
        passes.append(0)
        return grad * torch.inf if len(passes) == 4 and world.rank == 1 else grad

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
    "same records": (TensorParallel(), Half()),
}


def refused(world: World, cases: dict[str, tuple[Technique, Technique]]) -> dict[str, str]:
    found = {}
    for name, (layout, wire) in cases.items():
        try:
            session(world, wire, layout=layout)
        except InputError as error:
            found[name] = str(error)
    return found


def on_two(world: World) -> dict[str, Any]:
    return {
        "runs": runs(world),
        "resumed": resumed(world, INT4, FSDP2(), FSDP2()),
        "from copies of the whole": resumed(world, INT4, DDP(), FSDP2()),
        "merged": merged(world),
        "overflow": overflow(world),
        "refused": refused(world, REFUSED),
    }


def on_four(world: World) -> dict[str, Any]:
    """Copies: of pieces, and of layers that are cut."""
    layouts: dict[str, tuple[Technique, Technique]] = {
        "pieces": (FSDP2(replicas=2), BETWEEN),
        "cut layers": (Hybrid(dp=2, tp=2), HALF),
        "pieces of cut layers": (Hybrid(shard=2, tp=2), HALF),
    }
    found: dict[str, Any] = {}
    for name, (layout, wire) in layouts.items():
        found[name] = seen(session(world, wire, EACH, layout=layout), wire)
        found[name]["plain"] = [m.loss for m in run(session(world, EACH, layout=layout))]
    pieces = FSDP2(replicas=2)
    found["resumed"] = resumed(world, BETWEEN, pieces, pieces)
    cases = {"everywhere": (pieces, INT8), "blocks": (Hybrid(dp=2, tp=2), INT8)}
    found["refused"] = refused(world, cases)
    return found
