"""Whole runs on shards with compressed gradients: what learns, resumes, is skipped and refused."""

from __future__ import annotations

from typing import Any

import pytest

from ranks import on_ranks
from techniques.sharded_communication_jobs import BESIDE, COMMUNICATIONS, REFUSED


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return on_ranks("techniques.sharded_communication_jobs:on_two", tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return on_ranks(
        "techniques.sharded_communication_jobs:on_four", tmp_path_factory.mktemp("four"), 4
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", [*map(str, COMMUNICATIONS), *BESIDE, "experts"])
def test_a_run_on_shards_acts_and_learns(found: list[Any], name: str) -> None:
    one, two = (rank["runs"][name] for rank in found)
    assert one["losses"] == two["losses"]
    assert one["norms"] == two["norms"]
    assert one["effective"], one["said"]
    assert "bytes sent by this rank" in one["said"]
    assert one["losses"][-1] < one["losses"][0]


@pytest.mark.parametrize(("place", "bound"), [(0, 2e-3), (1, 0.02), (2, 0.1), (3, 0.5)])
def test_losses_stay_near_those_of_full_gradients(
    found: list[Any], place: int, bound: float
) -> None:
    plain = found[0]["runs"]["plain"]["losses"]
    losses = found[0]["runs"][str(COMMUNICATIONS[place])]["losses"]
    assert losses[0] == plain[0]
    assert losses == pytest.approx(plain, rel=bound)
    assert losses != plain


@pytest.mark.slow
def test_bytes_of_each_step_are_those_of_its_passes(found: list[Any], four: list[Any]) -> None:
    """A step sends what a pass does, or its passes together; how long it took isn't known."""
    for rank in found:
        runs = rank["runs"]
        for name, case in runs.items():
            assert sum(case["sent"]) == case["sent in all"] if name != "plain" else True
        assert set(runs["plain"]["sent"]) == {None}
        assert set(runs[str(COMMUNICATIONS[0])]["sent"]) == {
            runs[str(COMMUNICATIONS[0])]["a pass or step"]
        }
        assert set(runs["accumulated"]["exposed"]) == {None}
    for rank in four:
        case = rank["pieces"]
        assert sum(case["sent"]) == case["sent in all"]
        assert case["sent"][-1] == case["a pass or step"]  # past the dense start


def test_a_start_that_never_ends_is_the_plain_layout(found: list[Any]) -> None:
    runs = found[0]["runs"]
    assert runs["dense"]["losses"] == runs["plain"]["losses"]
    assert not runs["dense"]["effective"]


@pytest.mark.parametrize("way", ["resumed", "from copies of the whole"])
def test_a_checkpoint_has_the_memory_of_each_rank(found: list[Any], way: str) -> None:
    """What DDP's exchange remembers is of the same weights, so that a run may change over."""
    for rank in found:
        seen = rank[way]
        assert seen["own memory"]
        assert seen["ranks"] == 2
        assert seen["rest"] == pytest.approx(seen["whole"], rel=0.02)


def test_another_number_of_ranks_goes_on_with_the_mean(found: list[Any]) -> None:
    for rank in found:
        assert rank["merged"]["mean"] == 3.0
        mean, left, wrong = rank["merged"]["said"]
        assert "mean of 3 ranks" in mean
        assert "the memory of 3 ranks was left behind" in left
        assert "remembers 3 numbers" in wrong
        assert "resume with the plan that wrote it" in wrong


def test_a_step_that_is_infinite_on_one_rank_is_skipped_by_all(found: list[Any]) -> None:
    one, two = (rank["overflow"] for rank in found)
    assert one["skipped"] == two["skipped"] == 1
    assert one["losses"] == two["losses"]
    assert one["losses"][-1] < one["losses"][0]


@pytest.mark.parametrize("name", ["pieces", "cut layers", "pieces of cut layers"])
def test_copies_exchange_small_gradients_and_stay_alike(four: list[Any], name: str) -> None:
    """Their weights are compared after each step."""
    for rank in four:
        seen = rank[name]
        assert seen["effective"], seen["said"]
        assert ("to other copies" in seen["said"]) == (name != "pieces of cut layers")
        assert seen["losses"] == four[0][name]["losses"]
        assert seen["losses"][0] == pytest.approx(seen["plain"][0], rel=1e-6)
        assert seen["losses"] == pytest.approx(seen["plain"], rel=0.02)
    held = [rank[name]["held norms"] for rank in four]
    if name != "pieces":  # ranks that share a layer hold its norms whole
        assert held[0] == held[1]
        assert held[2] == held[3]


def test_copies_go_on_with_the_memory_of_their_shards(four: list[Any]) -> None:
    for rank in four:
        assert rank["resumed"]["own memory"]
        assert rank["resumed"]["rest"] == pytest.approx(rank["resumed"]["whole"], rel=0.02)


WORDS = {
    "matrices": "powersgd needs whole gradients",
    "momentum": "momentum correction needs whole gradients",
    "apart": "take half, quantised or topk",
    "no host": "has one copy of the model",
    "same examples": "no gradients travel between ranks",
}


def test_what_cannot_enter_is_refused_in_one_sentence(found: list[Any], four: list[Any]) -> None:
    for rank in found:
        assert set(rank["refused"]) == set(REFUSED)
        for name, words in WORDS.items():
            assert words in rank["refused"][name], name
            assert ". " not in rank["refused"][name]
    assert "set scope: hosts" in four[0]["refused"]["everywhere"]
    assert "take half as the communication" in four[0]["refused"]["blocks"]
