"""Experts on several ranks compute what they compute in one process."""

from __future__ import annotations

import copy
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hasten.machine.environment import World
from hasten.parts.comm.groups import MeshSizes
from hasten.parts.distributed.arrival import full_weight
from hasten.parts.distributed.expert_parallel import (
    SharedExperts,
    expert_layers,
    holds_part,
    placed,
    replicated,
    share_experts,
)
from hasten.parts.kernels import rowwise
from hasten.parts.nn.fused_experts import fuse_experts
from host_waits import HostWaits
from ranks import once_on_ranks
from tiny import tiny_config
from told import refusal

DRAWS = 4
WIDTH, INNER = 8, 5
MICRO_BATCHES, STEPS = 2, 2


class Experts(nn.Module):
    """Stacked experts in a plain loop: every pair of a token and an expert by itself."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.num_experts = count
        draw = torch.Generator().manual_seed(count)
        normal = {"generator": draw, "dtype": torch.float64}
        self.gate_up_proj = nn.Parameter(torch.randn(count, 2 * INNER, WIDTH, **normal))
        self.down_proj = nn.Parameter(torch.randn(count, WIDTH, INNER, **normal))

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        found = []
        for token, experts, shares in zip(x, index, weights, strict=True):
            total = torch.zeros_like(token)
            for expert, share in zip(experts.tolist(), shares, strict=True):
                gate, up = (self.gate_up_proj[expert] @ token).chunk(2)
                total = total + share * (self.down_proj[expert] @ (gate.sigmoid() * up))
            found.append(total)
        return torch.stack(found) if found else x * weights.sum()


class Weighted(Experts):
    """Reads no number of its inputs, unlike a loop over experts."""

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return x * weights.sum(1, keepdim=True) * self.down_proj.sum()


def mesh_of(world: World, size: int) -> DeviceMesh:
    """Groups of ``size`` ranks that share experts."""
    return MeshSizes(dp=world.size, ep=size).experts("cpu")


def waits(world: World) -> list[str]:
    """Where the host would wait for a device, in a pass there and back."""
    module = Weighted(2 * world.size)
    share_experts(module, mesh_of(world, world.size))
    x = torch.randn(5, WIDTH, dtype=torch.float64, requires_grad=True)
    index = torch.arange(10).view(5, 2) % module.num_experts
    weights = torch.rand(5, 2, dtype=torch.float64, requires_grad=True)
    with HostWaits([x, index, weights, *module.parameters()]) as found:
        module(x, index, weights).sum().backward()
    return found.places


def drawn(seed: int, world: int) -> tuple[int, list[tuple[Tensor, Tensor, Tensor]]]:
    """Experts in all, and (tokens, choices, weights) of every rank; of seed 0 none has a token."""
    draw = np.random.default_rng(seed)
    experts = world * int(draw.integers(1, 4))
    top_k = int(draw.integers(1, experts + 1))
    # Only some experts are ever chosen: the others, and perhaps whole ranks, get no token.
    popular = draw.permutation(experts)[: int(draw.integers(top_k, experts + 1))]
    data = []
    for _ in range(world):
        tokens = int(draw.choice([0, 1, 2, 7])) if seed else 0
        index = [draw.permutation(popular)[:top_k] for _ in range(tokens)]
        data.append(
            (
                torch.tensor(draw.normal(size=(tokens, WIDTH))),
                torch.tensor(np.array(index, dtype=np.int64).reshape(tokens, top_k)),
                torch.tensor(draw.random((tokens, top_k))),
            )
        )
    return experts, data


def journeys(world: World) -> list[dict[str, float]]:
    """Largest differences of results and gradients from one process, for each draw."""
    mesh = mesh_of(world, world.size)
    return [_one_draw(seed, world, mesh) for seed in range(DRAWS)]


def _one_draw(seed: int, world: World, mesh: DeviceMesh) -> dict[str, float]:
    count, data = drawn(seed, world.size)
    alone, together = Experts(count), Experts(count)
    shared = share_experts(together, mesh)
    outputs, mine = {}, [t.clone() for t in data[world.rank]]
    everything = [torch.cat(column) for column in zip(*data, strict=True)]
    for name, module, given in (("alone", alone, everything), ("here", together, mine)):
        x, index, weights = given[0].requires_grad_(), given[1], given[2].requires_grad_()
        found = module(x, index, weights)
        (found.sin().sum()).backward()
        outputs[name] = (found.detach(), x.grad, weights.grad)
    starts = np.cumsum([0, *(len(m[0]) for m in data)])
    mine_of = slice(starts[world.rank], starts[world.rank + 1])
    (layer,) = shared.layers.values()
    differences = {
        part: _apart(here, whole[mine_of])
        for part, here, whole in zip(
            ("results", "tokens", "weights"), outputs["here"], outputs["alone"], strict=True
        )
    }
    names = [name for name, _ in together.named_parameters()]
    for name, here, whole in zip(names, shared.parameters(), alone.parameters(), strict=True):
        assert here.grad is not None  # also where no token came
        differences[name] = _apart(
            here.grad, _or_zeros(whole)[layer.first : layer.first + layer.here]
        )
    differences["rows"] = layer.traffic.rows - _rows_expected(data, count, world)
    return differences


def _rows_expected(data: list[Any], count: int, world: World) -> int:
    """Different ranks, other than its own, among the experts of each token, counted one by one."""
    here, total = count // world.size, 0
    for experts in data[world.rank][1].tolist():
        total += len({expert // here for expert in experts} - {world.rank})
    return total


def _or_zeros(weight: Tensor) -> Tensor:
    return torch.zeros_like(weight) if weight.grad is None else weight.grad


def _apart(one: Tensor, other: Tensor) -> float:
    one, other = one.detach(), other.detach()
    return float((one - other).abs().max() / other.abs().max().clamp_min(1)) if one.numel() else 0.0


def block(architecture: str, dtype: torch.dtype) -> Any:
    """The experts and the router of a Transformers model, and its shared experts."""
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

    torch.manual_seed(5)
    config = tiny_config(architecture)
    config._experts_implementation = "eager"
    made: Any = (DeepseekV2Moe if architecture == "deepseek_v2" else DeepseekV3MoE)(config)
    for weight in made.parameters():
        nn.init.normal_(weight, std=0.1)
    return made.to(dtype)


def blocks(world: World) -> dict[str, Any]:
    """A bare block in a plain loop, in groups of two and of all, by each code there is."""
    found: dict[str, Any] = {}
    for size in sorted({2, world.size}):
        mesh = mesh_of(world, size)
        for architecture in ("deepseek_v2", "deepseek_v3"):
            name = f"{architecture}, groups of {size}"
            found[f"{name}, float64"] = _trained(world, architecture, mesh, torch.float64)
        for kind in ("grouped_mm", "batched_mm", "fused"):
            if kind == "fused" and rowwise.library().reason:
                continue  # no compiler here
            found[f"{kind}, groups of {size}"] = _trained(
                world, "deepseek_v3", mesh, torch.float32, kind
            )
    return found


def _trained(
    world: World, architecture: str, mesh: DeviceMesh, dtype: torch.dtype, kind: str = "eager"
) -> dict[str, Any]:
    """Some steps of SGD on all ranks, and on one process with all the tokens."""
    alone = block(architecture, dtype)
    together = copy.deepcopy(alone)
    if kind == "fused":
        fuse_experts(together)
    together.config._experts_implementation = "eager" if kind == "fused" else kind
    shared = share_experts(together, mesh)
    ddp = replicated(together, shared.parameters())
    shared.start(world.size)
    data = torch.randn(
        STEPS, MICRO_BATCHES, world.size, 9, 32, generator=torch.Generator().manual_seed(1)
    )
    for step in data.to(dtype):
        _plain_step(alone, step.flatten(0, 1))
        _shared_step(ddp, shared, step[:, world.rank], world.size)
    differences, group = [], mesh.get_group("experts")
    for one, other in zip(together.parameters(), alone.parameters(), strict=True):
        full = one.detach()
        if holds_part(one) and 0 in dist.get_process_group_ranks(group):
            full = full_weight(placed(one), one.dtype, world.is_main)
        if world.is_main:
            differences.append(_apart(full, other))
    return {
        "apart": max(differences, default=0.0),
        "held": sum(w.numel() for w in shared.parameters()),
        "of": sum(w.numel() for m in expert_layers(alone).values() for w in m.parameters()),
        "traffic": asdict(shared.traffic),
    }


def _plain_step(module: nn.Module, parts: Tensor) -> None:
    module.zero_grad()
    (sum(module(part).sin().sum() for part in parts)).backward()
    _move(module)


def _shared_step(ddp: Any, shared: SharedExperts, parts: Tensor, ranks: int) -> None:
    ddp.zero_grad()
    for number, part in enumerate(parts, start=1):
        shared.reduces = ddp.require_backward_grad_sync = number == len(parts)
        (ddp(part).sin().sum() * ranks).backward()  # gradients are averaged; one process sums
    _move(ddp)


@torch.no_grad()
def _move(module: nn.Module) -> None:
    for weight in module.parameters():
        weight -= 0.0003 * weight.grad


def refusals(world: World) -> list[str]:
    """What is said where experts can't be shared out."""
    mesh = mesh_of(world, world.size)
    modules = (Experts(world.size + 1), nn.Linear(3, 3))
    said = [refusal(share_experts, module, mesh) for module in modules]
    dist.barrier()
    return said


def all_parts(world: World) -> dict[str, Any]:
    return {
        "journeys": journeys(world),
        "blocks": blocks(world),
        "refusals": refusals(world),
        "waits": waits(world),
    }


WORLD = 4
ROW, INDEX = 32, 4  # numbers of a row, bytes of an expert's number on its way
TOP_K = 2


found = once_on_ranks(all_parts, WORLD)


@pytest.mark.slow
def test_results_and_all_gradients_are_those_of_one_process(found: list[Any]) -> None:
    """Among the draws are ranks without tokens, ranks that get none, experts that get none."""
    for rank in found:
        assert len(rank["journeys"]) == DRAWS
        for differences in rank["journeys"]:
            assert max(v for name, v in differences.items() if name != "rows") < 1e-12


def test_a_token_goes_once_to_each_rank_that_holds_one_of_its_experts(found: list[Any]) -> None:
    assert all(d["rows"] == 0 for rank in found for d in rank["journeys"])


def test_the_draws_hold_the_cases_that_matter() -> None:
    draws = [drawn(seed, WORLD) for seed in range(DRAWS)]
    chosen = [torch.cat([index.flatten() for _, index, _ in m]).unique() for _, m in draws]
    assert any(not len(x) for _, m in draws for x, _, _ in m)
    assert any(0 < len(c) < experts for c, (experts, _) in zip(chosen, draws, strict=True))
    assert any(  # a whole rank's experts get no token at all
        0 < len((c // (experts // WORLD)).unique()) < WORLD
        for c, (experts, _) in zip(chosen, draws, strict=True)
    )
    assert any(not len(c) for c in chosen)


def test_training_in_a_plain_loop_moves_weights_as_one_process_does(found: list[Any]) -> None:
    blocks = found[0]["blocks"]
    assert {f"deepseek_v{v}, groups of {s}, float64" for v in (2, 3) for s in (2, 4)} <= set(blocks)
    for name, case in blocks.items():
        largest = 1e-12 if "float64" in name else 2e-6
        assert case["apart"] < largest, name


def test_each_rank_holds_its_share_and_no_more(found: list[Any]) -> None:
    for rank in found:
        for name, case in rank["blocks"].items():
            size = 4 if "groups of 4" in name else 2
            assert case["held"] * size == case["of"]


def test_a_rank_waits_for_its_device_once_a_pass(found: list[Any]) -> None:
    """For the lengths of messages; not once more to find rows and pairs, nor on the way back."""
    for rank in found:
        assert [place.partition(":")[2] for place in rank["waits"]] == [
            " sent, got, pairs = torch.stack([sends[:, 0], gets[:, 0], gets[:, 1]]).tolist()"
        ]


def test_bytes_on_the_wire_are_those_of_the_formula(found: list[Any]) -> None:
    """Rows and their weights there, results back, the same for gradients; numbers of experts once.

    A rank counts what it sends: its own rows, and what it sends back for the others'.
    """
    for size in (2, 4):
        name = f"deepseek_v3, groups of {size}, float64"
        for group in range(0, WORLD, size):
            traffic = [found[group + i]["blocks"][name]["traffic"] for i in range(size)]
            rows = sum(t["rows"] for t in traffic)
            counted = sum(t["bytes"] for t in traffic)
            passes = STEPS * MICRO_BATCHES
            assert [t["passes"] for t in traffic] == [passes] * size
            row, weights = 8 * ROW, 4 * TOP_K  # routers weigh in float32 whatever the rest is
            there, back = row + weights, row
            counts = size * (size - 1) * 2 * 8 * passes  # of rows and of pairs
            assert counted == rows * (2 * (there + back) + INDEX * TOP_K) + counts


def test_what_cannot_be_shared_out_is_a_sentence(found: list[Any]) -> None:
    uneven, none = found[0]["refusals"]
    assert uneven.startswith("this module has 5 experts, which 4 ranks can't share evenly")
    assert none == "Linear has no layers of stacked experts to share out over ranks"
    assert found[1]["refusals"] == found[0]["refusals"]


def test_layers_are_found_by_their_stacked_weights() -> None:
    """A router has a number of experts too, and one weight with a row for each."""
    assert list(expert_layers(block("deepseek_v3", torch.float32))) == ["experts"]
    assert list(expert_layers(Experts(3))) == [""]
    assert expert_layers(nn.Linear(2, 2)) == {}


def test_a_weight_that_was_not_shared_out_belongs_to_no_layer() -> None:
    weight = nn.Parameter(torch.zeros(2))
    assert not holds_part(weight)
    assert placed(weight) is weight
