"""Nothing that was given to a codec in a reduce-scatter is lost, and its bytes are foretold."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp  # registers the engine's operators
from hypothesis import given
from hypothesis import strategies as some
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from hasten.machine.environment import World
from hasten.parts.comm.compression_settings import CompressionSettings
from hasten.parts.comm.groups import MeshSizes, data_mesh
from hasten.parts.comm.methods import BucketPart
from hasten.parts.distributed.compressed_shards import ShardedGradients
from hasten.parts.distributed.fsdp import (
    ShardGroup,
    rows_of,
    send_gradients,
    shard,
    values_of,
)
from hasten.techniques.communication.compressed import members
from ranks import once_on_ranks

METHODS = ("half", "bf16", "int8", "int4", "topk")
BETWEEN_COPIES = ("half", "int4", "topk")  # a format, a code of numbers, a choice of numbers
STEPS, PASSES, DENSE, GIVEN_UP = 6, 2, 1, 3


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
    settings = CompressionSettings(method=method, minimum=0, dense_steps=DENSE)
    copied = sizes.dp > 1
    exchange = ShardedGradients(settings, members=members(mesh) if copied else None)
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


def accumulated(world: World) -> float:
    """The relative error of a gradient of 16 passes in bf16 of which the last one is reduced."""
    torch.manual_seed(0)
    layer = nn.Linear(48, 32, bias=False)
    plain = copy.deepcopy(layer).bfloat16()
    expected = torch.zeros(32, 48, dtype=torch.float64)
    shard(layer, init_device_mesh("cpu", (world.size,)), dtype=torch.bfloat16)
    for step in range(16):
        x = torch.randn(8, 48).bfloat16()
        (single,) = torch.autograd.grad(plain(x).float().square().sum(), [plain.weight])
        expected += single.double()
        send_gradients(layer, step == 15)
        layer(x).float().square().sum().backward()
    found = layer.weight.grad.full_tensor().double()  # type: ignore[union-attr]
    return float((found - expected).norm() / expected.norm())


def parts_on_two(world: World) -> dict[str, Any]:
    found: dict[str, Any] = {m: sums(world, MeshSizes(shard=2), m) for m in METHODS}
    return {**found, "accumulated": accumulated(world)}


def parts_on_four(world: World) -> dict[str, Any]:
    return {method: sums(world, MeshSizes(dp=2, shard=2), method) for method in BETWEEN_COPIES}


CPU = torch.device("cpu")
# Of half formats: what they round away once (bf16: 2 ** -9) is lost.
ROUNDED = {"half": 2**-11, "bf16": 2**-8}


two = once_on_ranks(parts_on_two)
four = once_on_ranks(parts_on_four, 4)


def test_passes_in_bf16_add_up_in_float32(two: list[Any]) -> None:
    """Rounded sums of 16 passes would be about 0.005 off."""
    assert all(rank["accumulated"] < 1e-5 for rank in two)


@pytest.mark.parametrize("method", METHODS)
def test_what_was_given_is_applied_or_remembered(two: list[Any], method: str) -> None:
    """Over several passes a step, a step that was given up, shards of unequal size."""
    for rank in two:
        found = rank[method]
        near = ROUNDED.get(method, 0.0) * found["largest"] + 2e-6
        assert found["apart"] < near
        assert bool(found["remembers"]) == (method not in ROUNDED)
        assert not [name for name in found["remembers"] if "frozen" in name]


@pytest.mark.parametrize("method", BETWEEN_COPIES)
def test_between_copies_too(four: list[Any], method: str) -> None:
    for rank in four:
        found = rank[method]
        near = 2 * ROUNDED.get(method, 0.0) * found["largest"] + 4e-6  # rounded twice
        assert found["apart"] < near
        assert bool(found["remembers"]) == (method not in ROUNDED)


@pytest.mark.parametrize("method", METHODS)
def test_bytes_are_foretold_exactly(two: list[Any], four: list[Any], method: str) -> None:
    for rank in two:
        found = rank[method]
        full = DENSE * PASSES * 4 * found["numbers"]  # to the one other rank
        assert found["sent"] == full + (STEPS - DENSE) * PASSES * found["predicted"]
    for rank in four * (method in BETWEEN_COPIES):  # a ring of two sends as many bytes as there are
        found = rank[method]
        full = DENSE * 4 * found["numbers"]
        assert found["sent"] == full + (STEPS - DENSE) * found["predicted"]


@given(
    some.lists(some.lists(some.integers(1, 9), min_size=1, max_size=3), min_size=1, max_size=4),
    some.integers(1, 5),
    some.integers(0, 2**31),
)
def test_rows_are_laid_out_as_the_engine_does(
    shapes: list[list[int]], ranks: int, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    weights = tuple(BucketPart(f"w{i}", tuple(shape)) for i, shape in enumerate(shapes))
    values = {w.name: torch.randn(w.shape, generator=draw) for w in weights}
    group = ShardGroup(None, weights, ranks)
    rows = rows_of(values, group, CPU)
    theirs = torch.empty(ranks, group.row)
    torch.ops.fsdp.chunk_cat(list(values.values()), dim=0, num_chunks=ranks, out=theirs)
    assert torch.equal(rows, theirs)
    back = values_of(rows, group)
    for weight in weights:
        assert weight.numbers == math.prod(weight.shape)
        assert torch.equal(back[weight.name], values[weight.name].flatten())


def test_a_module_that_is_not_sharded_is_refused() -> None:
    with pytest.raises(ValueError, match="call fully_shard before"):
        ShardedGradients(CompressionSettings(method="int8")).attach(torch.nn.Linear(3, 3))
