"""Messages in pieces, against broadcasts of whole ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from parts.comm.full_duplex_jobs import COUNTS, DTYPES
from ranks import on_ranks

WORLD = 3


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return on_ranks(
        "parts.comm.full_duplex_jobs:all_sizes", tmp_path_factory.mktemp("pieces"), WORLD
    )


def test_every_size_arrives_as_it_was_sent(found: list[Any]) -> None:
    assert len(found) == WORLD
    for rank in found:
        assert len(rank) == len(DTYPES) * len(COUNTS)
        assert all(case["gathered"] and case["exchanged"] for case in rank)


def test_only_what_is_longer_than_a_piece_is_cut(found: list[Any]) -> None:
    for case in (case for rank in found for case in rank):
        cut = case["pieces"] > 1
        assert case["issued"]["all_to_all_single"] == case["pieces"]
        assert case["issued"]["all_gather"] == (case["pieces"] if cut else 0)
    assert {1, 2, 3, 8} <= {case["pieces"] for case in found[0]}


def test_the_arrival_of_the_last_piece_is_told_once(found: list[Any]) -> None:
    assert {case["told"] for rank in found for case in rank} == {1}


def test_a_rank_that_has_left_is_an_error(tmp_path: Path) -> None:
    assert on_ranks("parts.comm.full_duplex_jobs:lost_rank", tmp_path, 2) == [
        "RuntimeError",
        "left",
    ]
