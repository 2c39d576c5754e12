"""Constants are sent once, when replicas are made; what learns is sent before each step."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from hasten.parts.distributed.ddp import may_learn
from hasten.parts.nn.quantised import QuantisedLinear
from ranks import on_ranks
from tiny import tiny_model


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return on_ranks("parts.distributed.buffer_rank_jobs:held", tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("norm", ["False", "True"])
def test_ranks_are_alike_once_wrapped(found: list[Any], norm: str) -> None:
    assert found[0][norm]["made"] == found[1][norm]["made"]


def test_constants_are_not_sent_in_a_step(found: list[Any]) -> None:
    assert [rank["False"]["table"] for rank in found] == [[1.0] * 4, [2.0] * 4]


def test_beside_running_means_all_are_sent_in_a_step(found: list[Any]) -> None:
    assert [rank["True"]["table"] for rank in found] == [[1.0] * 4, [1.0] * 4]


def test_a_frozen_base_and_rotary_tables_never_learn() -> None:
    assert not may_learn(tiny_model("llama"))
    assert not may_learn(QuantisedLinear(nn.Linear(4, 4), "nf4"))


def test_biases_of_routers_and_running_means_may() -> None:
    assert may_learn(tiny_model("deepseek_v3"))
    assert may_learn(nn.BatchNorm1d(4))
