"""Weights that one rank of a host has built arrive on the others, the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from hasten.parts.distributed.weight_broadcast import senders
from parts.distributed.arrival_rank_jobs import CASES
from ranks import on_ranks


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return on_ranks("parts.distributed.arrival_rank_jobs:train", tmp_path_factory.mktemp("arrival"))


@pytest.mark.parametrize("name", CASES)
def test_a_run_from_skeletons_is_that_from_models(found: list[Any], name: str) -> None:
    for rank, seen in enumerate(r[name] for r in found):
        assert seen["built"] == (rank == 0)
        assert seen["alike"]
        assert not seen["meta"]
        assert seen["losses"][0] == seen["losses"][1]
        assert seen["sent"] >= 4 * seen["model"]  # buffers come on top


def test_the_skeleton_of_another_model_is_refused(found: list[Any]) -> None:
    for rank in found:
        assert "('weight', (4, 3), 'torch.float32') for ('weight', (3, 3)" in rank["wrong"]


def test_each_host_has_its_own_sender_where_it_can(tmp_path: Path) -> None:
    four = on_ranks("parts.distributed.arrival_rank_jobs:on_hosts", tmp_path, 4)
    assert [r["each"]["equal"] for r in four] == [
        [True, True, False, False],
        [True, True, False, False],
        [False, False, True, True],
        [False, False, True, True],
    ]
    assert all(r["first"]["equal"] == [True] * 4 for r in four)
    assert {r["first"]["sent"] for r in four} == {4 * (15 + 3)}


@settings(deadline=None)
@given(some.lists(some.tuples(some.sampled_from("abc"), some.booleans()), min_size=1, max_size=9))
def test_every_rank_is_in_one_group_whose_first_has_the_model(told: list[tuple[str, bool]]) -> None:
    hosts, reads = [host for host, _ in told], [reading for _, reading in told]
    if not any(reads):
        with pytest.raises(ValueError, match="no rank has built"):
            senders(hosts, reads)
        return
    groups = senders(hosts, reads)
    assert sorted(rank for group in groups for rank in group) == list(range(len(told)))
    for group in groups:
        assert reads[group[0]]
        for rank in group[1:]:
            own = [r for r, host in enumerate(hosts) if host == hosts[rank] and reads[r]]
            assert group[0] in own or not own
