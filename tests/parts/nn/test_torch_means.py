"""A mean of torch's own as (sum, count): the parts of a batch add up to the whole batch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hasten.parts.nn.torch_means import SummedMean, is_torch_mean

WEIGHTS = torch.tensor([0.5, 2.0, 0.0, 1.25, 3.0], dtype=torch.float64)
LABELS = torch.tensor([[0, 1, -100, 4], [3, -100, -100, -100], [2, 4, 0, 1]])
LOSSES: dict[str, Any] = {
    "cross-entropy": nn.CrossEntropyLoss(),
    "another ignored label": nn.CrossEntropyLoss(ignore_index=4),
    "class weights": nn.CrossEntropyLoss(weight=WEIGHTS, ignore_index=-100),
    "label smoothing": nn.CrossEntropyLoss(label_smoothing=0.2),
    "weights and smoothing": nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.2),
    "nll": nn.NLLLoss(),
    "nll with weights": nn.NLLLoss(weight=WEIGHTS, ignore_index=1),
    "function": F.cross_entropy,
    "nll function": F.nll_loss,
    "partial": functools.partial(F.cross_entropy, weight=WEIGHTS, ignore_index=0),
}
ELEMENTWISE = (
    *(nn.MSELoss(), nn.L1Loss(), nn.SmoothL1Loss(beta=0.3), nn.HuberLoss(delta=0.4)),
    *(nn.BCELoss(), nn.BCEWithLogitsLoss(pos_weight=torch.tensor(2.0)), F.mse_loss),
    functools.partial(F.binary_cross_entropy_with_logits, pos_weight=torch.tensor(2.0)),
)


def scores(seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(3, 5, 4, generator=draw, dtype=torch.float64).log_softmax(1)


def check(loss: Any, output: Tensor, target: Tensor) -> None:
    """Loss and gradient over all examples are those of the examples one by one, added up."""
    assert is_torch_mean(loss)
    whole, parts = output.clone().requires_grad_(), output.clone().requires_grad_()
    mean = loss(whole, target)
    mean.backward()
    pairs = [SummedMean(loss)(parts[i : i + 1], target[i : i + 1]) for i in range(len(output))]
    total, count = sum(p[0] for p in pairs), sum(p[1] for p in pairs)
    (total / count).backward()
    torch.testing.assert_close(total / count, mean)
    torch.testing.assert_close(parts.grad, whole.grad)


@pytest.mark.parametrize("name", LOSSES)
def test_records_with_unlike_numbers_of_labels_add_up_to_their_batch(name: str) -> None:
    labels = LABELS.clamp(min=0) if name == "partial" else LABELS
    if name in ("nll with weights", "another ignored label"):
        labels = labels.where(labels >= 0, LOSSES[name].ignore_index)
    check(LOSSES[name], scores(), labels)


def test_probabilities_of_classes_count_each_position() -> None:
    check(nn.CrossEntropyLoss(weight=WEIGHTS), scores(), scores(1).exp())
    check(F.cross_entropy, scores()[:, :, 0], scores(1).exp()[:, :, 0])
    one, pair = scores()[0, :, 0], SummedMean(F.cross_entropy)
    total, count = pair(one, scores(1).exp()[0, :, 0])
    assert int(count) == 1
    torch.testing.assert_close(total, F.cross_entropy(one, scores(1).exp()[0, :, 0]))


@pytest.mark.parametrize("loss", ELEMENTWISE, ids=range(len(ELEMENTWISE)))
def test_other_means_count_elements(loss: Any) -> None:
    check(loss, scores().exp(), scores(1).exp())


def test_a_sum_that_half_precision_cannot_hold_is_finite() -> None:
    output = torch.full((8, 8), -128.0, dtype=torch.float16)
    output[:, 0] = 128.0
    total, count = SummedMean(nn.L1Loss())(output.repeat(1, 200), torch.zeros(8, 1600).half())
    assert (total.item(), int(count)) == (8 * 1600 * 128.0, 8 * 1600)


@pytest.mark.parametrize("settings", [{}, {"label_smoothing": 0.1}, {"weight": WEIGHTS}])
def test_records_without_any_label_add_nothing(settings: dict[str, Any]) -> None:
    output = scores().requires_grad_()
    loss = nn.CrossEntropyLoss(**settings)
    total, count = SummedMean(loss)(output, torch.full((3, 4), -100))
    total.backward()
    assert (total.item(), float(count)) == (0, 0)
    assert torch.equal(output.grad, torch.zeros_like(output))  # type: ignore[arg-type]


def test_a_setting_that_changes_has_an_effect_and_the_module_stays_as_it_is() -> None:
    loss = nn.CrossEntropyLoss()
    pair = SummedMean(loss)
    pair(scores(), LABELS)
    loss.label_smoothing = 0.3
    total, count = pair(scores(), LABELS)
    torch.testing.assert_close(total / count, loss(scores(), LABELS))
    assert loss.reduction == "mean"


def test_class_weights_move_with_the_module() -> None:
    pair = SummedMean(nn.CrossEntropyLoss(weight=WEIGHTS)).to(torch.float32)
    total, count = pair(scores().float(), LABELS)
    assert total.dtype == count.dtype == torch.float32


class Focal(nn.CrossEntropyLoss):
    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return super().forward(output, target) ** 2


def hooked() -> nn.Module:
    loss = nn.CrossEntropyLoss()
    loss.register_forward_hook(lambda module, given, found: 2 * found)
    return loss


def replaced() -> nn.Module:
    loss = nn.CrossEntropyLoss()
    loss.forward = lambda output, target: output.mean()  # type: ignore[method-assign]
    return loss


def cubed(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target) ** 3


UNKNOWN: tuple[Callable[..., Any], ...] = (
    *(Focal(), hooked(), replaced(), cubed, functools.partial(cubed)),
    *(nn.CrossEntropyLoss(reduction="sum"), nn.CrossEntropyLoss(reduction="none")),
    functools.partial(F.cross_entropy, reduction="sum"),
    functools.partial(F.cross_entropy, size_average=True),
    functools.partial(F.cross_entropy, scores()),
    functools.partial(F.mse_loss, weight=torch.ones(1)),  # divided by the sum of weights
    nn.KLDivLoss(),
)


@pytest.mark.parametrize("loss", UNKNOWN, ids=range(len(UNKNOWN)))
def test_what_may_divide_by_something_else_is_not_taken_for_such_a_mean(loss: Any) -> None:
    assert not is_torch_mean(loss)
