"""Products of the processor's kernels against float64, in every orientation, shape and stride.

A sum of ``k`` products in float32 is off by at most ``(k + 1) * 2^-24`` of the sum of their
absolute values, in any order; products of bf16 numbers are exact in float32. A result in bf16 is
off by another 2^-8 of itself. Every way to multiply is proven on every processor that can run it:
pairs of bf16 run anywhere, by ordinary instructions.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from hasten.parts.kernels import products
from hasten.parts.nn import fused_functions
from kernel_units import FORMATS, numbers, take

pytestmark = pytest.mark.skipif(not products.library().library, reason=products.library().reason)


@pytest.fixture(params=FORMATS, autouse=True)
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """The format of the factors; bf16 in each way to multiply."""
    return take(request.param, monkeypatch)


orientations = pytest.mark.parametrize(
    ("a_turned", "b_turned"), list(itertools.product([False, True], repeat=2))
)
sides = st.one_of(st.integers(1, 70), st.sampled_from([127, 128, 129, 385, 513, 600]))
HALF = 2**-8  # of a bf16 number: half a unit in its last place


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
@settings(max_examples=20)
@given(m=sides, n=sides, k=sides)
def test_a_product_is_right_in_every_orientation(
    dtype: torch.dtype, a_turned: bool, b_turned: bool, m: int, n: int, k: int
) -> None:
    a, b = numbers(m, k, dtype=dtype), numbers(k, n, seed=1, dtype=dtype)
    found = products.product(given_as(a, a_turned), given_as(b, b_turned), a_turned, b_turned)
    assert found.dtype == dtype
    check_product(found, a, b)


@orientations
@pytest.mark.parametrize("to", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "size",
    [(1, 1, 1), (33, 17, 65), (40, 50, 700), (70, 140, 5000)],  # the last in pieces of the sum
    ids=str,
)
def test_a_product_is_written_or_added(
    dtype: torch.dtype,
    a_turned: bool,
    b_turned: bool,
    to: torch.dtype,
    size: tuple[int, int, int],
) -> None:
    m, n, k = size
    a, b = numbers(m, k, dtype=dtype), numbers(k, n, seed=1, dtype=dtype)
    before = numbers(m, n, seed=2, dtype=dtype).to(to)
    arguments = (given_as(a, a_turned), given_as(b, b_turned), a_turned, b_turned)
    for add in (False, True):
        out = before.clone()
        products.product_into(out, *arguments, add=add)
        check_product(out, a, b, before if add else None)


@orientations
def test_views_are_read_and_written_in_place(
    dtype: torch.dtype, a_turned: bool, b_turned: bool
) -> None:
    a, b = numbers(50, 90, dtype=dtype), numbers(90, 60, seed=1, dtype=dtype)
    wide = [numbers(130, 130, seed=s, dtype=dtype) for s in (2, 3)]
    for room, matrix, turned in ((wide[0], a, a_turned), (wide[1], b, b_turned)):
        given = given_as(matrix, turned)
        room[7 : 7 + given.shape[0], 5 : 5 + given.shape[1]] = given
    views = [
        room[7 : 7 + given_as(m, t).shape[0], 5 : 5 + given_as(m, t).shape[1]]
        for room, m, t in ((wide[0], a, a_turned), (wide[1], b, b_turned))
    ]
    around = torch.full((70, 100), 3.0)
    products.product_into(around[9:59, 11:71], *views, a_turned, b_turned)
    check_product(around[9:59, 11:71], a, b)
    around[9:59, 11:71] = 3
    assert (around == 3).all(), "nothing beside the view is written"
    # Neither side is contiguous here: it is copied first.
    sparse = numbers(100, 180, dtype=dtype)[::2, ::2]
    check_product(products.product(sparse, b, False, False), sparse, b)


@pytest.mark.parametrize("size", [(0, 5, 7), (5, 0, 7), (5, 7, 0)], ids=str)
def test_a_sum_of_nothing_is_zero(dtype: torch.dtype, size: tuple[int, int, int]) -> None:
    m, n, k = size
    out = torch.ones(m, n)
    products.product_into(
        out, numbers(m, k, dtype=dtype), numbers(k, n, dtype=dtype), False, False, add=True
    )
    assert (out == 1).all()
    assert (
        products.product(numbers(m, k, dtype=dtype), numbers(k, n, dtype=dtype), False, False) == 0
    ).all()


def test_what_does_not_multiply_is_refused(dtype: torch.dtype) -> None:
    a = numbers(4, 5, dtype=dtype)
    with pytest.raises(ValueError, match="no side in common"):
        products.product(a, a, False, False)
    with pytest.raises(ValueError, match="is not"):
        products.product_into(torch.empty(4, 5), a, a, False, True)
    with pytest.raises(ValueError, match="products are of bf16 or float32"):
        products.product(a.double(), a.double(), False, True)
    with pytest.raises(ValueError, match="rows in one piece"):
        products.product_into(torch.empty(4, 4).t(), a, a, False, True)


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 200, 1100, 2111, 2500])
def test_pieces_of_a_product_join_without_a_seam(dtype: torch.dtype, rows: int) -> None:
    x, weight = numbers(rows, 40, dtype=dtype), numbers(30, 40, seed=1, dtype=dtype)
    check_product(fused_functions.matmul(x, weight.t()), x, weight.t())
    check_product(fused_functions.matmul(x, weight.t().contiguous()), x, weight.t())


def test_a_linear_layer_has_all_three_gradients(dtype: torch.dtype) -> None:
    x, weight, bias = (
        numbers(2, 50, 40, dtype=dtype),
        numbers(30, 40, dtype=dtype),
        numbers(30, dtype=dtype),
    )
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    y, expected = fused_functions.linear(*leaves), nn.functional.linear(*wide)
    assert ((y - expected).abs() <= 2 * HALF * (expected.abs() + 1)).all()
    grad = numbers(2, 50, 30, seed=5, dtype=dtype)
    for f, w in zip(
        torch.autograd.grad(y, leaves, grad),
        torch.autograd.grad(expected, wide, grad.double()),
        strict=True,
    ):
        assert (f - w).abs().max() <= HALF * w.abs().max()


def test_a_product_shows_a_nan_in_its_row_alone(dtype: torch.dtype) -> None:
    a, b = numbers(70, 80, dtype=dtype), numbers(80, 90, dtype=dtype)
    a[40, 33] = torch.nan
    for turned in (False, True):
        found = products.product(given_as(a, turned), b, turned, False)
        assert found[40].isnan().all()
        assert found.isnan().sum() == 90


def operators(dtype: torch.dtype) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    return {
        "product": (
            products.product,
            (numbers(5, 6, dtype=dtype), numbers(6, 7, dtype=dtype), False, False),
        ),
        "product turned": (
            products.product,
            (numbers(6, 5, dtype=dtype), numbers(7, 6, dtype=dtype), True, True),
        ),
        "product added": (
            products.product_into,
            (
                numbers(5, 7, dtype=dtype),
                numbers(5, 6, dtype=dtype),
                numbers(6, 7, dtype=dtype),
                False,
                False,
                True,
            ),
        ),
    }


@pytest.mark.parametrize("name", ["product", "product turned", "product added"])
def test_each_operator_keeps_its_word_to_torch(dtype: torch.dtype, name: str) -> None:
    operator, arguments = operators(dtype)[name]
    torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


def test_autograd_refuses_what_a_product_has_written_over() -> None:
    weight = torch.randn(4, 4, requires_grad=True)
    saved = torch.randn(4, 4)
    result = (saved * weight).sum()
    products.product_into(saved, torch.randn(4, 8), torch.randn(4, 8), False, True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()


def test_the_bits_do_not_depend_on_the_number_of_threads(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "WORTH_THREADS", 1)
    before = torch.get_num_threads()
    # The last has too many numbers of B for one layout.
    for m, n, k in ((1000, 70, 600), (70, 1000, 30), (450, 500, 20), (100, 100, 90_000)):
        a, b = numbers(m, k, dtype=dtype), numbers(k, n, seed=1, dtype=dtype)
        given = given_as(a, True)  # an orientation that every way lays out anew
        try:
            found = []
            for threads in (1, 2, 4, 8):
                torch.set_num_threads(threads)
                found.append(products.product(given, b, True, False))
        finally:
            torch.set_num_threads(before)
        assert all(torch.equal(found[0], other) for other in found[1:])
        check_product(found[0], a, b)


FEWER_THREADS = """
import torch
from hasten.parts.kernels import products

torch.set_num_threads(4)
torch.manual_seed(0)
for m, n, k in ((2000, 96, 128), (300, 40, 3000), (150, 150, 4000)):
    for dtype in (torch.float32, torch.bfloat16):
        a, b = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype)
        found = products.product(a, b, False, False).double()
        exact = a.double() @ b.double()
        assert (found - exact).abs().max() <= 0.01 * exact.abs().max(), (m, n, k, dtype)
print("whole")
"""


@pytest.mark.parametrize("dtype", ["float32"], indirect=True)  # all formats at once
def test_a_product_is_whole_with_fewer_threads_than_it_asked_for() -> None:
    environment = {**os.environ, "OMP_THREAD_LIMIT": "3", "OMP_DYNAMIC": "false"}
    command = [sys.executable, "-c", FEWER_THREADS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "whole\n", done.stderr
