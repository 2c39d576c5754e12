"""``optimize_for_inference`` keeps outputs, and the parameters of a model that still trains."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hasten import optimize_for_inference
from hasten.parts.nn.inference import LinearReLU


def model() -> nn.Sequential:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), inner, nn.Linear(4, 2))


def test_a_model_that_trains_keeps_its_parameters_and_gradients(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plain, fused, x = model().train(), model().train(), torch.randn(5, 3)
    parameters, names = list(fused.parameters()), list(fused.state_dict())
    assert optimize_for_inference(fused) is fused
    assert all(a is b for a, b in zip(fused.parameters(), parameters, strict=True))
    assert list(fused.state_dict()) == names
    assert sum(isinstance(m, LinearReLU) for m in fused.modules()) == 2
    torch.testing.assert_close(fused(x), plain(x))
    fused(x).square().mean().backward()
    plain(x).square().mean().backward()
    for mine, usual in zip(fused.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, usual.grad)
    said = capsys.readouterr().out
    assert "in training mode and keeps its parameters: 2 linear layers fused" in said


def test_a_layer_that_somebody_listens_to_is_left_alone() -> None:
    given = model().train()
    heard: list[int] = []
    given[0].register_forward_hook(lambda *seen: heard.append(1))
    optimize_for_inference(given)
    given(torch.randn(2, 3))
    assert heard == [1]


class Branches(nn.Module):
    """torch can't script a function of another module's making, and can trace it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        found: Tensor = self.layer(x)
        for one in more:
            found = found + one
        return found


def test_in_eval_mode_it_is_torch_s_own() -> None:
    plain, x = model().eval(), torch.randn(5, 3)
    for given in (plain, torch.jit.script(plain)):
        found = optimize_for_inference(given)
        torch.testing.assert_close(found(x), plain(x))
        assert not list(found.parameters())
    branches = Branches().eval()
    with pytest.raises(ValueError, match="give sample="):
        optimize_for_inference(branches)
    torch.testing.assert_close(optimize_for_inference(branches, x)(x), branches(x))
    both = optimize_for_inference(branches, sample=(x, x))
    torch.testing.assert_close(both(x, x), branches(x, x))


def test_a_scripted_model_that_trains_stays_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    given = torch.jit.script(model().train())
    assert optimize_for_inference(given) is given
    assert "stays as it is" in capsys.readouterr().out
