"""fused_linear_relu against the two operators it stands for, and what it keeps."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from hasten import fused_linear_relu


def given_tensors(shape: tuple[int, ...], out: int, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(sum(shape) + out)
    sizes = (shape, (out, shape[-1]), (out,))
    return [torch.randn(s, dtype=dtype).requires_grad_() for s in sizes]


@settings(max_examples=30, deadline=None)
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


def test_gradients_are_right_by_finite_differences() -> None:
    assert torch.autograd.gradcheck(fused_linear_relu, given_tensors((3, 4), 5, torch.float64))


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
