"""The key ``layout`` is a line of the plan: a technique by name, or the sizes of a mesh."""

from __future__ import annotations

from typing import Any

import pytest

from hasten.core.technique import Technique
from hasten.errors import InputError
from hasten.recipe.build import requested_plan
from hasten.recipe.schema import Recipe, recipe_from
from hasten.techniques.checkpoint import Checkpoints
from hasten.techniques.layout.ddp import DDP
from hasten.techniques.layout.fsdp import FSDP2
from hasten.techniques.layout.hybrid import Hybrid
from hasten.techniques.layout.tensor import TensorParallel


def read(**keys: Any) -> Recipe:
    given = {"model": "deepseek-llm-tiny", "dataset": "stdlib", "max_steps": 1, **keys}
    return recipe_from(given, "a recipe")


@pytest.mark.parametrize(
    ("layout", "technique"),
    [
        ("fsdp2", FSDP2()),
        ("ddp", DDP()),
        ("tensor-parallel", TensorParallel()),
        ({"fsdp2": {"reshard": False}}, FSDP2(reshard=False)),
        ({"dp": 2, "tp": 2}, Hybrid(dp=2, tp=2)),
        ({"shard": 4, "sequence": False}, Hybrid(shard=4, sequence=False)),
    ],
)
def test_it_joins_the_plan_and_the_resolved_recipe_has_it_there_alone(
    layout: Any, technique: Technique
) -> None:
    recipe = read(layout=layout, plan=["packed"])
    assert technique in list(requested_plan(recipe))
    assert recipe.layout is None
    again = recipe_from(recipe.model_dump(), "its resolved form")
    assert requested_plan(again) == requested_plan(recipe)


def test_it_stands_beside_the_keys_of_checkpoints() -> None:
    plan = list(requested_plan(read(layout="ddp", checkpoint_every=5)))
    assert plan == [DDP(), Checkpoints(5)]


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        ("fsdp3", "did you mean 'fsdp2'"),
        ("rings", "layouts: ddp"),
        ({"sequense": False}, "did you mean 'sequence'"),
        ({"dp": 2, "tp": 0}, "layout's tp is 0"),
        ({"dp": True}, "layout's dp is True"),
        (4, "give a name"),
        ({}, "give a name"),
        ({"dp": 2, "rings": 2}, "sizes: dp, shard, tp, pp, ep"),
    ],
)
def test_what_is_no_layout_is_refused_with_one_sentence(layout: Any, says: str) -> None:
    with pytest.raises(InputError, match="a recipe: ") as told:
        read(layout=layout)
    assert says in str(told.value)


def test_two_layouts_are_one_too_many() -> None:
    with pytest.raises(InputError, match="fsdp2"):
        requested_plan(read(layout="fsdp2", plan=["ddp"]))
