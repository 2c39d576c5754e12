"""Scores of labels are those of a plain log-softmax, and so are their gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hasten.parts.nn import label_scores as part
from hasten.parts.nn.label_scores import label_scores

ROWS, WIDTH, VOCABULARY, CHUNK = 11, 6, 19, 4


def drawn(dtype: torch.dtype, has_bias: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    draw = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in ((ROWS, WIDTH), (VOCABULARY, WIDTH), (VOCABULARY,))
    )
    labels = torch.randint(VOCABULARY, (ROWS,), generator=draw)
    with torch.no_grad():  # half of the labels have the largest logit
        top = (hidden @ weight.t()).argmax(1)
    return hidden, weight, bias if has_bias else None, torch.where(labels % 2 == 0, top, labels)


def plain(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, scale: float) -> Any:
    logits = scale * torch.nn.functional.linear(hidden, weight, bias)
    log_probs = logits.log_softmax(1)
    entropy = -(log_probs.exp() * log_probs).sum(1)
    chosen = log_probs.gather(1, labels.unsqueeze(1)).squeeze(1)
    return chosen, entropy, logits.mean(1), logits.argmax(1) == labels


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("scale", [1.0, 0.7])
@pytest.mark.parametrize("room", [0, 4])
def test_scores_and_gradients_are_those_of_log_softmax(
    has_bias: bool, scale: float, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part, "KEPT_CHUNKS", room)
    monkeypatch.setattr(part, "chunk_bytes_on", lambda device: 0)
    hidden, weight, bias, labels = drawn(torch.float64, has_bias)
    found = label_scores(hidden, weight, labels, CHUNK, bias, scale)
    wanted = plain(hidden, weight, bias, labels, scale)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    factors = torch.linspace(-1, 2, ROWS, dtype=torch.float64)
    tensors = [t for t in (hidden, weight, bias) if t is not None]
    gradients = torch.autograd.grad((found.log_probs * factors).sum(), tensors)
    references = torch.autograd.grad((wanted[0] * factors).sum(), tensors)
    for one, other in zip(gradients, references, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pass_without_gradients_has_the_same_bits(dtype: torch.dtype) -> None:
    hidden, weight, _, labels = drawn(dtype, False)
    trained = label_scores(hidden, weight, labels, CHUNK)
    with torch.no_grad():
        referred = label_scores(hidden, weight, labels, CHUNK, statistics=False)
    assert trained.log_probs.dtype == torch.float32
    assert torch.equal(trained.log_probs, referred.log_probs)
    wide = [hidden.detach().float(), weight.detach().float()]
    _, entropy, _, is_first = plain(*wide, None, labels, 1.0)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(trained.entropy.detach(), entropy, rtol=tolerance, atol=tolerance)
    assert dtype != torch.float32 or torch.equal(trained.is_first, is_first)


def test_of_equal_logits_the_earliest_is_first() -> None:
    hidden, weight = torch.ones(2, 1), torch.tensor([[1.0], [2.0], [2.0]])
    found = label_scores(hidden, weight, torch.tensor([1, 2]), CHUNK)
    assert found.is_first.tolist() == [True, False]


def test_a_gradient_of_the_entropy_is_refused() -> None:
    hidden, weight, _, labels = drawn(torch.float32, False)
    found = label_scores(hidden, weight, labels, CHUNK)
    with pytest.raises(ValueError, match="leave labelled_token_loss out"):
        (found.log_probs.sum() + 0 * found.entropy.sum()).backward()


def test_no_label_has_gradients_of_zero() -> None:
    hidden, weight, _, _ = drawn(torch.float32, False)
    found = label_scores(hidden[:0], weight, torch.empty(0, dtype=torch.int64), CHUNK)
    found.log_probs.sum().backward()
    assert weight.grad is not None
    assert not weight.grad.any()
