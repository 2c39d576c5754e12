"""Hierarchical on four gloo ranks of two faked hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hasten.core.technique import Fidelity
from hasten.machine.environment import World
from hasten.parts.comm.collective_plan import Route
from hasten.parts.comm.collectives import TopoAwareCollective
from hasten.parts.comm.hierarchical import RoutedBuckets
from hasten.techniques.communication.topology import Hierarchical
from ranks import on_ranks
from tiny import job_context, language_job, tiny_model


@pytest.fixture(scope="module")
def four(tmp_path_factory: Any) -> list[Any]:
    return on_ranks(
        "techniques.communication_topology_rank_jobs:everything", tmp_path_factory.mktemp("four"), 4
    )


@pytest.mark.slow
def test_buckets_by_any_route_train_the_same_model_on_all_ranks(four: list[Any]) -> None:
    for name, bound in {"dense": 1e-6, "flat": 1e-6, "int4": 2e-2}.items():
        found = [rank["by_buckets"][name] for rank in four]
        assert found[0]["error"] < bound
        assert found[0]["buckets"] > 1
        assert len({rank["sum"] for rank in found}) == 1
        assert (found[0]["routed"] > found[0]["buckets"]) == (name != "flat")


def test_the_clock_tells_exposed_from_hidden_traffic(four: list[Any]) -> None:
    for name in ("dense", "flat", "int4"):
        busy, exposed, window = four[0]["by_buckets"][name]["traffic"]
        assert busy > 0
        assert exposed > 0
        assert window > 0


def test_int4_sends_an_eighth_between_hosts_once_buckets_have_names(four: list[Any]) -> None:
    sent = {name: four[0]["by_buckets"][name]["sent"] for name in ("dense", "int4")}
    dense_step = sent["dense"] / 6
    assert (sent["int4"] - 2 * dense_step) / 4 < 0.14 * dense_step


def test_a_nan_of_one_rank_is_seen_by_all_and_owed_by_none(four: list[Any]) -> None:
    for rank in four:
        assert not rank["poisoned"]["finite"]
        assert rank["poisoned"]["owed"] > 0
        assert rank["poisoned"]["same"]


def test_losses_are_those_of_plain_replicas(four: list[Any]) -> None:
    plain = four[0]["sessions"]["plain"]["losses"]
    bounds = {"hierarchical": 1e-5, "bf16": 2e-2, "int8": 2e-2, "int8 accumulated": 2e-2}
    for name, bound in {**bounds, "int8 scaled": 5e-2}.items():
        found = [rank["sessions"][name] for rank in four]
        assert found[0]["losses"] == pytest.approx(plain, rel=bound), name
        assert len({rank["sum"] for rank in found}) == 1, name
        assert all(found[0]["effective"]), found[0]["evidence"]


def test_what_is_owed_survives_a_resume(four: list[Any]) -> None:
    for rank in four:
        found = rank["resumed"]
        assert found["owed"] > 0
        assert found["rest"][0] == pytest.approx(found["whole"][5], rel=1e-6)
        # The first two steps of a process are dense, so the rest is near, not the same.
        assert found["rest"] == pytest.approx(found["whole"][5:], rel=2e-2)


def test_weights_that_drift_apart_end_the_run_and_name_the_rank(four: list[Any]) -> None:
    for rank in four:
        assert "after step 4 the weights of rank 2 are not those of rank 0" in rank["drifted"]


def test_hosts_of_unequal_size_are_an_error_at_the_start_on_all_ranks(tmp_path: Path) -> None:
    for said in on_ranks("techniques.communication_topology_rank_jobs:uneven", tmp_path, 3):
        assert said.startswith("hierarchical: hosts have 2, 1 ranks")


def test_only_codecs_are_lossy() -> None:
    assert Hierarchical().fidelity is Fidelity.ROUNDING
    assert Hierarchical(between="int8").fidelity is Fidelity.LOSSY


def test_a_codec_foretells_what_it_sends() -> None:
    context = job_context(language_job(tiny_model), world=World(0, 0, 2))
    assert Hierarchical().forecast(context).comm_bytes == 1
    assert Hierarchical(between="int4").forecast(context).comm_bytes == pytest.approx(
        0.127, abs=1e-3
    )


@pytest.mark.parametrize(
    ("kind", "wrong", "words"),
    [
        (Hierarchical, {"between": "int3"}, "int8, int4"),
        (Hierarchical, {"topology": "ethernett"}, "did you mean 'ethernet'"),
        (Hierarchical, {"timeout": -1.0}, "more than 0 seconds"),
        (Hierarchical, {"check_every": -1}, "0 for never"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(kind: Any, wrong: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        kind(**wrong)


def test_buckets_need_a_wrapped_module() -> None:
    with pytest.raises(ValueError, match="wrap the module first"):
        RoutedBuckets(TopoAwareCollective("gloo", "ethernet"), Route()).attach(tiny_model())
