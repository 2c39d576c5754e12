"""``optimize_for_inference`` and ``fused_linear_relu`` against the operators that they replace."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from hasten import fused_linear_relu, optimize_for_inference
from hasten.parts.nn.fused_layers import LinearReLU


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
    for module in (plain, torch.jit.script(plain)):
        found = optimize_for_inference(module)
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


def given_tensors(shape: tuple[int, ...], out: int, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(sum(shape) + out)
    sizes = (shape, (out, shape[-1]), (out,))
    return [torch.randn(s, dtype=dtype).requires_grad_() for s in sizes]


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(1, 9), st.booleans())
def test_results_and_gradients_are_those_of_two_operators(
    shape: list[int], out: int, biased: bool
) -> None:
    x, weight, bias = given_tensors(tuple(shape), out, torch.float64)
    tensors = [x, weight, bias] if biased else [x, weight]
    found = fused_linear_relu(*tensors)
    plain = F.relu(F.linear(*tensors))
    assert torch.equal(found, plain)
    grad = torch.randn_like(plain)
    theirs = torch.autograd.grad(plain, tensors, grad)
    for one, other in zip(torch.autograd.grad(found, tensors, grad), theirs, strict=True):
        torch.testing.assert_close(one, other)


def test_it_keeps_the_output_and_not_what_the_relu_was_given() -> None:
    kept: list[Tensor] = []
    x, weight, bias = given_tensors((7, 4), 5, torch.float32)
    with saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        out = fused_linear_relu(x, weight, bias)
    assert sorted(t.data_ptr() for t in kept) == sorted(t.data_ptr() for t in (x, weight, out))


def test_under_autocast_the_product_is_in_its_format() -> None:
    x, weight, bias = given_tensors((7, 4), 5, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = fused_linear_relu(x, weight, bias)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32


def test_frozen_weights_get_no_gradient() -> None:
    x, weight, bias = given_tensors((7, 4), 5, torch.float32)
    fused_linear_relu(x, weight.detach(), bias.detach()).sum().backward()
    assert x.grad is not None


def test_shapes_that_do_not_multiply_are_refused() -> None:
    with pytest.raises(ValueError, match="no side in common"):
        fused_linear_relu(torch.zeros(2, 3), torch.zeros(4, 5))
