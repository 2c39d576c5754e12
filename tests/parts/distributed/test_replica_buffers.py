"""What replicas send: constants once, what learns before each step, and DDP's own counts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hasten.machine.environment import World
from hasten.parts.distributed.ddp import (
    GradientSeconds,
    leave_constants,
    may_learn,
    under_way,
    watch_reducer,
)
from hasten.parts.nn.quantised import QuantisedLinear
from ranks import once_on_ranks
from tiny import tiny_model


class Model(nn.Module):
    """A table that isn't part of the state, a frozen base, an adapter and, if ``norm``, sums."""

    table: Tensor

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.base = QuantisedLinear(nn.Linear(4, 4), "int8")
        self.adapter = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4) if norm else nn.Identity()
        self.register_buffer("table", torch.ones(4), persistent=False)

    def forward(self, values: Tensor) -> Tensor:
        out: Tensor = self.norm(self.adapter(values) + self.base(values)) * self.table
        return out


def held(world: World) -> dict[str, Any]:
    return {str(norm): _buffers_of(Model(norm), world.rank) for norm in (False, True)}


def _buffers_of(model: Model, rank: int) -> dict[str, Any]:
    """Codes and tables once they are wrapped and once a rank has changed its own and stepped."""
    with torch.no_grad():
        model.base.codes += rank
        model.table += rank
    wrapped = DistributedDataParallel(model)
    leave_constants(wrapped)
    alike = [model.base.codes.tolist(), model.table.tolist()]
    model.table += rank
    wrapped(torch.full((2, 4), float(rank))).sum().backward()
    return {"made": alike, "table": model.table.tolist()}


found = once_on_ranks(held)


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


MOMENTS = st.integers(0, 10**10)


class Logger:
    def __init__(self, figures: dict[str, int]) -> None:
        self.figures, self.asked = figures, 0

    def set_runtime_stats_and_log(self) -> None:
        self.asked += 1

    def _get_ddp_logging_data(self) -> Any:
        return SimpleNamespace(ints_map=self.figures)


def module(figures: dict[str, int], device: str = "cpu") -> Any:
    weight = torch.empty(2, device=device)
    return SimpleNamespace(
        parameters=lambda: [weight],
        logger=Logger(figures),
        _set_ddp_runtime_logging_sample_rate=lambda rate: None,
    )


@given(st.tuples(MOMENTS, MOMENTS, MOMENTS).map(sorted))
def test_what_is_after_the_last_gradient_is_exposed(moments: list[int]) -> None:
    left, computed, back = moments
    stand_in = module(
        {
            "backward_comm_time": back - left,
            "backward_compute_comm_overlap_time": computed - left,
        }
    )
    found = under_way(stand_in)
    assert found is not None
    assert found.hidden == pytest.approx((computed - left) * 1e-9)
    assert found.exposed == pytest.approx((back - computed) * 1e-9, abs=1e-12)
    assert stand_in.logger.asked == 1


def test_traffic_that_was_back_before_the_last_gradient_shows_nothing() -> None:
    figures = {"backward_comm_time": 5, "backward_compute_comm_overlap_time": 7}
    assert under_way(module(figures)) == GradientSeconds(pytest.approx(7e-9), exposed=0.0)


def test_a_log_without_these_figures_knows_nothing() -> None:
    assert under_way(module({"forward_compute_time": 3})) is None


def test_an_accelerator_and_an_unknown_torch_are_not_asked() -> None:
    assert watch_reducer(module({}))
    assert not watch_reducer(module({}, device="meta"))
    assert not watch_reducer(SimpleNamespace(parameters=list))  # type: ignore[arg-type]
