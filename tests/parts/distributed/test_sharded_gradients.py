"""Nothing that was given to a codec in a reduce-scatter is lost, and its bytes are foretold."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from hasten.parts.comm.compression_settings import CompressionSettings
from hasten.parts.distributed.compressed_shards import ShardedGradients, row_codec
from hasten.parts.distributed.fsdp import ShardGroup, Weight, rows_of, values_of
from parts.distributed.sharded_gradients_jobs import DENSE, METHODS, PASSES, STEPS
from ranks import on_ranks

CPU = torch.device("cpu")
# Of half formats: what they round away once (bf16: 2 ** -9) is lost.
ROUNDED = {"half": 2**-11, "bf16": 2**-8}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return on_ranks(
        "parts.distributed.sharded_gradients_jobs:parts_on_two", tmp_path_factory.mktemp("two")
    )


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return on_ranks(
        "parts.distributed.sharded_gradients_jobs:parts_on_four", tmp_path_factory.mktemp("four"), 4
    )


@pytest.mark.parametrize("method", METHODS)
def test_what_was_given_is_applied_or_remembered(two: list[Any], method: str) -> None:
    """Over several passes a step, a step that was given up, shards of unequal size."""
    for rank in two:
        found = rank[method]
        near = ROUNDED.get(method, 0.0) * found["largest"] + 2e-6
        assert found["apart"] < near
        assert bool(found["remembers"]) == (method not in ROUNDED)
        assert not [name for name in found["remembers"] if "frozen" in name]


@pytest.mark.parametrize("method", METHODS)
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
    for rank in four:  # an all-reduce in a ring of two sends as many bytes as there are
        found = rank[method]
        full = DENSE * 4 * found["numbers"]
        assert found["sent"] == full + (STEPS - DENSE) * found["predicted"]


@settings(max_examples=60, deadline=None)
@given(
    some.lists(some.lists(some.integers(1, 9), min_size=1, max_size=3), min_size=1, max_size=4),
    some.integers(1, 5),
    some.integers(0, 2**31),
)
def test_rows_are_laid_out_as_the_engine_does(
    shapes: list[list[int]], ranks: int, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    weights = tuple(Weight(f"w{i}", tuple(shape)) for i, shape in enumerate(shapes))
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


def test_a_method_that_needs_whole_gradients_is_refused() -> None:
    with pytest.raises(ValueError, match="powersgd needs whole gradients"):
        row_codec(CompressionSettings(method="powersgd"))
    with pytest.raises(ValueError, match="momentum correction needs whole gradients"):
        row_codec(CompressionSettings(method="topk", momentum=0.5))


def test_a_module_that_is_not_sharded_is_refused() -> None:
    with pytest.raises(ValueError, match="call fully_shard before"):
        ShardedGradients(CompressionSettings(method="int8")).attach(torch.nn.Linear(3, 3))


def test_the_memory_of_another_model_is_refused() -> None:
    exchange = ShardedGradients(CompressionSettings(method="int8"))
    exchange.groups = [ShardGroup(None, (Weight("w", (4, 3)),), 2)]
    state = {"method": "int8", "steps": 4, "residual": {"w": torch.ones(12)}, "way": {}}
    exchange.load(state)
    assert torch.equal(exchange.state()["residual"]["w"], torch.ones(12))
    assert exchange.steps == 4
    with pytest.raises(ValueError, match="remembers 5 numbers of w and it has 12"):
        exchange.load({**state, "residual": {"w": torch.ones(5)}})
    with pytest.raises(ValueError, match="the memory is of int4"):
        exchange.load({**state, "method": "int4"})
