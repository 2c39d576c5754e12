"""A checkpoint of stages is that of one process: it is read as stages, as pieces, or by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hasten.core.state import order_of
from hasten.errors import InputError
from hasten.parts.optim.weight_average import decayed_groups
from ranks import on_ranks
from techniques.expert_checkpoint_jobs import ALL, FIRST
from techniques.pipeline_state_jobs import CASES, LONG, ON_FOUR

WITHIN = 2e-5  # float32, a step of AdamW after three
ROUGHER = {"tied, masters": 1e-2}  # bf16 on one side in another order


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return on_ranks("techniques.pipeline_state_jobs:on_two", tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return on_ranks("techniques.pipeline_state_jobs:on_four", tmp_path_factory.mktemp("four"), 4)


@pytest.fixture(scope="module")
def four_long(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return on_ranks(
        "techniques.pipeline_state_jobs:on_four_long", tmp_path_factory.mktemp("long"), 4
    )


def check(resumed: dict[str, Any], name: str, way: str) -> None:
    case, within = resumed[f"{name}: {way}"], ROUGHER.get(name, WITHIN)
    assert case["steps"] == ALL - FIRST
    assert case["weights"] < within
    assert case["losses"] < within
    assert case["biases"]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_pipeline_goes_on_as_if_it_had_never_stopped(two: list[Any], name: str) -> None:
    case = two[0]["resumed"][f"{name}: ranks to ranks"]
    assert case == {"steps": ALL - FIRST, "weights": 0.0, "losses": 0.0, "biases": True}


@pytest.mark.parametrize("way", ["one to ranks", "ranks to one"])
@pytest.mark.parametrize("name", CASES)
def test_its_checkpoint_is_one_of_a_single_process(two: list[Any], name: str, way: str) -> None:
    check(two[0]["resumed"], name, way)


@pytest.mark.parametrize("name", ["plain", "tied"])
def test_another_layout_goes_on_from_it(two: list[Any], name: str) -> None:
    check(two[0]["resumed"], name, "ranks to another layout")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "name"),
    [("four", name) for name in ON_FOUR if name not in LONG]
    + [pytest.param("four_long", name, marks=pytest.mark.long) for name in LONG],
)
def test_copies_and_pieces_of_stages_do_the_same(
    request: pytest.FixtureRequest, ranks: str, name: str
) -> None:
    four = request.getfixturevalue(ranks)
    ways = ["one to ranks", "ranks to one", "ranks to ranks"]
    for way in ways + ["ranks to another layout"] * ("experts" not in name):
        check(four[0]["resumed"], name, way)


def test_what_the_wire_left_out_is_remembered_after_a_resume(four: list[Any]) -> None:
    for rank in four:
        assert rank["wired"]["alike"]
        assert rank["wired"]["remembered"] > 0
    assert four[0]["wired"]["losses"] < 1e-3
    assert four[0]["wired"]["on_ddp"] > 0  # a rank goes on with what it knows of its own weights


def test_what_cannot_be_put_together_is_said_on_every_rank(two: list[Any]) -> None:
    for rank in two:
        moments, model = rank["refused"]
        assert moments.startswith("checkpoints: compact_adamw keeps moments in blocks of its own")
        assert model.startswith("the checkpoint is of another model")


@given(st.lists(st.sampled_from([(3, 4), (5,), (2, 3, 4), (1,)]), min_size=1, max_size=8))
def test_an_order_is_the_optimizers_own(shapes: list[tuple[int, ...]]) -> None:
    named = [(f"w{i}", torch.nn.Parameter(torch.zeros(s))) for i, s in enumerate(shapes)]

    def factory(given: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(decayed_groups(given, 0.1), fused=True)

    held = [p for group in factory(iter(named)).param_groups for p in group["params"]]
    names = {id(p): name for name, p in named}
    assert order_of(factory, named) == [names[id(p)] for p in held]


def test_an_optimizer_that_exists_already_has_no_order_of_other_weights(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    there = torch.optim.AdamW([weight])
    with pytest.raises(InputError, match="give a function that builds one"):
        order_of(lambda named: there, [("w", weight)])
