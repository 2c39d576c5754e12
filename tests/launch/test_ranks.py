"""Two ranks train as one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hasten.launch.ranks import rank_environment
from hasten.machine.environment import World
from rank_jobs import CASES, train_all
from ranks import on_ranks


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return on_ranks(train_all, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return train_all(World())


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_train_as_one_process_does(
    found: list[Any], alone: dict[str, Any], case: str
) -> None:
    ours, theirs = found[0][case], alone[case]
    tolerance = 2e-2 if "masters" in case else 1e-6
    assert ours["replicated"]
    assert ours["sends buffers"] is False  # rotary tables are computed, not sent
    assert not theirs["replicated"]
    assert ours["tokens"] == theirs["tokens"]
    assert ours["trained"] == theirs["trained"]
    for key in ("losses", "norms", "weights"):
        assert ours[key] == pytest.approx(theirs[key], rel=tolerance, abs=tolerance)
    assert ours["eval_data"] == pytest.approx(theirs["eval_data"], rel=tolerance)


@pytest.mark.parametrize("case", CASES)
def test_replicas_stay_identical_and_report_the_same(found: list[Any], case: str) -> None:
    assert found[0][case] == found[1][case]


def test_a_stop_asked_of_one_rank_stops_all_after_the_same_step(found: list[Any]) -> None:
    assert [rank["stopped by one rank"] for rank in found] == [2, 2]


def test_ranks_of_a_relative_folder_meet_at_an_absolute_place() -> None:
    found = rank_environment(0, 2, Path("runs/here"), threads=3)
    assert [found[n] for n in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS")] == list(
        "0023"
    )
    assert found["HASTEN_RENDEZVOUS"] == str(Path.cwd() / "runs/here/rendezvous")
