"""Compressed between hosts only, on four ranks of two faked hosts; methods for whole models."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from hasten import GradientCompressor
from hasten.parts.comm.weight_methods import PATIENCE
from parts.comm.compression_kit import LEARNT, METHODS
from ranks import on_ranks


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return on_ranks(
        "parts.comm.compression_scope_jobs:between_hosts", tmp_path_factory.mktemp("four"), 4
    )


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return on_ranks(
        "parts.comm.compression_scope_jobs:whole_models", tmp_path_factory.mktemp("two")
    )


@pytest.mark.parametrize("method", METHODS)
def test_all_ranks_get_the_same_bits_and_nothing_is_lost(four: list[Any], method: str) -> None:
    bounds = {"half": 1e-3, "bf16": 5e-3, "powersgd": 5e-3}  # no memory, or sums in bf16
    for rank in four:
        seen = rank["methods"][method]
        assert seen["same"]
        assert seen["error"] < bounds.get(method, 1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_a_host_sends_what_one_rank_of_two_would(four: list[Any], method: str) -> None:
    for rank in four:
        assert rank["methods"][method]["sent"] == rank["methods"][method]["predicted"]


def test_memory_lies_once_on_each_host(four: list[Any]) -> None:
    for method in LEARNT[1:]:
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
        assert rank["infinite"] == {"finite": [True, True, True, False, True], "stays": True}


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
