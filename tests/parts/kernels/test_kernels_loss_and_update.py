"""Fused cross-entropy and AdamW against their formulas in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hasten.parts.kernels import rowwise
from kernel_units import numbers

pytestmark = pytest.mark.skipif(not rowwise.library().library, reason=rowwise.library().reason)
formats = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
sizes = st.integers(1, 70)


def check_entropy(logits: Tensor, labels: Tensor) -> None:
    reference = logits.double().requires_grad_()
    expected = F.cross_entropy(reference, labels, reduction="none")
    (wanted,) = torch.autograd.grad(expected.sum(), reference)
    found = logits.clone()
    losses = rowwise.cross_entropy_(found, labels)
    assert losses.dtype == torch.float32
    scale = logits.abs().max().double().clamp(min=1)  # a loss is a difference of two logits
    assert ((losses.double() - expected).abs() <= 2e-6 * scale).all()
    bound = 4e-6 if logits.dtype == torch.float32 else 2**-8
    # A rounding of a large logarithm moves every weight by its own share of it.
    assert ((found.double() - wanted).abs() <= bound + 2**-23 * scale).all()


@formats
@settings(max_examples=25)
@given(count=sizes, classes=st.integers(1, 300), size=st.sampled_from([0.0, 1.0, 30.0]))
def test_cross_entropy_and_its_gradient_are_the_formulas(
    dtype: torch.dtype, count: int, classes: int, size: float
) -> None:
    labels = torch.arange(count) * 7 % classes
    check_entropy(numbers(count, classes, dtype=dtype) * size, labels)


@formats
def test_cross_entropy_of_extreme_logits_stays_finite_and_right(dtype: torch.dtype) -> None:
    for row in ([1e4, -1e4, 0.0], [-1e4] * 3, [1e4] * 3, [1e4, 1e4, -1e4], [88.0, -88.0, 87.5]):
        for label in range(3):
            logits = torch.tensor([row], dtype=dtype)
            check_entropy(logits, torch.tensor([label]))
            assert rowwise.cross_entropy_(logits, torch.tensor([label])).isfinite().all()
    only = torch.tensor([[5.0]], dtype=dtype)
    assert rowwise.cross_entropy_(only, torch.tensor([0])).item() == 0
    assert only.item() == 0


def test_a_hidden_class_has_no_weight_and_a_wanted_one_an_infinite_loss() -> None:
    logits = torch.tensor([[0.0, -torch.inf], [0.0, -torch.inf]])
    losses = rowwise.cross_entropy_(logits, torch.tensor([0, 1]))
    assert losses.tolist() == [0, torch.inf]
    assert (logits[0].abs() < 1e-37).all()


@pytest.mark.parametrize("label", [-1, -100, 5, 2**40])
def test_a_label_outside_the_vocabulary_is_refused(label: int) -> None:
    with pytest.raises(IndexError, match="outside the vocabulary of 5"):
        rowwise.cross_entropy_(torch.zeros(2, 5), torch.tensor([0, label]))


def test_labels_that_do_not_fit_the_rows_are_refused() -> None:
    for labels in (torch.zeros(3).long(), torch.zeros(2).int(), torch.zeros(2, 1).long()):
        with pytest.raises(ValueError, match="2 rows need so many int64 labels"):
            rowwise.cross_entropy_(torch.zeros(2, 5), labels)
    with pytest.raises(ValueError, match="must be contiguous"):
        rowwise.cross_entropy_(torch.zeros(5, 2).t(), torch.zeros(2).long())


def test_strided_labels_are_read_in_their_order() -> None:
    labels = torch.arange(64).view(32, 2)[:, 1]
    assert not labels.is_contiguous()
    check_entropy(numbers(32, 64), labels)


@formats
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_logit_that_is_not_finite_shows_in_loss_and_gradient(
    dtype: torch.dtype, bad: float
) -> None:
    logits = numbers(3, 50, dtype=dtype)
    logits[1, 33] = bad
    losses = rowwise.cross_entropy_(logits, torch.tensor([1, 2, 3]))
    assert losses.isfinite().tolist() == [True, False, True]
    assert logits.isfinite().all(dim=1).tolist() == [True, False, True]


@pytest.mark.parametrize("clip", [1.0, 0.25])
@pytest.mark.parametrize("half", [False, True])
def test_ten_updates_are_those_of_torch_in_float64(half: bool, clip: float) -> None:
    """Every move within 2e-6 of itself; in float32 1 - 0.99999 would be off by 1e-3 of itself."""
    start, (lr, decay, beta1, beta2, eps) = numbers(37, 11), (1e-2, 0.1, 0.9, 0.99999, 1e-8)
    weight, first, second = start.clone(), torch.zeros(37, 11), torch.zeros(37, 11)
    copy = torch.empty(37, 11, dtype=torch.bfloat16)
    reference = start.double().requires_grad_()
    optimizer = torch.optim.AdamW(
        [reference], lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=decay
    )
    for step in range(1, 11):
        grad = numbers(37, 11, seed=step, dtype=torch.bfloat16 if half else torch.float32)
        reference.grad = grad.double() * clip
        optimizer.step()
        rate, root = lr / (1 - beta1**step), (1 - beta2**step) ** -0.5
        rule = (rate, 1 - lr * decay, beta1, beta2, root, eps, clip)
        rowwise.adamw_(weight, grad, first, second, copy, rule)
        moved = (reference - start.double()).abs().max()
        assert (weight - reference).abs().max() <= 2e-6 * moved + 2**-24 * step * weight.abs().max()
    assert torch.equal(copy, weight.bfloat16())
    state = optimizer.state[reference]
    torch.testing.assert_close(first.double(), state["exp_avg"], rtol=2e-6, atol=1e-7)
    torch.testing.assert_close(second.double(), state["exp_avg_sq"], rtol=2e-6, atol=1e-12)


def test_an_update_moves_turned_tensors_and_refuses_what_lies_otherwise() -> None:
    rule = (0.1, 1.0, 0.9, 0.999, 1.0, 1e-8, 1.0)

    def moved(*tensors: Tensor) -> Tensor:
        rowwise.adamw_(*tensors, None, rule)
        return tensors[0]

    grad, zero = numbers(3, 5), torch.zeros(3, 5)
    turned_way = [t.t().contiguous().t() for t in (zero, grad, zero, zero)]
    assert torch.equal(moved(*turned_way), moved(zero.clone(), grad, zero.clone(), zero.clone()))
    one_row = [torch.zeros(5, 1).t(), grad[:1], torch.zeros(5, 1).t(), torch.zeros(1, 5)]
    assert torch.equal(moved(*one_row), moved(*(t[:1].clone() for t in (zero, grad, zero, zero))))
    with pytest.raises(ValueError, match="in the same order"):
        moved(zero, turned_way[1], zero, zero)
    with pytest.raises(ValueError, match="without gaps"):
        moved(*[torch.zeros(3, 10)[:, ::2]] * 4)


def test_an_update_by_a_nan_shows_it() -> None:
    grad, rule = torch.tensor([1.0, torch.nan]), (0.1, 1.0, 0.9, 0.999, 1.0, 1e-8, 1.0)
    weight, first, second = torch.ones(2), torch.zeros(2), torch.zeros(2)
    rowwise.adamw_(weight, grad, first, second, None, rule)
    assert all(t.isnan().tolist() == [False, True] for t in (weight, first, second))
