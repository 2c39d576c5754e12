"""Cross-entropy of labelled rows, chunk by chunk: the usual value and gradients, and the papers'.

The reference is ``F.cross_entropy`` on all logits, in float64.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from covering import covering
from hasten.parts.data.collate import IGNORED
from hasten.parts.nn import losses
from hasten.parts.nn.losses import (
    CHUNK_BYTES,
    FEWEST_ROWS,
    MOST_ROWS,
    LabelOnlyLoss,
    LossTerms,
    chunk_bytes,
    chunk_rows,
    label_only_cross_entropy,
    whole_cross_entropy,
)
from tiny import tiny_model

V, H = 29, 8


def leaves(rows: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """(hidden, weight, labels), the first two without history and in need of gradients."""
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, H, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(V, H, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(V, (rows,), generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def usual(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight), labels, reduction="sum")


TERMS = (
    LossTerms(),
    LossTerms(label_smoothing=0.1),
    LossTerms(z_loss=1e-2),
    LossTerms(label_smoothing=0.3, z_loss=0.2),
)
CAPPED = (LossTerms(softcap=3.0), LossTerms(0.1, 1e-2, 2.0))


def formula(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor, terms: LossTerms) -> Any:
    """The loss as the papers write it, row by row."""
    total = hidden.new_zeros(())
    for row, label in zip(hidden, labels.tolist(), strict=True):
        if label == IGNORED:
            continue
        scores = weight @ row + bias
        if terms.softcap:
            scores = terms.softcap * torch.tanh(scores / terms.softcap)
        partition = scores.exp().sum().log()
        target = torch.full_like(scores, terms.label_smoothing / V)
        target[label] += 1 - terms.label_smoothing
        total = total - (target * (scores - partition)).sum() + terms.z_loss * partition**2
    return total


@pytest.mark.parametrize("terms", [*TERMS, *CAPPED], ids=str)
@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("chunk", [1, 4, "auto"])
def test_every_term_is_the_papers_formula_with_its_gradient(
    terms: LossTerms, skip: bool, chunk: int | str
) -> None:
    """``skip=False`` is the way of a GPU, where nobody counts the labels."""
    hidden, weight, labels = leaves(11)
    labels[[0, 4, 10]] = IGNORED
    bias = torch.linspace(-1, 1, V, dtype=torch.float64).requires_grad_()
    expected = formula(hidden, weight, labels, bias, terms)
    found = label_only_cross_entropy(hidden, weight, labels, chunk, bias, terms, skip)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    got = torch.autograd.grad(found, (hidden, weight, bias))
    want = torch.autograd.grad(expected, (hidden, weight, bias))
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("terms", [*TERMS, *CAPPED], ids=str)
def test_the_loss_over_whole_logits_has_the_same_terms(terms: LossTerms) -> None:
    hidden, weight, labels = leaves(9)
    labels[3] = IGNORED
    bias = torch.zeros(V, dtype=torch.float64)
    found = whole_cross_entropy(F.linear(hidden, weight), labels, terms)
    torch.testing.assert_close(found, formula(hidden, weight, labels, bias, terms))


@given(
    st.integers(0, 12),
    st.integers(1, 15),
    st.integers(0, 2**12 - 1),
    st.floats(0, 0.9),
    st.floats(0, 0.1),
)
def test_any_labels_in_any_chunks_are_the_formula(
    rows: int, chunk: int, ignored: int, smoothing: float, z_loss: float
) -> None:
    hidden, weight, labels = leaves(rows)
    labels[[i for i in range(rows) if ignored >> i & 1]] = IGNORED
    terms, bias = LossTerms(smoothing, z_loss), torch.zeros(V, dtype=torch.float64)
    expected = formula(hidden, weight, labels, bias, terms)
    for skip in (True, False):
        found = label_only_cross_entropy(hidden, weight, labels, chunk, None, terms, skip)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bad", [{"label_smoothing": 1.0}, {"z_loss": -1e-4}, {"softcap": 0.0}])
def test_a_term_outside_its_range_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(bad))} is {next(iter(bad.values()))}"):
        LossTerms(**bad)


@given(st.integers(1, 300_000))
def test_a_chunk_by_memory_stays_within_it_where_that_leaves_rows_to_multiply(v: int) -> None:
    rows = chunk_rows("auto", v)
    assert FEWEST_ROWS <= rows <= MOST_ROWS
    assert 4 * rows * v <= CHUNK_BYTES or rows == FEWEST_ROWS


def test_a_gpu_takes_chunks_by_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """An 80 GB card sixteen times as many rows as a processor; cards of a kind the same."""
    vocabulary = 128_256
    assert chunk_bytes(0) == chunk_bytes(2 * 10**9) == CHUNK_BYTES
    assert chunk_bytes(85_899_345_920) == chunk_bytes(84_929_871_872) == 16 * CHUNK_BYTES
    assert chunk_rows("auto", vocabulary, chunk_bytes(85 * 10**9)) == 2092
    monkeypatch.setattr(losses, "device_bytes", lambda device: 85 * 10**9)
    assert LabelOnlyLoss(tiny_model()).chunk == MOST_ROWS


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_what_is_frozen_gets_no_gradient_and_the_other_its_own(frozen: str) -> None:
    tensors = dict(zip(("hidden", "weight", "labels"), leaves(9), strict=True))
    tensors[frozen] = tensors[frozen].detach()
    learning = tensors["weight" if frozen == "hidden" else "hidden"]
    (got,) = torch.autograd.grad(label_only_cross_entropy(**tensors, chunk=4), learning)
    (want,) = torch.autograd.grad(usual(**tensors), learning)
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-13)
    assert tensors[frozen].grad is None


@pytest.mark.parametrize(("chunk", "unlabelled"), covering([1, 64], [0, 1]))
def test_bf16_stays_within_its_rounding_however_many_chunks_add_up(
    chunk: int, unlabelled: int
) -> None:
    """A bf16 number has a relative error of 2^-9; a bf16 sum of 2,000 rows would lose far more.

    A chunk with rows without a label goes through torch's operators, as all do on a GPU.
    """
    hidden, weight, labels = leaves(2000, torch.bfloat16)
    labels[: 640 * unlabelled : 10] = IGNORED
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    found = label_only_cross_entropy(hidden, weight, labels, chunk, skip=False)
    expected = usual(*wide, labels)
    assert found.dtype == torch.float32
    assert abs(found.item() / expected.item() - 1) < 2**-9
    got = torch.autograd.grad(found, (hidden, weight))
    want = torch.autograd.grad(expected, wide)
    for narrow, reference in zip(got, want, strict=True):
        assert narrow.dtype == torch.bfloat16
        assert (narrow.double() - reference).norm() < 2**-7 * reference.norm()


def test_autocast_rounds_products_and_leaves_gradients_in_float32() -> None:
    hidden, weight, labels = leaves(50, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = label_only_cross_entropy(hidden, weight, labels, 16)
        expected = usual(hidden, weight, labels)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    got = torch.autograd.grad(found, (hidden, weight))
    want = torch.autograd.grad(expected, (hidden, weight))
    for mine, reference in zip(got, want, strict=True):
        assert mine.dtype == torch.float32
        assert (mine - reference).norm() < 2**-7 * reference.norm()
    plain = torch.autograd.grad(usual(hidden, weight, labels), weight)[0]
    assert not torch.equal(got[1], plain), "autocast had no effect"


@pytest.mark.parametrize("chunk", [0, -3, True, "all"])
def test_a_chunk_without_rows_is_refused(chunk: Any) -> None:
    with pytest.raises(ValueError, match=f"chunk is {chunk!r}"):
        label_only_cross_entropy(*leaves(3), chunk)


@pytest.mark.parametrize("label", [-1, V])
def test_a_label_outside_the_vocabulary_is_refused(label: int) -> None:
    hidden, weight, labels = leaves(3)
    labels[1] = label
    with pytest.raises(RuntimeError, match="out of bounds"):
        label_only_cross_entropy(hidden, weight, labels, 2)
