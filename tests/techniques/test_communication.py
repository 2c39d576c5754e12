"""Whole runs on two ranks with compressed gradients: what learns, what is skipped, what resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from compression_session_jobs import between_hosts, everything
from hasten.core.setup import NoCompression
from hasten.errors import InputError
from hasten.integrations.optimized_trainer import OptimizedTrainer
from hasten.parts.comm.gradient_compressor import GradientCompressor
from hasten.techniques.communication.compress import Half, PowerSGD, Quantised, TopK, technique_of
from hasten.techniques.communication.local import LocalSteps, Stream
from ranks import on_ranks
from tiny import language_job, session_of

COMMUNICATIONS = ("half", "quantised", "topk", "powersgd")
BESIDE = ("gradient_accumulation", "adaptive_batch", "bf16_master_weights", "lora", "experts")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return on_ranks(everything, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", [*COMMUNICATIONS, *BESIDE])
def test_a_run_acts_learns_and_keeps_replicas_alike(found: list[Any], name: str) -> None:
    one, two = (rank["runs"][name] for rank in found)
    assert one["weights"] == two["weights"]
    assert one["norms"] == two["norms"]
    assert one["effective"], one["said"]
    assert "bytes sent by this rank" in one["said"]
    assert one["losses"][-1] < one["losses"][0]


@pytest.mark.parametrize(("name", "bound"), [("half", 2e-3), ("quantised", 0.1), ("topk", 0.5)])
def test_the_first_losses_are_those_of_full_gradients(
    found: list[Any], name: str, bound: float
) -> None:
    plain = found[0]["runs"]["plain"]["losses"]
    losses = found[0]["runs"][name]["losses"]
    assert losses[:3] == pytest.approx(plain[:3], rel=1e-6)  # two steps under DDP go in full
    assert losses == pytest.approx(plain, rel=bound)


def test_a_checkpoint_has_the_memory_of_each_rank(found: list[Any]) -> None:
    for rank in found:
        seen = rank["resumed"]
        assert seen["own memory"]
        assert seen["ranks"] == 2
        assert seen["rest"] == pytest.approx(seen["whole"], rel=0.02)
    assert found[0]["resumed"]["weights"] == found[1]["resumed"]["weights"]


def test_another_number_of_ranks_goes_on_with_the_mean(found: list[Any]) -> None:
    for rank in found:
        assert rank["merged"]["mean"] == 3.0
        assert "mean of 3 ranks" in rank["merged"]["said"]


def test_between_hosts_a_run_learns_resumes_and_keeps_replicas_alike(tmp_path: Path) -> None:
    four = on_ranks(between_hosts, tmp_path, world=4)
    for name in ("quantised", "powersgd"):
        found = [rank[name] for rank in four]
        assert len({tuple(rank["weights"]) for rank in found}) == 1
        for rank in found:
            assert rank["effective"], rank["said"]
            assert "by its host to others" in rank["said"]
            assert rank["losses"][-1] < rank["losses"][0]
            assert rank["own memory"]
            assert (rank["owned"] > 0) == (rank in (found[0], found[2]))
            assert rank["rest"] == pytest.approx(rank["losses"][5:], rel=0.02)
            assert "the memory of 3 ranks was left behind" in rank["other ranks"]


def test_a_step_that_is_infinite_on_one_rank_is_skipped_by_all(found: list[Any]) -> None:
    one, two = (rank["overflow"] for rank in found)
    assert one["skipped"] == two["skipped"] == 1
    assert one["weights"] == two["weights"]
    assert one["losses"][-1] < one["losses"][0]


def test_a_loss_scale_that_falls_is_followed(found: list[Any]) -> None:
    one, two = (rank["scaled"] for rank in found)
    assert 0 < one["skipped"] == two["skipped"] < 30
    assert one["weights"] == two["weights"]
    assert one["losses"][-1] < one["losses"][0]


@pytest.mark.parametrize(("name", "said"), [("switch", "quantised"), ("part", "topk(ratio=0.1")])
def test_the_optimized_trainer_compresses(found: list[Any], name: str, said: str) -> None:
    one, two = (rank["trainer"][name] for rank in found)
    assert one["switch"].startswith(said)
    assert one["sum"] == two["sum"]
    assert one["losses"][-1] < one["losses"][0]


def test_one_rank_has_the_plain_wire() -> None:
    for technique in (Half(), Quantised(), TopK(), PowerSGD()):
        session = session_of(language_job(), technique)
        assert isinstance(session.setup.communication, NoCompression)
        assert not technique.check_effect(session).effective


@pytest.mark.parametrize(
    ("method", "technique"),
    [
        ("half", Half("fp16")),
        ("bf16", Half()),
        ("int8", Quantised()),
        ("int4", Quantised(4)),
        ("topk", TopK(0.05, dense_share=0.0)),
        ("powersgd", PowerSGD(dense_share=0.0)),
        ("diloco", LocalSteps(every=20)),
        ("stream", Stream()),
    ],
)
def test_a_compressor_stands_for_its_technique(method: str, technique: Any) -> None:
    assert technique_of(GradientCompressor(0.05, method, "gloo")) == technique


def test_a_compressor_between_hosts_stands_for_one_too() -> None:
    compressor = GradientCompressor(0.1, "topk", "gloo", scope="hosts")
    assert technique_of(compressor) == TopK(0.1, dense_share=0.0, scope="hosts")


def test_a_switch_that_is_no_compression_is_refused() -> None:
    for compressor in (
        GradientCompressor(sparsity_method="none", communication_backend="gloo"),
        GradientCompressor(dense_steps=5, communication_backend="gloo"),
    ):
        with pytest.raises(InputError):
            OptimizedTrainer(None, None, None, compress_gradients=compressor)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (Half, {"dtype": "fp8"}),
        (Quantised, {"bits": 2}),
        (Quantised, {"dense_share": 1.5}),
        (TopK, {"ratio": 0.0}),
        (TopK, {"momentum": 1.0}),
        (PowerSGD, {"rank": 0}),
        (PowerSGD, {"check_every": -1}),
        (Half, {"scope": "rack"}),
        (TopK, {"minimum": -1}),
    ],
)
def test_impossible_settings_are_refused(kind: Any, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r".+"):
        kind(**wrong)
