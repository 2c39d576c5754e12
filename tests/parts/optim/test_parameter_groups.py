"""Parameter groups: every weight once, and decay on matrices alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hasten.parts.optim.weight_average import decayed_groups
from tiny import ARCHITECTURES, tiny_model


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


def test_an_optimizer_step_shrinks_matrices_and_nothing_else() -> None:
    layer = nn.Linear(3, 3)
    before = {n: p.detach().clone() for n, p in layer.named_parameters()}
    optimizer = torch.optim.AdamW(decayed_groups(layer.named_parameters(), 0.5), lr=0.1)
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    torch.testing.assert_close(layer.weight.detach(), before["weight"] * (1 - 0.1 * 0.5))
    assert torch.equal(layer.bias, before["bias"])


def test_a_group_without_members_is_left_out() -> None:
    layer = nn.Linear(2, 2, bias=False)
    assert len(decayed_groups(layer.named_parameters(), 0.1)) == 1
