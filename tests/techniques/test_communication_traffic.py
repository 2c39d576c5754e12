"""Seconds and bytes of each step's traffic on two ranks: planted waits, and formulas of bytes."""

from __future__ import annotations

from typing import Any

import pytest

from hasten.core.timing import HostClock
from hasten.techniques.layout.ddp import DDP
from ranks import on_ranks
from techniques.communication_traffic_rank_jobs import NAP, PLANS
from tiny import language_job, run, session_of

EXPOSED, HIDDEN = "exposed_comm_seconds", "hidden_communication_seconds"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return on_ranks(
        "techniques.communication_traffic_rank_jobs:told", tmp_path_factory.mktemp("ranks")
    )


@pytest.mark.parametrize("name", PLANS)
def test_exposed_and_hidden_seconds_add_up_and_fit_into_the_step(
    found: list[Any], name: str
) -> None:
    for rank in found:
        for step in rank[name]["steps"]:
            assert step[EXPOSED] > 0
            assert step[HIDDEN] >= 0
            assert step["comm_seconds"] == pytest.approx(step[EXPOSED] + step[HIDDEN])
            parts = (step[k] for k in ("data_seconds", "passes_seconds", "optimizer_seconds"))
            assert step[EXPOSED] + sum(parts) <= step["step_seconds"] * 1.0001


@pytest.mark.parametrize("name", PLANS)
def test_communication_is_a_part_of_the_ledger(found: list[Any], name: str) -> None:
    for rank in found:
        assert rank[name]["split"]["communication"] > 0
        assert all(value is None or value >= 0 for value in rank[name]["split"].values())


@pytest.mark.parametrize("name", ["plain", "accumulated", "late"])
def test_full_gradients_send_what_a_ring_does(found: list[Any], name: str) -> None:
    for rank in found:
        assert {step["comm_bytes"] for step in rank[name]["steps"]} == {rank[name]["sent"]}


def test_compressed_gradients_send_what_was_predicted(found: list[Any]) -> None:
    for rank in found:
        sent = [step["comm_bytes"] for step in rank["int4"]["steps"]]
        assert sent[:2] == [rank["plain"]["sent"]] * 2  # in full, since DDP forms buckets anew
        assert set(sent[2:]) == {rank["int4"]["sent"]}


def test_weights_travel_when_they_are_due(found: list[Any]) -> None:
    for rank in found:
        due = rank["local_steps"]["sent"]
        assert [s["comm_bytes"] for s in rank["local_steps"]["steps"]] == [0, 0, due, 0, 0, due]
        mean = sum(s["comm_bytes"] for s in rank["stream"]["steps"]) / 6
        assert mean == pytest.approx(rank["stream"]["sent"])
        assert all(step[HIDDEN] == 0 for step in rank["local_steps"]["steps"])


def test_gradients_that_leave_after_the_passes_hide_nothing(found: list[Any]) -> None:
    assert all(step[HIDDEN] == 0 for rank in found for step in rank["late"]["steps"])
    assert any(step[HIDDEN] > 0 for rank in found for step in rank["plain"]["steps"])


def test_waiting_for_a_slow_rank_shows_on_the_others(found: list[Any]) -> None:
    # Backward of rank 1 begins so long after that of rank 0 has ended.
    for step in found[0]["one is slow"]["steps"]:
        assert step[EXPOSED] > 0.8 * NAP


def test_traffic_is_told_without_a_clock_too(found: list[Any]) -> None:
    step = found[0]["unclocked"]
    assert step["passes_seconds"] is None
    assert step[EXPOSED] > 0
    assert step["comm_bytes"] == found[0]["plain"]["sent"]


def test_buckets_by_the_link_are_alike_on_all_ranks_and_told(found: list[Any]) -> None:
    assert found[0]["buckets"] == found[1]["buckets"]
    assert " MB for " in found[0]["buckets"]
    with pytest.raises(ValueError, match="0 to measure the link"):
        DDP(bucket_cap_mb=-1)


def test_on_one_rank_nothing_is_told() -> None:
    session = session_of(language_job())
    session.setup.clock = HostClock()
    for metrics in run(session):
        assert metrics.exposed_comm_seconds is None
        assert metrics.comm_seconds is metrics.comm_bytes is None
