"""torch's mean losses as (sum, count), so that parts of a batch combine to the full mean.

The mean of two micro-batches' means is their common mean only if both divide by the same number.
Cross-entropy and NLL divide by the labels that aren't ``ignore_index``, or by the sum of their
classes' weights; the other losses divide by the elements.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hasten.parts.nn.rebind import has_hooks


def class_error(output: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    """Returns the cross-entropy of (..., classes), or of (rows, classes, ...) as in torch."""
    if output.shape[:-1] == target.shape:
        output, target = output.flatten(0, -2), target.flatten()
    return F.cross_entropy(output, target, reduction=reduction)


def squared_error(output: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    """Returns the squared error of tensors of one shape.

    Raises:
        ValueError: the shapes differ; torch would repeat the smaller tensor.
    """
    if output.shape != target.shape:
        raise ValueError(
            f"the output has shape {tuple(output.shape)} and the target {tuple(target.shape)}, so "
            "no squared error was meant; give loss_fn(output, target)"
        )
    return F.mse_loss(output, target, reduction=reduction)


# Function -> keywords that don't change its divisor. mse_loss's weight is absent, because torch
# divides by the sum of these weights.
LABELLED: dict[Any, set[str]] = {
    F.cross_entropy: {"weight", "ignore_index", "label_smoothing"},
    F.nll_loss: {"weight", "ignore_index"},
    class_error: set(),
}
ELEMENTWISE: dict[Any, set[str]] = {
    F.mse_loss: set(),
    squared_error: set(),
    F.l1_loss: set(),
    F.smooth_l1_loss: {"beta"},
    F.huber_loss: {"delta"},
    F.binary_cross_entropy: {"weight"},
    F.binary_cross_entropy_with_logits: {"weight", "pos_weight"},
}
MODULES: dict[type[nn.Module], Any] = {
    nn.CrossEntropyLoss: F.cross_entropy,
    nn.NLLLoss: F.nll_loss,
    nn.MSELoss: F.mse_loss,
    nn.L1Loss: F.l1_loss,
    nn.SmoothL1Loss: F.smooth_l1_loss,
    nn.HuberLoss: F.huber_loss,
    nn.BCELoss: F.binary_cross_entropy,
    nn.BCEWithLogitsLoss: F.binary_cross_entropy_with_logits,
}
IGNORED = -100  # torch's default


class SummedMean(nn.Module):
    """A mean loss of torch's as (sum, count): sum / count is the loss's own result.

    Args:
        loss_fn: one that ``is_torch_mean``. A module stays the caller's: its weights move with
            this module, and a changed setting has an effect from the next call on.
    """

    def __init__(self, loss_fn: Callable[..., Tensor]) -> None:
        super().__init__()
        self.loss_fn = loss_fn

    def forward(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the loss sum, and the divisor of the mean; neither is read on the host."""
        if output.dtype == torch.float16:  # a sum soon exceeds fp16's largest number, 65504
            mean = self.loss_fn(output, target).float()
            count = self._count(output, target)
            return mean * count, count
        if isinstance(self.loss_fn, nn.Module):
            summed: Any = copy.copy(self.loss_fn)  # shares the weights
            summed.reduction = "sum"
        else:
            summed = functools.partial(self.loss_fn, reduction="sum")
        return summed(output, target), self._count(output, target)

    def _count(self, output: Tensor, target: Tensor) -> Tensor:
        labels = label_count(self.loss_fn, target)
        if labels is not None:
            return labels
        if _function(self.loss_fn) in ELEMENTWISE:
            return torch.tensor(torch.broadcast_shapes(output.shape, target.shape).numel())
        # Class probabilities: each position has a label.
        return torch.tensor(target.numel() // target.shape[1 if target.ndim > 1 else 0])


def check_reduction(loss_fn: Any, joined: bool) -> None:
    """Refuses a loss of torch's that isn't one number, or a sum where means are ``joined``."""
    function = loss_fn.func if isinstance(loss_fn, functools.partial) else loss_fn
    named: Mapping[str, Any] = getattr(loss_fn, "keywords", {})
    reduction = named.get("reduction", getattr(function, "reduction", "mean"))
    if not str(getattr(function, "__module__", "")).startswith("torch.nn."):
        return  # another type of reduction
    if reduction == "none" or (joined and reduction == "sum"):
        raise ValueError(
            f"loss_fn has reduction={reduction!r}, and a step needs the mean of a batch, or "
            "(sum, count); take reduction='mean'"
        )


def label_count(loss_fn: Any, target: Tensor) -> Tensor | None:
    """Returns the divisor of a mean: the labels, or the sum of their weights; None: another one."""
    if _function(loss_fn) not in LABELLED or target.is_floating_point():
        return None
    labelled = target != _setting(loss_fn, "ignore_index", IGNORED)
    weight: Tensor | None = _setting(loss_fn, "weight", None)
    if weight is None:
        return labelled.sum()
    return (weight[target.where(labelled, 0)] * labelled).sum()


def with_sum(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the loss function as (sum, count) if it is torch's own mean, else unchanged."""
    return SummedMean(loss_fn) if is_torch_mean(loss_fn) else loss_fn


def is_torch_mean(loss_fn: Any) -> bool:
    """Returns True if a loss is torch's own mean, as a module, a function or a partial.

    A subclass, a module with hooks, another reduction and a function around one of them
    aren't. They may divide by something else.
    """
    if isinstance(loss_fn, nn.Module):
        plain = type(loss_fn) in MODULES and "forward" not in vars(loss_fn)
        return plain and not has_hooks(loss_fn) and _setting(loss_fn, "reduction", "mean") == "mean"
    function = _function(loss_fn)
    if function is None:
        return False
    named = {} if loss_fn is function else dict(loss_fn.keywords)
    allowed = (LABELLED | ELEMENTWISE)[function]
    return named.pop("reduction", "mean") == "mean" and set(named) <= allowed


def _function(loss_fn: Any) -> Any:
    """Returns torch's function that a loss function calls; None if unknown."""
    if isinstance(loss_fn, nn.Module):
        return MODULES.get(type(loss_fn))
    if isinstance(loss_fn, functools.partial) and not loss_fn.args:
        loss_fn = loss_fn.func
    return next((f for f in (*LABELLED, *ELEMENTWISE) if f is loss_fn), None)


def _setting(loss_fn: Any, name: str, default: Any) -> Any:
    if isinstance(loss_fn, nn.Module):
        return getattr(loss_fn, name)
    return getattr(loss_fn, "keywords", {}).get(name, default)
