"""Gradients reduced late are those that DDP reduces while it computes, by the same hook."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ranks import on_ranks


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return on_ranks("parts.comm.reduction_rank_jobs:both_ways", tmp_path_factory.mktemp("ranks"))


def test_weights_after_some_steps_are_those_of_plain_ddp(found: list[Any]) -> None:
    for rank in found:
        assert rank["late"] == pytest.approx(rank["plain"], rel=1e-12, abs=1e-14)
    assert found[0]["late"] == found[1]["late"]


def test_running_sums_are_those_of_rank_0_on_every_rank(found: list[Any]) -> None:
    assert found[0]["late buffers"] == found[1]["late buffers"]
    assert found[0]["late buffers"] == pytest.approx(found[0]["plain buffers"], rel=1e-12)


def test_a_communication_hook_sees_every_bucket_once_a_step(found: list[Any]) -> None:
    for rank in found:
        assert rank["late sent"] == rank["plain sent"] > 0


def test_a_weight_without_a_gradient_is_averaged_as_zero(found: list[Any]) -> None:
    # Only rank 0 used it, with a gradient of 3.
    assert [rank["rarely used"] for rank in found] == [1.5, 1.5]


def test_failed_passes_of_one_rank_leave_no_trace(tmp_path: Path, found: list[Any]) -> None:
    for rank in found:
        assert rank["after failures"] == rank["late"]
