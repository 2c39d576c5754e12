"""Ranks that train apart when something goes wrong with one of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from parts.comm.local_rank_jobs import a_rank_is_silent, no_numbers, running_sums
from ranks import on_ranks

pytestmark = pytest.mark.waits


def test_weights_that_are_no_numbers_are_named_on_every_rank_and_taken_over_by_none(
    tmp_path: Path,
) -> None:
    one, other = on_ranks(no_numbers, tmp_path)
    for here, there in zip(one, other, strict=True):
        assert here.startswith("the weights of rank 1 are not finite")
        assert here.endswith("finite True")
        assert there.endswith("finite False")
        assert here.rsplit(";", 1)[0] == there.rsplit(";", 1)[0]


def test_running_sums_become_their_mean_and_constants_stay(tmp_path: Path) -> None:
    for rank in on_ranks(running_sums, tmp_path):
        assert rank["started"] == [0.0, 0.0, 0.0, 0.0]  # those of rank 0
        assert rank["constant"] == [0.0, 0.0]
        assert rank["mean"] == pytest.approx([0.475] * 3)  # 0.1 x 9.5, and rank 0's zero


def test_a_rank_that_never_answers_is_named_within_the_limit(tmp_path: Path) -> None:
    said = on_ranks(a_rank_is_silent, tmp_path)[0]
    assert said.startswith("bringing weights together failed on rank 0 (")
    assert "rank 1 (" in said
    assert "did not answer" in said
    assert said.endswith("whole True")
