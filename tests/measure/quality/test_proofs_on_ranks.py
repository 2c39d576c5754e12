"""Proofs on two ranks: what they find is what one process's float64 loop says."""

from __future__ import annotations

from typing import Any

import pytest

from hasten.core.plan import Plan
from hasten.measure.quality.gradients import reference
from hasten.measure.quality.requirements import COMMUNICATION, FLOAT32, LEAK_FLOAT32
from hasten.measure.workers import merge_replies
from measure.quality.verify_plants import bench
from ranks import on_ranks

Found = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    folder = tmp_path_factory.mktemp("proofs")
    reference(bench(folder), Plan())
    return on_ranks("measure.quality.verification_rank_jobs:proofs", folder)


@pytest.fixture(scope="module")
def found(ranks: list[Found]) -> Found:
    return {name: merge_replies([rank[name] for rank in ranks]) for name in ranks[0]}


@pytest.mark.parametrize(
    "way", ["planned", "whole", "single", "padded", "sharded", "cut layers", "stages"]
)
def test_records_dealt_to_ranks_have_the_gradient_of_one_process(found: Found, way: str) -> None:
    assert found[way]["ranks"] == 2
    assert found[way]["error"] < FLOAT32 / 10
    assert found[way]["loss_error"] < 1e-6


def test_every_replica_is_looked_at_and_of_parts_the_whole(ranks: list[Found]) -> None:
    assert all("error" in rank["planned"] for rank in ranks)
    assert ["error" in rank["sharded"] for rank in ranks] == [True, False]


def test_numbers_that_travel_in_sixteen_bits_round_and_no_more(found: Found) -> None:
    assert FLOAT32 < found["rounded"]["error"] < COMMUNICATION


def test_a_mean_taken_for_a_sum_and_a_wire_that_adds_are_seen(found: Found) -> None:
    assert found["unscaled"]["error"] == pytest.approx(0.5, rel=1e-3)
    assert found["louder"]["error"] == pytest.approx(0.02, rel=1e-2)
    assert found["louder"]["error"] > COMMUNICATION


def test_documents_keep_their_losses_and_two_runs_their_bits(found: Found) -> None:
    assert found["leak"]["change"] < LEAK_FLOAT32
    assert found["losses"] == found["again"]
    assert len(set(found["losses"]["weights"])) == 1  # replicas


def test_a_training_ends_at_its_tokens_and_ranks_apart_near_them(found: Found) -> None:
    assert found["train"]["tokens"] == 600
    assert found["train"]["eval_loss"] > 0
    apart = found["apart"]
    assert "failed" not in apart, apart
    assert apart["eval_loss"] > 0
    assert 0.5 * 600 < apart["tokens"] < 2 * 600
