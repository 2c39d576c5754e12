"""Compressed between hosts only, on four ranks of two faked hosts; methods for whole models."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hasten import GradientCompressor
from hasten.machine.environment import World
from hasten.parts.comm import exchange
from hasten.parts.comm.gradient_compressor import PATIENCE
from parts.comm.compression_kit import (
    Small,
    averaged,
    compressor,
    given_and_applied,
    inputs,
    loss_of,
    memory,
    replicas,
    same_everywhere,
)
from parts.comm.compression_trouble_jobs import infinite, resumed
from ranks import once_on_ranks
from told import refusal

# bf16 and int8 differ from two of these in the format alone.
REMEMBERING = ("int4", "topk", "powersgd")
SCOPED = ("none", "half", *REMEMBERING)


def between_hosts(world: World) -> dict[str, Any]:
    """Two hosts of two ranks, dealt: ranks 0 and 2 share one."""
    exchange.host_name = lambda: f"host-{world.rank % 2}"
    return {
        "methods": {m: _scoped(m, world) for m in SCOPED},
        "loop": _loop(world),
        "infinite": infinite("int4", world, scope="hosts"),
        "resumed": resumed("int4", world, scope="hosts"),
    }


def _scoped(method: str, world: World) -> dict[str, Any]:
    """DDP for some steps: what is conserved, sent, and the same."""
    ddp, c = replicas(Small(), find_unused_parameters=True), compressor(method, scope="hosts")
    c.attach(ddp)
    sent, same = [0], []

    def after_step() -> None:
        sent.append(c.sent_bytes)
        same.append(same_everywhere([p.grad for p in ddp.parameters() if p.grad is not None]))

    given, applied = given_and_applied(ddp, world, after_step)
    left = memory(c)
    return {
        "same": all(same),
        "error": max(_owed(given[n], applied[n], left.get(n)) for n in given),
        "sent": _added(sent[-1] - sent[-2]),
        "predicted": c.predicted(ddp.module),
        "remembers": sorted(left),
    }


def _owed(given: Tensor, applied: Tensor, left: Tensor | None) -> float:
    """Of all that was given = what was applied + what hosts owe. One rank of a host remembers."""
    mine = torch.zeros_like(given) if left is None else left.double().view_as(given)
    expected, owed = averaged(given), averaged(mine) * 2  # two hosts, four ranks
    return float((applied + owed - expected).norm() / expected.norm())


def _added(count: int) -> int:
    total = torch.tensor(count)
    dist.all_reduce(total)
    return int(total) // 2  # of each of two hosts


def _loop(world: World) -> dict[str, Any]:
    """Without DDP; and an average by hand is refused."""
    model, c = Small(), compressor("int8", scope="hosts")
    loss_of(model, inputs(world.rank, 0)).backward()
    exact = [averaged(p.grad) for p in model.parameters() if p.grad is not None]
    named = [p for p in model.parameters() if p.grad is not None]
    said = refusal(c.compress, torch.ones(300))
    c.synchronize_gradients(named)
    off = sum(float((p.grad - e).square().sum()) for p, e in zip(named, exact, strict=True))  # type: ignore[operator]
    return {"error": (off / sum(float(e.square().sum()) for e in exact)) ** 0.5, "said": said}


def whole_models(world: World) -> dict[str, Any]:
    """diloco and stream, attached once to a model in the usual loop."""
    return {m: _attached(m, world) for m in ("diloco", "stream")} | {"one host": _one_host(world)}


def _attached(method: str, world: World) -> dict[str, Any]:
    model = Small()
    with torch.no_grad():
        model.first.bias += world.rank  # what differs at the start becomes rank 0's
    c = GradientCompressor(sparsity_method=method, communication_backend="gloo", every=4)
    c.attach(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    bystander = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    losses = []
    for step in range(24):
        loss = loss_of(model, inputs(world.rank, step % 4))
        loss.backward()
        optimizer.step()
        bystander.step()  # another model's optimizer counts for nothing
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    c.synchronize()
    c.check(model.parameters())
    state = c.state_dict()
    again = GradientCompressor(sparsity_method=method, communication_backend="gloo", every=4)
    again.attach(Small())
    again.load_state_dict(state)
    return {
        "first": losses[0],
        "last": losses[-1],
        "steps": [c.steps, again.steps],
        "sent": c.sent_bytes,
        "acts": c.compresses,
        "same": same_everywhere(list(model.parameters())),
        "refused": [refusal(c.compress, torch.ones(9)), refusal(c.synchronize_gradients, model)],
        "wrong module": refusal(
            GradientCompressor(sparsity_method=method, communication_backend="gloo").attach,
            replicas(Small()),
        ),
    }


def _one_host(world: World) -> dict[str, Any]:
    """All ranks on one host: nothing is between hosts, so nothing is compressed."""
    ddp, c = replicas(Small(), find_unused_parameters=True), compressor("int4", scope="hosts")
    c.attach(ddp)
    exact = Small()
    loss_of(exact, inputs(world.rank, 0)).backward()
    for _ in range(4):
        ddp.zero_grad()
        loss_of(ddp, inputs(world.rank, 0)).backward()
    found = [p.grad for p in ddp.parameters() if p.grad is not None]
    wanted = [averaged(p.grad) for p in exact.parameters() if p.grad is not None]
    error = max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=False))
    return {
        "error": error,
        "compresses": c.compresses,
        "memory": len(memory(c)),
        "hosts": c.hosts,
    }


four = once_on_ranks(between_hosts, 4)
two = once_on_ranks(whole_models)


@pytest.mark.parametrize("method", SCOPED)
def test_all_ranks_get_the_same_bits_and_nothing_is_lost(four: list[Any], method: str) -> None:
    bounds = {"half": 1e-3, "powersgd": 5e-3}  # no memory, or sums in bf16
    for rank in four:
        seen = rank["methods"][method]
        assert seen["same"]
        assert seen["error"] < bounds.get(method, 1e-6)


@pytest.mark.parametrize("method", SCOPED)
def test_a_host_sends_what_one_rank_of_two_would(four: list[Any], method: str) -> None:
    for rank in four:
        assert rank["methods"][method]["sent"] == rank["methods"][method]["predicted"]


def test_memory_lies_once_on_each_host(four: list[Any]) -> None:
    for method in REMEMBERING:
        names = [set(rank["methods"][method]["remembers"]) for rank in four]
        assert not names[0] & names[2]
        assert not names[1] & names[3]
        assert names[0] | names[2] == names[1] | names[3]
        assert all(names), method


def test_a_plain_loop_has_the_scope_too(four: list[Any]) -> None:
    for rank in four:
        assert rank["loop"]["error"] < 2e-2
        assert "call synchronize_gradients(model) alone" in rank["loop"]["said"]
        assert rank["resumed"]


def test_an_infinite_gradient_of_one_rank_is_seen_by_all(four: list[Any]) -> None:
    for rank in four:
        assert rank["infinite"]["finite"] == [True, True, True, True, False, True]
        assert rank["infinite"]["memory stays"]


def test_on_one_host_nothing_is_compressed(two: list[Any]) -> None:
    for rank in two:
        assert rank["one host"]["error"] < 1e-6
        assert rank["one host"]["memory"] == 0
        assert rank["one host"]["hosts"] == 1
        assert not rank["one host"]["compresses"]


@pytest.mark.parametrize("method", ["diloco", "stream"])
def test_a_model_is_attached_once_and_learns_in_the_usual_loop(two: list[Any], method: str) -> None:
    for rank in two:
        seen = rank[method]
        assert seen["last"] < 0.75 * seen["first"]
        assert seen["same"]
        assert seen["sent"] > 0
        assert seen["acts"]
        assert seen["steps"][0] == seen["steps"][1] > 0


@pytest.mark.parametrize("method", ["diloco", "stream"])
def test_every_update_is_a_step(two: list[Any], method: str) -> None:
    assert two[0][method]["steps"][0] == 24


@pytest.mark.parametrize("method", ["diloco", "stream"])
def test_what_has_no_meaning_says_what_to_call(two: list[Any], method: str) -> None:
    for said in two[0][method]["refused"]:
        assert f"has no meaning for '{method}'" in said
        assert "call attach(model)" in said
    assert "attach the module itself" in two[0][method]["wrong module"]


class HomeMade:
    """Gradient descent that torch doesn't know of."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.weights = list(model.parameters())

    @torch.no_grad()
    def step(self) -> None:
        for weight in self.weights:
            weight -= 0.01 * weight.grad
            weight.grad = None


@pytest.mark.parametrize("method", ["diloco", "stream"])
@pytest.mark.parametrize("heard", [False, True])
def test_updates_that_nobody_hears_of_are_told_once(method: str, heard: bool) -> None:
    model = torch.nn.Linear(4, 1)
    compressor = GradientCompressor(sparsity_method=method, communication_backend="gloo")
    compressor.attach(model)
    known = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = known if heard else HomeMade(model)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3 * PATIENCE):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    told = [str(w.message) for w in said if "drift apart" in str(w.message)]
    assert len(told) == (not heard)
    assert compressor.steps == (3 * PATIENCE if heard else 0)
