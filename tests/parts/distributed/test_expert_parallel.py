"""Experts on several ranks compute what they compute in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hasten.parts.distributed.expert_parallel import expert_layers, holds_part, layer_of
from parts.distributed.expert_rank_jobs import DRAWS, MICRO_BATCHES, STEPS, Experts, block, drawn
from ranks import on_ranks

WORLD = 4
ROW, INDEX = 32, 4  # numbers of a row, bytes of an expert's number on its way
TOP_K = 2


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return on_ranks(
        "parts.distributed.expert_rank_jobs:all_parts", tmp_path_factory.mktemp("experts"), WORLD
    )


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
        assert case["lone"] < largest, name  # gathered, the first rank's block runs by itself


def test_each_rank_holds_its_share_and_no_more(found: list[Any]) -> None:
    for rank in found:
        for name, case in rank["blocks"].items():
            size = 4 if "groups of 4" in name else 2
            assert case["held"] * size == case["of"]


def test_a_rank_waits_for_its_device_once_a_pass(found: list[Any]) -> None:
    """For the lengths of messages; not once more to find rows and pairs, nor on the way back."""
    for rank in found:
        assert [place.partition(":")[2] for place in rank["waits"]] == [
            " sent, got, pairs = torch.stack([leaving[:, 0], coming[:, 0], coming[:, 1]]).tolist()"
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
    uneven, none, groups = found[0]["refusals"]
    assert uneven.startswith("this module has 5 experts, which 4 ranks can't share evenly")
    assert none == "Linear has no layers of stacked experts to share out over ranks"
    assert groups == "4 ranks can't form groups of 5: choose a divisor of 4"
    assert found[1]["refusals"] == found[0]["refusals"]


def test_layers_are_found_by_their_stacked_weights() -> None:
    """A router has a number of experts too, and one weight with a row for each."""
    assert list(expert_layers(block("deepseek_v3", torch.float32))) == ["experts"]
    assert list(expert_layers(Experts(3))) == [""]
    assert expert_layers(nn.Linear(2, 2)) == {}


def test_a_weight_that_was_not_shared_out_belongs_to_no_layer() -> None:
    weight = nn.Parameter(torch.zeros(2))
    assert not holds_part(weight)
    with pytest.raises(ValueError, match="no rank's part"):
        layer_of(weight)
