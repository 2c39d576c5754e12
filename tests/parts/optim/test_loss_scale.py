"""The loss scale: down at an overflow, up after good steps, never below 1, and resumable."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hasten.parts.optim.master_weights import LossScale


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 5))
def test_it_moves_as_torchs_own_scaler_until_its_floor(steps: list[bool], interval: int) -> None:
    mine = LossScale(1024.0, interval=interval)
    theirs = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=interval)
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    for finite in steps:
        theirs.scale(torch.ones(1))  # it makes its state at the first use
        weight.grad = torch.tensor([1.0 if finite else torch.inf])
        theirs.step(optimizer)
        theirs.update()
        mine.judge(finite)
        if theirs.get_scale() < 1:
            break
        assert mine.value == theirs.get_scale()


def test_it_searches_until_a_lower_scale_can_help_no_more() -> None:
    scale = LossScale(65536.0)
    searched = []
    for _ in range(18):
        scale.judge(False)
        searched.append(scale.searching)
    assert searched == [True] * 16 + [False] * 2
    assert scale.value == 1.0
    assert scale.skipped == 18
    scale.judge(True)
    assert not scale.searching


def test_gradients_are_divided_in_place_and_an_overflow_stays_one() -> None:
    gradients = [torch.tensor([8.0, torch.inf]), torch.tensor([16.0])]
    LossScale(8.0).unscale(gradients)
    assert gradients[0].tolist() == [1.0, torch.inf]
    assert gradients[1].tolist() == [2.0]
    LossScale(8.0).unscale([])


@given(st.lists(st.booleans(), max_size=30), st.lists(st.booleans(), max_size=30))
def test_a_restored_scale_goes_on_as_if_it_had_never_stopped(
    before: list[bool], after: list[bool]
) -> None:
    one = LossScale(interval=3)
    for finite in before:
        one.judge(finite)
    two = LossScale(interval=3)
    two.load_state_dict(json.loads(json.dumps(one.state_dict())))
    for finite in after:
        one.judge(finite)
        two.judge(finite)
    assert two.state_dict() == one.state_dict()


@pytest.mark.parametrize(
    "numbers",
    [{"initial": 0.5}, {"initial": math.nan}, {"growth": 1.0}, {"backoff": 1.0}, {"interval": 0}],
)
def test_impossible_numbers_are_refused(numbers: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="a loss scale needs initial >= 1"):
        LossScale(**numbers)  # type: ignore[arg-type]


def test_a_scale_that_is_resumed_with_a_shorter_interval_still_grows() -> None:
    scale = LossScale(8.0, interval=3)
    scale.load_state_dict({"value": 8.0, "good": 5, "skipped": 0})
    scale.judge(True)
    assert scale.value == 16.0
