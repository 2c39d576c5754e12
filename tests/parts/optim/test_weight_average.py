"""The running mean of the weights against a float64 loop; groups of parameters."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from hasten.parts.optim import weight_average
from hasten.parts.optim.weight_average import WeightAverage, decayed_groups
from tiny import ARCHITECTURES, tiny_model


def weights(step: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(step)
    return [torch.randn(3, 4, generator=draw), torch.randn(5, generator=draw)]


def averaged(steps: int, decay: float = 0.9) -> WeightAverage:
    average = WeightAverage(decay)
    for step in range(steps):
        average.after_update(weights(step))
    return average


@given(st.integers(1, 40), st.floats(0.01, 0.9999))
def test_the_mean_is_that_of_a_float64_loop(steps: int, decay: float) -> None:
    found = averaged(steps, decay).means
    mean = [w.double() for w in weights(0)]
    for n in range(2, steps + 1):
        d = min(decay, (1 + n) / (10 + n))
        mean = [d * m + (1 - d) * w.double() for m, w in zip(mean, weights(n - 1), strict=True)]
    for ours, theirs in zip(found, mean, strict=True):
        assert ours.dtype is torch.float32
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-6)


def test_the_mean_does_not_follow_the_weights_it_was_started_with() -> None:
    average, given_ = WeightAverage(), weights(0)
    average.after_update(given_)
    given_[0].add_(1)
    assert torch.equal(average.means[0], weights(0)[0])


class Arrival:
    """Stands for an event of a device's stream."""

    waited = 0

    def __init__(self, device: torch.device) -> None:
        self.recorded = False

    def record(self) -> None:
        self.recorded = True

    def synchronize(self) -> None:
        assert self.recorded
        Arrival.waited += 1


def test_copies_from_a_device_join_the_mean_later_and_change_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The device is a processor here; the mean is read in between, saved and gone on with."""
    expected = averaged(6).means
    monkeypatch.setattr(torch, "Event", Arrival)
    monkeypatch.setattr(weight_average, "_devices", lambda parameters: {torch.device("cpu")})
    average = WeightAverage(0.9)
    for step in range(6):
        given_ = weights(step)
        before = Arrival.waited
        average.after_update(given_)
        assert Arrival.waited - before <= 1
        if step == 2:
            saved = copy.deepcopy(average.state_dict())
            assert all(map(torch.equal, saved["means"], averaged(3).means))
        if step == 3:
            average.load_state_dict(saved)
            average.after_update(given_)
        for weight in given_:
            weight.zero_()  # a device moves them on after the copy
    assert all(map(torch.equal, average.means, expected))
    assert average.updates == 6


def test_swapped_weights_are_the_mean_and_come_back_with_their_bits() -> None:
    average, now = averaged(5), weights(4)
    now[1] = now[1].bfloat16()
    before = [w.clone() for w in now]
    with average.swapped(now):
        assert torch.equal(now[0], average.means[0])
        assert torch.equal(now[1], average.means[1].bfloat16())
    assert all(torch.equal(a, b) for a, b in zip(now, before, strict=True))


def test_weights_come_back_after_an_error() -> None:
    average, now = averaged(3), weights(2)
    with pytest.raises(RuntimeError, match="inside"), average.swapped(now):
        raise RuntimeError("inside")
    assert torch.equal(now[0], weights(2)[0])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_weight_is_in_one_group(architecture: str) -> None:
    model = tiny_model(architecture)
    grouped = [p for g in decayed_groups(model.named_parameters(), 0.1) for p in g["params"]]
    assert sorted(map(id, grouped)) == sorted(map(id, model.parameters()))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_norms_and_biases_do_not_decay(architecture: str) -> None:
    model = tiny_model(architecture)
    names = {id(p): n for n, p in model.named_parameters()}
    for group in decayed_groups(model.named_parameters(), 0.1):
        for parameter in group["params"]:
            spared = "norm" in names[id(parameter)] or names[id(parameter)].endswith(".bias")
            assert group["weight_decay"] == (0.0 if spared else 0.1), names[id(parameter)]


def test_a_group_without_members_is_left_out() -> None:
    layer = nn.Linear(2, 2, bias=False)
    assert len(decayed_groups(layer.named_parameters(), 0.1)) == 1
