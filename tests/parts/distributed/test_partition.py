"""The cut of a model into stages against every cut there is; places in a mesh."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hasten.parts.comm.groups import MeshSizes
from hasten.parts.distributed.pipeline.stages import (
    LanguageModel,
    balanced_layers,
    work_per_token,
)
from hasten.parts.nn.losses import WholeLogitsLoss
from pipeline_rank_jobs import language_model


def bottleneck(costs: list[float], sizes: tuple[int, ...]) -> float:
    """The cost of the slowest stage of a cut."""
    found, start = [], 0
    for size in sizes:
        found.append(math.fsum(costs[start : start + size]))
        start += size
    return max(found)


COSTS = st.lists(st.floats(0, 10), min_size=1, max_size=8)


def every_cut(layers: int, stages: int) -> list[tuple[int, ...]]:
    """All ways to give each stage one layer at least."""
    cuts = itertools.combinations(range(1, layers), stages - 1)
    return [tuple(b - a for a, b in itertools.pairwise((0, *c, layers))) for c in cuts]


@given(COSTS, st.integers(1, 5))
def test_no_other_cut_has_a_faster_slowest_stage(costs: list[float], stages: int) -> None:
    if stages > len(costs):
        with pytest.raises(ValueError, match=f"{len(costs)} layers can't be cut"):
            balanced_layers(costs, stages)
        return
    found = balanced_layers(costs, stages)
    assert sum(found) == len(costs)
    assert min(found) >= 1
    best = min(bottleneck(costs, cut) for cut in every_cut(len(costs), stages))
    assert bottleneck(costs, found) == pytest.approx(best, rel=1e-6, abs=1e-12)


def test_of_equal_bottlenecks_the_evenest_cut_is_taken() -> None:
    assert balanced_layers([1, 1, 1, 5, 1, 1], 3) == (3, 1, 2)  # and not 2, 2, 2 or 1, 3, 2
    assert balanced_layers([1] * 6, 3) == (2, 2, 2)


def test_a_large_head_leaves_the_last_stage_fewer_layers() -> None:
    assert sorted(balanced_layers([*[1.0] * 7, 3.0], 4)[:3]) == [2, 2, 3]
    assert balanced_layers([*[1.0] * 7, 3.0], 4)[-1] == 1
    model = language_model("llama")
    *others, last = LanguageModel(WholeLogitsLoss(model)).costs()
    assert set(others) == {work_per_token(model.model.layers[0])}
    assert last == others[0] + model.lm_head.weight.numel()


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -1.0])
def test_costs_that_are_no_costs_are_refused(wrong: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        balanced_layers([1.0, wrong], 2)


def test_work_counts_matrices_and_the_experts_that_a_token_meets() -> None:
    layer = nn.Module()
    layer.experts = nn.ModuleList([nn.Linear(4, 6, bias=False) for _ in range(8)])
    layer.gate = nn.Linear(4, 8)
    assert work_per_token(layer, active=2 / 8) == 4 * 6 * 2 + 4 * 8
    assert work_per_token(nn.LayerNorm(5)) == 10  # no matrix: what there is


sizes = st.integers(1, 4)


@given(sizes, sizes, sizes, sizes)
def test_partners_are_neighbours_and_every_share_has_as_many(
    dp: int, shard: int, tp: int, pp: int
) -> None:
    mesh = MeshSizes(dp, shard, tp, pp)
    places = [(mesh.data_rank(rank), mesh.stage(rank)) for rank in range(mesh.size)]
    assert places == sorted(places)
    counts = [places.count((d, s)) for d in range(mesh.data_size) for s in range(pp)]
    assert counts == [tp] * mesh.data_size * pp
    mesh.check(dp * shard * tp * pp)


def test_a_product_that_is_not_the_number_of_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="dp 2 x shard 1 x tp 2 x pp 1 is 4 ranks and 3 are run"):
        MeshSizes(dp=2, tp=2).check(3)
    with pytest.raises(ValueError, match="tp is 0"):
        MeshSizes(tp=0)
    with pytest.raises(ValueError, match="ep is 4 and must divide dp x shard, which is 2"):
        MeshSizes(dp=2, tp=2, ep=4)
