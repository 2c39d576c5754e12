"""Fused passes over rows against their formulas in float64, for both formats and any shape.

A result in float32 may be off by a few roundings of its row's sums; one in bf16 by half a unit in
the last place, 2^-8 of itself, beyond that. Both bounds are taken of the largest number of the
result, since a small one may be what is left of large ones.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hasten.parts.kernels import rowwise
from hasten.parts.nn import fused_functions
from kernel_units import numbers, turned

pytestmark = pytest.mark.skipif(not rowwise.library().library, reason=rowwise.library().reason)
BOUND = {torch.float32: 2e-6, torch.bfloat16: 2**-8 + 2e-6}
formats = pytest.mark.parametrize("dtype", list(BOUND), ids=str)
sizes = st.integers(1, 70)


def near(found: Tensor, expected: Tensor, of: Tensor | None = None) -> bool:
    """Within the format's share of ``of``, the terms of a sum, or of ``expected`` (float64)."""
    largest = (expected if of is None else of).abs().max().double()
    return bool((found.double() - expected).abs().max() <= BOUND[found.dtype] * largest)


def gradients(result: Tensor, grad: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(result, inputs, grad.to(result.dtype))


def wide(*tensors: Tensor) -> list[Tensor]:
    return [t.detach().double().requires_grad_() for t in tensors]


def leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_()


def norm_formula(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def check_norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> None:
    grad = numbers(*x.shape, dtype=x.dtype, seed=2)
    x, weight = leaf(x), leaf(weight)
    y, references = fused_functions.rms_norm(x, weight, eps), wide(x, weight)
    expected = norm_formula(*references, eps)
    assert y.dtype == x.dtype
    assert near(y, expected)
    (dx, dw), wanted = gradients(y, grad, x, weight), gradients(expected, grad, *references)
    terms = grad * weight / (x.square().mean(-1, keepdim=True) + eps).sqrt()  # dx is what is left
    assert near(dx, wanted[0], terms)
    assert near(dw, wanted[1], torch.stack((wanted[1].abs().max(), (grad * y).abs().max())))


def check_swiglu(gate: Tensor, up: Tensor) -> None:
    grad = numbers(*gate.shape, dtype=gate.dtype, seed=2)
    gate, up = leaf(gate), leaf(up)
    y, references = fused_functions.swiglu(gate, up), wide(gate, up)
    expected = F.silu(references[0]) * references[1]
    assert near(y, expected)
    for found, wanted in zip(
        gradients(y, grad, gate, up), gradients(expected, grad, *references), strict=True
    ):
        assert near(found, wanted)


@formats
@settings(max_examples=25)
@given(count=sizes, width=sizes)
def test_a_norm_and_its_gradients_are_the_formulas(
    dtype: torch.dtype, count: int, width: int
) -> None:
    check_norm(numbers(count, width, dtype=dtype), numbers(width, dtype=dtype, seed=1))


@formats
@settings(max_examples=25)
@given(count=sizes, width=sizes)
def test_a_gate_and_its_gradients_are_the_formulas(
    dtype: torch.dtype, count: int, width: int
) -> None:
    check_swiglu(numbers(count, width, dtype=dtype) * 4, numbers(count, width, dtype=dtype, seed=1))


@formats
def test_several_threads_compute_the_same(dtype: torch.dtype, monkeypatch: Any) -> None:
    monkeypatch.setattr(rowwise, "WORTH_THREADS", 1)
    torch.set_num_threads(2)
    for count in (1, 2, 3, 33):
        check_norm(numbers(count, 17, dtype=dtype), numbers(17, dtype=dtype, seed=1))
        check_swiglu(numbers(count, 17, dtype=dtype), numbers(count, 17, dtype=dtype, seed=1))


@formats
def test_views_count_like_copies(dtype: torch.dtype) -> None:
    x = numbers(12, 40, dtype=dtype)
    check_norm(x[:, ::2], numbers(40, dtype=dtype, seed=1)[::2])
    check_norm(x.t(), numbers(12, dtype=dtype, seed=1))
    check_norm(x.view(3, 4, 40).transpose(0, 1), numbers(40, dtype=dtype))
    check_swiglu(x[:, :20], x[:, 20:])


@formats
def test_an_expanded_gradient_counts_like_a_copy(dtype: torch.dtype) -> None:
    """What ``sum().backward()`` gives: one number with strides of 0."""
    x, weight = leaf(numbers(5, 9, dtype=dtype)), leaf(numbers(9, dtype=dtype))
    references = wide(x, weight)
    found = torch.autograd.grad(fused_functions.rms_norm(x, weight, 0.1).sum(), (x, weight))
    wanted = torch.autograd.grad(norm_formula(*references, 0.1).sum(), references)
    assert near(found[0], wanted[0], weight * 3)
    assert near(found[1], wanted[1])


@formats
def test_the_gradient_that_came_past_the_norm_is_added(dtype: torch.dtype) -> None:
    x, weight, grad, past = (numbers(*s, dtype=dtype) for s in ((4, 7), (7,), (4, 7), (4, 7)))
    _, inverse = rowwise.rms_norm(x, weight, 1e-5)
    alone, _ = rowwise.rms_norm_backward(grad, x, weight, inverse, None)
    both, _ = rowwise.rms_norm_backward(grad, x, weight, inverse, past)
    bound = 2 * BOUND[dtype]  # the norm's own gradient was rounded before it was added here
    assert ((both - alone.double() - past.double()).abs() <= bound * both.abs().max()).all()


@formats
def test_the_inverse_root_is_kept_in_float32(dtype: torch.dtype) -> None:
    x = numbers(6, 11, dtype=dtype)
    _, inverse = rowwise.rms_norm(x, x[0], 1e-5)
    assert inverse.dtype == torch.float32
    assert near(inverse, (x.double().square().mean(-1) + 1e-5).rsqrt())


def tables(count: int, m: int) -> tuple[Tensor, Tensor]:
    angles = torch.arange(count).outer(0.3 ** torch.arange(m)).float()
    return angles.cos(), angles.sin()


@formats
@pytest.mark.parametrize("pairs_in", [False, True])
@pytest.mark.parametrize("pairs_out", [False, True])
@settings(max_examples=12)
@given(count=st.integers(1, 20), heads=st.integers(1, 5), m=st.integers(1, 33), more=sizes)
def test_rotation_is_a_complex_product_in_every_layout(
    dtype: torch.dtype, pairs_in: bool, pairs_out: bool, count: int, heads: int, m: int, more: int
) -> None:
    cos, sin = tables(count, m)
    first = more // 10 * 2  # columns that are copied, none among the cases
    x = leaf(numbers(count, heads, first + 2 * m, dtype=dtype))
    (reference,) = wide(x)
    y = fused_functions.rotate(x, cos, sin, pairs_in, pairs_out)
    expected = turned(reference, cos.double(), sin.double(), pairs_in, pairs_out)
    assert near(y, expected)
    assert torch.equal(y[..., :first], x[..., :first])
    grad = numbers(*x.shape, dtype=dtype, seed=5)
    (found,), (wanted,) = gradients(y, grad, x), gradients(expected, grad, reference)
    assert near(found, wanted)


@formats
def test_rotation_reads_views_and_tables_of_either_format(dtype: torch.dtype) -> None:
    whole, (cos, sin) = numbers(9, 4, 30, dtype=dtype), tables(9, 5)
    for view in (whole[:, 1:3, 5:25], whole.transpose(1, 2)[:, ::3, :][..., :4], whole[::2]):
        m = min(5, view.shape[-1] // 2)
        for table in (torch.float32, torch.bfloat16):
            c, s = (t[: len(view), :m].to(table) for t in (cos, sin))
            expected = turned(view.double(), c.double(), s.double(), True, False)
            assert near(rowwise.rotate(view, c, s, True, False, False), expected)


@formats
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_shows_where_torch_shows_it(dtype: torch.dtype, bad: float) -> None:
    """The check for finite gradients relies on it."""
    x, other = numbers(3, 40, dtype=dtype), numbers(3, 40, dtype=dtype, seed=4)
    x[1, 21] = bad

    def gate(x: Tensor, up: Tensor) -> Tensor:
        return F.silu(x) * up

    for run, formula, inputs in (
        (partial(fused_functions.rms_norm, eps=0.1), partial(norm_formula, eps=0.1), (x, other[0])),
        (fused_functions.swiglu, gate, (x, other)),
        (fused_functions.swiglu, gate, (other, x)),
    ):
        leaves, references = [leaf(t) for t in inputs], wide(*inputs)
        y, expected, grad = run(*leaves), formula(*references), torch.ones_like(x)
        pairs = [(y, expected)]
        pairs += zip(
            gradients(y, grad, *leaves), gradients(expected, grad, *references), strict=True
        )
        for found, wanted in pairs:
            assert torch.equal(found.isfinite(), wanted.isfinite())


@formats
def test_a_gradient_of_nan_stays_one(dtype: torch.dtype) -> None:
    x, grad = leaf(numbers(3, 40, dtype=dtype)), numbers(3, 40, dtype=dtype, seed=1)
    grad[2, 39] = torch.nan
    weight, (cos, sin) = leaf(numbers(40, dtype=dtype)), tables(3, 20)
    dx, dw = gradients(fused_functions.rms_norm(x, weight, 1e-5), grad, x, weight)
    assert dx[2].isnan().all()
    assert not dx[:2].isnan().any()
    assert dw.isnan().nonzero().tolist() == [[39]]
    for dx in gradients(fused_functions.swiglu(x, x.detach()), grad, x):
        assert dx.isnan().nonzero().tolist() == [[2, 39]]
    (dx,) = gradients(
        fused_functions.rotate(x.unsqueeze(1), cos, sin, True, True), grad.unsqueeze(1), x
    )
    assert dx.isnan().nonzero().tolist() == [[2, 38], [2, 39]]


def test_formats_that_the_loops_do_not_know_are_told_apart() -> None:
    x = torch.zeros(2, 3)
    known = [rowwise.fits(*t) for t in ((x, x), (x.double(),), (x, x.bfloat16()), (x.to("meta"),))]
    assert known == [True, False, False, False]
    with pytest.raises(ValueError, match="float32 and bfloat16, not"):
        rowwise.swiglu(x.double(), x.double())


def test_sizes_that_do_not_belong_together_are_refused() -> None:
    x, (cos, sin) = numbers(4, 6), tables(4, 2)
    with pytest.raises(ValueError, match=r"a weight \(5,\) in torch.float32 is none for rows"):
        rowwise.rms_norm(x, numbers(5), 1e-5)
    with pytest.raises(ValueError, match="is none for rows"):
        rowwise.rms_norm(x, numbers(6).bfloat16(), 1e-5)
    with pytest.raises(ValueError, match=r"a gate \(4, 6\) in torch.float32 is none for \(4, 1\)"):
        rowwise.swiglu(x, x[:, :1])
    for c, s in ((cos[:3], sin[:3]), (cos, sin.bfloat16()), (cos, sin[:, :1]), tables(4, 4)):
        with pytest.raises(ValueError, match="can't turn"):
            rowwise.rotate(x.view(4, 1, 6), c, s, True, True, False)


def operators() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    x, weight, (cos, sin) = numbers(4, 6), numbers(6), tables(4, 2)
    y, inverse = rowwise.rms_norm(x, weight, 1e-5)
    return {
        "rms_norm": (rowwise.rms_norm, (x, weight, 1e-5)),
        "rms_norm_backward": (rowwise.rms_norm_backward, (y, x, weight, inverse, x)),
        "swiglu": (rowwise.swiglu, (x, y)),
        "swiglu_backward": (rowwise.swiglu_backward, (x, y, x)),
        "rotate": (rowwise.rotate, (x.view(4, 1, 6), cos, sin, True, False, False)),
        "cross_entropy_": (rowwise.cross_entropy_, (x, torch.tensor([0, 1, 2, 5]))),
    }


@pytest.mark.parametrize("name", operators() if rowwise.library().library else [])
def test_each_operator_keeps_its_word_to_torch(name: str) -> None:
    operator, arguments = operators()[name]
    torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("name", ["rms_norm", "rms_norm_backward", "swiglu", "swiglu_backward"])
def test_a_graph_is_told_how_results_of_turned_tensors_lie(name: str) -> None:
    operator, arguments = operators()[name]
    turned = (a.t().contiguous().t() if getattr(a, "ndim", 0) == 2 else a for a in arguments)
    torch.library.opcheck(operator, tuple(turned), test_utils=("test_faketensor",))
