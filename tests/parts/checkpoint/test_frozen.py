"""Frozen weights stay out of a plain loop's checkpoints; another base is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hasten import SmartCheckpointer
from hasten.parts.checkpoint import load
from hasten.parts.checkpoint.state import FrozenWeights, hash_of
from hasten.parts.nn.quantised import quantise_linears


def half_frozen(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 400), nn.BatchNorm1d(400), nn.Linear(400, 2))
    model[0].requires_grad_(False)
    return model


def step(model: nn.Module) -> float:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    loss = model(torch.randn(8, 6)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def saved(folder: Path, model: nn.Module, steps: int = 1) -> dict[str, Tensor]:
    with SmartCheckpointer(1, folder=folder).protect(model=model) as keeper:
        for number in range(1, steps + 1):
            step(model)
            keeper.save(number)
    return load(folder / f"step-{steps:08d}")[0]


def restored(folder: Path, model: nn.Module) -> nn.Module:
    with SmartCheckpointer(1, folder=folder).protect(model=model) as keeper:
        keeper.restore()
    return model


def test_a_loop_goes_on_without_its_frozen_layer_on_disk(tmp_path: Path) -> None:
    model = half_frozen()
    names = saved(tmp_path, model, 2).keys()
    assert {"model/2.weight", "model/1.running_mean"} <= names  # buffers move in training
    assert not any(name.startswith("model/0.") for name in names)
    again = restored(tmp_path, half_frozen())
    assert all(torch.equal(t, model.state_dict()[n]) for n, t in again.state_dict().items())


def other_seed() -> nn.Module:
    return half_frozen(1)


def other_format() -> nn.Module:
    model = half_frozen()
    model[0].double()
    return model


def one_bit() -> nn.Module:
    model = half_frozen()
    model[0].weight.data.view(torch.int32)[399, 5] ^= 1
    return model


def thawed() -> nn.Module:
    model = half_frozen()
    model[0].bias.requires_grad_(True)
    return model


@pytest.mark.parametrize("other", [other_seed, other_format, one_bit, thawed])
def test_another_base_is_refused_and_nothing_is_changed(other: Any, tmp_path: Path) -> None:
    saved(tmp_path, half_frozen())
    model = other()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"another base model: the frozen weights of model.*load"):
        restored(tmp_path, model)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


class Follows(nn.Module):
    """A second layer without gradients follows the first, as momentum encoders do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for own, other in zip(self.second.parameters(), self.first.parameters(), strict=True):
            own.data.mul_(0.9).add_(other.data, alpha=0.1)
        y: Tensor = self.first(x) - self.second(x)
        return y


def test_frozen_weights_that_other_code_moves_are_saved(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Follows()
    start = copy.deepcopy(model)
    saved(tmp_path, model, 3)
    for steps in (1, 3):  # the first save, too
        assert "model/second.weight" in load(tmp_path / f"step-{steps:08d}")[0]
    again = restored(tmp_path, start)
    assert torch.equal(again.second.weight, model.second.weight)


def test_a_copy_of_which_nothing_learns_is_saved_whole(tmp_path: Path) -> None:
    average = half_frozen().requires_grad_(False)
    assert FrozenWeights(average).names == frozenset()
    with SmartCheckpointer(1, folder=tmp_path).protect(average=average) as keeper:
        keeper.save(1)
    assert "average/0.weight" in load(tmp_path / "step-00000001")[0]


def test_a_model_that_is_first_seen_by_a_save_is_saved_whole(tmp_path: Path) -> None:
    model = half_frozen()
    step(model)
    with SmartCheckpointer(1, folder=tmp_path) as keeper:
        keeper.save(model)
    assert "model/0.weight" in load(tmp_path / "step-00000001")[0]


def test_layers_in_few_bits_and_tied_weights_are_frozen_with_all_their_names() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    model[1].weight = model[0].weight.requires_grad_(False)
    quantise_linears(model, ["2"], "nf4")
    frozen = FrozenWeights(model, "model.")
    layer = {"model.2.codes", "model.2.scale", "model.2.bias"}
    assert frozen.names == {"model.0.weight", "model.1.weight", *layer}
    other = copy.deepcopy(model)
    other[2].codes[0] ^= 1
    assert FrozenWeights(other).hash != frozen.hash == FrozenWeights(model).hash


def test_a_hash_is_of_names_formats_shapes_and_contents_in_any_order() -> None:
    a, b = torch.zeros(3, 4), torch.arange(5)
    one = hash_of({"a": a, "b": b})
    assert one == hash_of({"b": b.clone(), "a": a.clone()})
    others = (
        *({"b": a, "a": b}, {"a": a}, {"a": a.T, "b": b}, {"a": a, "b": b.int()}),
        *({"a": -a, "b": b}, {"a": a, "c": b}),
    )
    hashes = {one, *(hash_of(other) for other in others)}
    assert len(hashes) == 1 + len(others)
    assert hash_of({}) == ""
