"""Checkpoints and saved models of experts that lie on several ranks are those of one process."""

from __future__ import annotations

from typing import Any

import pytest

from ranks import on_ranks
from techniques.expert_checkpoint_jobs import ALL, FIRST, PLANS


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return on_ranks(
        "techniques.expert_checkpoint_jobs:all_checkpoints", tmp_path_factory.mktemp("state")
    )


def test_a_run_goes_on_from_its_checkpoint_as_if_it_had_never_stopped(found: list[Any]) -> None:
    for name in PLANS:
        case = found[0]["resumed"][f"{name}: ranks to ranks"]
        assert case == {"steps": ALL - FIRST, "weights": 0.0, "losses": 0.0, "biases": True}, name


@pytest.mark.parametrize("way", ["one to ranks", "ranks to one"])
def test_a_checkpoint_of_ranks_is_one_of_a_single_process(found: list[Any], way: str) -> None:
    for name in PLANS:
        case = found[0]["resumed"][f"{name}: {way}"]
        within = 0.01 if name == "bf16 masters" else 1e-5
        assert case["steps"] == ALL - FIRST
        assert case["weights"] < within
        assert case["losses"] < within
        assert case["biases"]


def test_a_saved_model_has_the_bytes_of_one_that_was_never_shared_out(found: list[Any]) -> None:
    assert found[0]["saved"]["model.safetensors"]
    assert all(found[0]["saved"].values())


def test_what_a_checkpoint_of_parts_cannot_hold_is_said_before_training(found: list[Any]) -> None:
    average, optimizer = found[0]["refused"]
    assert average.startswith("plan: a checkpoint can't contain a running average of weights")
    assert optimizer.startswith("checkpoints: compact_adamw keeps moments in blocks of its own")
    assert found[1]["refused"] == found[0]["refused"]
