"""What DDP's reducer is asked, and what is said where it can't answer; figures: test_wire_traffic.

Three moments of a backward pass are planted in a stand-in for the reducer's log.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hasten.parts.distributed.ddp import GradientSeconds, under_way, watch_reducer

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
