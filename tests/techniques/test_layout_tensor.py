"""Layers cut over ranks: the same losses, norms and weights as one process, whatever is cut."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hasten.core.context import JobContext
from hasten.core.technique import Technique
from hasten.machine.environment import World
from hasten.techniques.layout.hybrid import Hybrid
from hasten.techniques.layout.tensor import TensorParallel
from ranks import on_ranks
from techniques.sharded_rank_jobs import Case, outcome
from techniques.tensor_rank_jobs import (
    CASES,
    LONG,
    MESHES,
    REFUSED,
    TERMS,
    cut,
    meshes,
    reference,
    uneven,
)
from tiny import job_context

# Routers and DeepSeek V2's rotary embedding compute in float32 whatever the model's format is.
CLOSE, CLOSE_EXPERTS, CLOSE_SINGLE = 1e-12, 1e-5, 1e-4


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return on_ranks(
        f"techniques.tensor_rank_jobs:{cut.__name__}", tmp_path_factory.mktemp("two"), 2
    )


@pytest.fixture(scope="module")
def two_long(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return on_ranks("techniques.tensor_rank_jobs:cut_long", tmp_path_factory.mktemp("two_long"), 2)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return on_ranks(
        f"techniques.tensor_rank_jobs:{meshes.__name__}", tmp_path_factory.mktemp("four"), 4
    )


def same(found: list[Any], case: Case, name: str) -> None:
    alone, close = outcome(case.session(World())), CLOSE
    if case.dtype is torch.float32:
        close = CLOSE_SINGLE
    elif "deepseek" in case.architecture:
        close = CLOSE_EXPERTS
    one = found[0][name]
    for key in ("losses", "norms", "eval_data"):
        assert one[key] == pytest.approx(alone[key], rel=close), key
    assert one["tokens"] == alone["tokens"]
    assert set(one["weights"]) == set(alone["weights"])
    for weight, numbers in one["weights"].items():
        assert numbers == pytest.approx(alone["weights"][weight], rel=close, abs=close), weight
    for other in found[1:]:
        assert other[name]["losses"] == one["losses"]
        assert other[name]["norms"] == one["norms"]
    assert all(one["proofs"].values())


@pytest.mark.long
@pytest.mark.parametrize("name", LONG)
def test_products_of_these_on_two_ranks_come_to_what_one_comes_to(
    two_long: list[Any], name: str
) -> None:
    same(two_long, CASES[name], name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name not in LONG])
def test_two_ranks_with_half_of_every_layer_come_to_what_one_comes_to(
    two: list[Any], name: str
) -> None:
    same(two, CASES[name], name)


@pytest.mark.slow
@pytest.mark.parametrize("name", MESHES)
def test_products_of_layouts_on_four_ranks_come_to_the_same(four: list[Any], name: str) -> None:
    same(four, MESHES[name], name)


@pytest.mark.parametrize("index", range(2 * len(TERMS)))
def test_cross_entropy_over_a_dealt_out_vocabulary_is_that_of_whole_logits(
    two: list[Any], index: int
) -> None:
    wanted = reference(TERMS[index // 2])
    for rank in two:
        for found, expected in zip(rank["vocabulary"][index], wanted, strict=True):
            assert found == pytest.approx(expected, rel=1e-12, abs=1e-13)


def test_ranks_with_pieces_of_unequal_size_take_the_same_chunks(tmp_path: Path) -> None:
    for rank in on_ranks(f"techniques.tensor_rank_jobs:{uneven.__name__}", tmp_path):
        for found, expected in zip(rank, reference(TERMS[0]), strict=True):
            assert found == pytest.approx(expected, rel=1e-12, abs=1e-13)


def test_what_cannot_be_cut_is_refused_on_every_rank(two: list[Any]) -> None:
    for found in two:
        assert "has a DoRA adapter, which measures whole rows" in found["directions"]
        assert "QuantisedLinear with code of its own" in found["few bits"]
        assert "attention_dropout is 0.1" in found["dropout"]
        assert all(". " not in found[name] for name in REFUSED)


def known(world: int, heads: int = 4, architecture: str = "llama") -> JobContext:
    found = job_context(Case(TensorParallel()).job(), architecture, World(size=world))
    model = replace(found.model, heads=heads, key_value_heads=2)
    return replace(found, model=model)


@pytest.mark.parametrize(
    ("technique", "context", "says"),
    [
        (TensorParallel(), known(3), "the 4 attention heads of this llama can't be dealt out"),
        (TensorParallel(), known(4), "the 2 key and value heads"),
        (TensorParallel(size=2), known(4), "use hybrid with tp: 2"),
        (TensorParallel(), known(2, architecture="gemma2"), "the layers of gemma2 isn't known"),
        (Hybrid(dp=2, tp=2), known(2), "dp 2 x shard 1 x tp 2 x pp 1 is 4 ranks and 2 are running"),
        (Hybrid(dp=2, pp=3), known(6), "3 stages and llama has 2 layers"),
        (Hybrid(dp=2, ep=2), known(2), "no experts to share out"),
    ],
)
def test_what_cannot_be_cut_is_said_in_one_sentence(
    technique: Technique, context: JobContext, says: str
) -> None:
    reasons = technique.unsupported_reasons(context)
    assert says in reasons[0]
    assert ". " not in reasons[0]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"dp": 0}, "dp is 0"),
        ({"ep": 2, "dp": 2, "tp": 2}, "ep goes with dp and shard only, and tp is given too"),
        ({"pp": 2, "ep": 2, "dp": 2}, "and pp is given too"),
        ({"ep": 2, "dp": 3}, "must divide dp x shard, which is 3"),
    ],
)
def test_sizes_that_make_no_mesh_are_refused(settings: dict[str, int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Hybrid(**settings)
