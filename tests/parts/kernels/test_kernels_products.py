"""bf16 products on AMX against float64, in every orientation, for any shape and stride.

A product of two bf16 numbers is exact in float32, so that a sum of ``k`` of them in float32 is off
by at most ``k * 2^-24`` of the sum of their absolute values; the result in bf16 is off by another
2^-8 of itself.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from hasten.parts.kernels import amx
from hasten.parts.nn import fused_functions

pytestmark = pytest.mark.skipif(not amx.library().library, reason=amx.library().reason)
orientations = pytest.mark.parametrize(
    ("a_turned", "b_turned"), list(itertools.product([False, True], repeat=2))
)
sides = st.one_of(st.integers(1, 70), st.sampled_from([127, 128, 129, 385, 513, 600]))
HALF = 2**-8  # of a bf16 number: half a unit in its last place


def numbers(*shape: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=draw).bfloat16()


def given_as(matrix: Tensor, turned: bool) -> Tensor:
    return matrix.t().contiguous() if turned else matrix


def check_product(out: Tensor, a: Tensor, b: Tensor, before: Tensor | None = None) -> None:
    """``out`` against ``a @ b``, both untransposed, on top of ``before``."""
    a, b = a.double(), b.double()
    expected, terms = a @ b, a.abs() @ b.abs()
    if before is not None:
        expected, terms = expected + before.double(), terms + before.double().abs()
    bound = (a.shape[1] + 2) * 2**-24 * terms
    if out.dtype == torch.bfloat16:
        bound = bound + HALF * expected.abs()
    assert ((out.double() - expected).abs() <= bound * 1.01).all()


@orientations
@settings(max_examples=30, deadline=None)
@given(m=sides, n=sides, k=sides)
def test_a_product_is_right_in_every_orientation(
    a_turned: bool, b_turned: bool, m: int, n: int, k: int
) -> None:
    a, b = numbers(m, k), numbers(k, n, seed=1)
    found = amx.product(given_as(a, a_turned), given_as(b, b_turned), a_turned, b_turned)
    assert found.dtype == torch.bfloat16
    check_product(found, a, b)


@orientations
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [(1, 1, 1), (33, 17, 65), (40, 50, 700)], ids=str)
def test_a_product_is_written_or_added(
    a_turned: bool, b_turned: bool, dtype: torch.dtype, size: tuple[int, int, int]
) -> None:
    m, n, k = size
    a, b = numbers(m, k), numbers(k, n, seed=1)
    before = numbers(m, n, seed=2).to(dtype)
    arguments = (given_as(a, a_turned), given_as(b, b_turned), a_turned, b_turned)
    for add in (False, True):
        out = before.clone()
        amx.product_into(out, *arguments, add=add)
        check_product(out, a, b, before if add else None)


@orientations
def test_views_are_read_and_written_in_place(a_turned: bool, b_turned: bool) -> None:
    a, b = numbers(50, 90), numbers(90, 60, seed=1)
    wide = [numbers(130, 130, seed=s) for s in (2, 3)]
    for room, matrix, turned in ((wide[0], a, a_turned), (wide[1], b, b_turned)):
        given = given_as(matrix, turned)
        room[7 : 7 + given.shape[0], 5 : 5 + given.shape[1]] = given
    views = [
        room[7 : 7 + given_as(m, t).shape[0], 5 : 5 + given_as(m, t).shape[1]]
        for room, m, t in ((wide[0], a, a_turned), (wide[1], b, b_turned))
    ]
    around = torch.full((70, 100), 3.0)
    amx.product_into(around[9:59, 11:71], *views, a_turned, b_turned)
    check_product(around[9:59, 11:71], a, b)
    around[9:59, 11:71] = 3
    assert (around == 3).all(), "nothing beside the view is written"
    # Neither side is contiguous here: it is copied first.
    sparse = numbers(100, 180)[::2, ::2]
    check_product(amx.product(sparse, b, False, False), sparse, b)


@pytest.mark.parametrize("size", [(0, 5, 7), (5, 0, 7), (5, 7, 0)], ids=str)
def test_a_sum_of_nothing_is_zero(size: tuple[int, int, int]) -> None:
    m, n, k = size
    out = torch.ones(m, n)
    amx.product_into(out, numbers(m, k), numbers(k, n), False, False, add=True)
    assert (out == 1).all()
    assert (amx.product(numbers(m, k), numbers(k, n), False, False) == 0).all()


def test_what_does_not_multiply_is_refused() -> None:
    a = numbers(4, 5)
    with pytest.raises(ValueError, match="no side in common"):
        amx.product(a, a, False, False)
    with pytest.raises(ValueError, match="is not"):
        amx.product_into(torch.empty(4, 5), a, a, False, True)
    with pytest.raises(ValueError, match="products are of bf16 matrices"):
        amx.product(a.float(), a.float(), False, True)
    with pytest.raises(ValueError, match="rows in one piece"):
        amx.product_into(torch.empty(4, 4).t(), a, a, False, True)


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 200, 1100, 2111])
def test_pieces_of_a_product_join_without_a_seam(rows: int) -> None:
    x, weight = numbers(rows, 40), numbers(30, 40, seed=1)
    check_product(fused_functions.matmul_bf16(x, weight.t()), x, weight.t())
    check_product(fused_functions.matmul_bf16(x, weight.t().contiguous()), x, weight.t())


def test_a_linear_layer_has_all_three_gradients() -> None:
    x, weight, bias = numbers(2, 50, 40), numbers(30, 40), numbers(30)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    y, expected = fused_functions.linear(*leaves), nn.functional.linear(*wide)
    assert ((y - expected).abs() <= 2 * HALF * (expected.abs() + 1)).all()
    grad = numbers(2, 50, 30, seed=5)
    for f, w in zip(
        torch.autograd.grad(y, leaves, grad),
        torch.autograd.grad(expected, wide, grad.double()),
        strict=True,
    ):
        assert (f - w).abs().max() <= HALF * w.abs().max()


def test_a_product_shows_a_nan_in_its_row_alone() -> None:
    a, b = numbers(70, 80), numbers(80, 90)
    a[40, 33] = torch.nan
    for turned in (False, True):
        found = amx.product(given_as(a, turned), b, turned, False)
        assert found[40].isnan().all()
        assert found.isnan().sum() == 90


def operators() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    return {
        "product": (amx.product, (numbers(5, 6), numbers(6, 7), False, False)),
        "product turned": (amx.product, (numbers(6, 5), numbers(7, 6), True, True)),
    }


@pytest.mark.parametrize("name", operators() if amx.library().library else [])
def test_each_operator_keeps_its_word_to_torch(name: str) -> None:
    operator, arguments = operators()[name]
    torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))
