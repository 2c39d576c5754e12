"""Language-model losses as modules that map a micro-batch to (summed loss, number of labels).

``WholeLogitsLoss`` is the common way: logits for every slot, then cross-entropy. The head that
``label_only_head`` puts in its place computes logits for labelled positions alone, a chunk at a
time, and forms the gradients in the forward pass, so that no more than one chunk of logits ever
exists: with a vocabulary of 100,000 and four-byte floats, one slot's logits take 0.4 MB.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hasten.parts.hugging_face import causal_lm, trunk

IGNORED = -100


class WholeLogitsLoss(nn.Module):
    """Cross-entropy over the logits of every slot, in float32 or wider, summed over labels."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, labels: Tensor, **inputs: Any) -> tuple[Tensor, Tensor]:
        """``labels`` (B, T), aligned with the position that predicts them, -100: no loss."""
        logits = self.model(use_cache=False, **inputs).logits  # (B, T, vocabulary)
        logits = logits.to(_at_least_float32(logits.dtype))
        loss = F.cross_entropy(
            logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        return loss, (labels != IGNORED).sum()


class LabelOnlyLoss(nn.Module):
    """The trunk's hidden states at labelled positions, through a :class:`LabelOnlyHead`."""

    def __init__(self, model: nn.Module, chunk: int) -> None:
        super().__init__()
        self.model = model
        inner = causal_lm(model)
        if not isinstance(inner.lm_head, LabelOnlyHead):
            inner.lm_head = LabelOnlyHead(inner.lm_head, chunk)

    def forward(self, labels: Tensor, **inputs: Any) -> tuple[Tensor, Tensor]:
        hidden = trunk(self.model)(use_cache=False, **inputs).last_hidden_state  # (B, T, hidden)
        loss: Tensor
        loss, count = causal_lm(self.model).lm_head(hidden, labels)
        return loss, count


class LabelOnlyHead(nn.Module):
    """A linear head that owns its weight and, given labels, returns (loss sum, count).

    Without labels it is the linear layer it replaced, so that generation and saving go on as
    before; the weight is the same parameter under the same name, tied or not.
    """

    def __init__(self, head: nn.Linear, chunk: int) -> None:
        super().__init__()
        if type(head) is not nn.Linear or head.bias is not None:  # an adapter would be bypassed
            raise ValueError(
                "only a plain linear head without a bias can be replaced, and this one is "
                f"{head}; leave the loss as it is, or the head without an adapter"
            )
        self.weight = head.weight  # (vocabulary, hidden)
        self.in_features, self.out_features = head.in_features, head.out_features
        self.bias = None
        self.chunk = chunk
        self.largest_logits = 0  # rows of logits that existed at once, for whoever asks

    def forward(
        self, hidden: Tensor, labels: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        if labels is None:
            return F.linear(hidden, self.weight)
        kept = labels.flatten() != IGNORED
        positions = kept.nonzero().squeeze(1)  # on a GPU this waits for the device: the row count
        self.largest_logits = max(self.largest_logits, min(len(positions), self.chunk))
        loss = label_only_cross_entropy(
            hidden.flatten(0, -2).index_select(0, positions),
            self.weight,
            labels.flatten().index_select(0, positions),
            self.chunk,
        )
        return loss, kept.sum()


def label_only_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int) -> Tensor:
    """Sum of cross-entropy of ``hidden @ weight.T`` against ``labels``, at most a chunk at a time.

    First derivatives only: the gradients are constants to autograd.

    Args:
        hidden: (labels, hidden), every row labelled.
        weight: (vocabulary, hidden).
        labels: (labels,), int64.
        chunk: rows whose logits exist at once.

    Raises:
        ValueError: ``chunk`` is below 1.
    """
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}; at least one row of logits must exist at once")
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    loss: Tensor = _ChunkedCrossEntropy.apply(hidden, weight, labels, chunk)
    return loss


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Linear head and cross-entropy whose backward pass is a scaling of what forward computed.

    Since the loss is a sum, its gradient is linear in the incoming scalar; softmax(logits) minus
    the one-hot labels can be turned into gradients while the chunk's logits are at hand.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int) -> Tensor:
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        # Chunks add up: a sum of bf16 terms would lose the small ones.
        wide = _at_least_float32(weight.dtype)
        grad_weight = torch.zeros_like(weight, dtype=wide) if wants_weight else None
        loss = hidden.new_zeros((), dtype=wide)
        for start in range(0, hidden.shape[0], chunk):
            rows, wanted = hidden[start : start + chunk], labels[start : start + chunk]
            chunk_loss, grad_logits = _softmax_minus_label(F.linear(rows, weight), wanted)
            loss += chunk_loss
            if grad_hidden is not None:
                torch.mm(grad_logits, weight, out=grad_hidden[start : start + chunk])
            if grad_weight is not None:
                grad_weight += grad_logits.T @ rows
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden = grad_hidden * grads[0].to(grad_hidden.dtype)
        if grad_weight is not None:
            grad_weight = (grad_weight * grads[0]).to(ctx.weight_dtype)
        return grad_hidden, grad_weight, None, None


def _softmax_minus_label(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Summed loss of a chunk in float32 or wider, and d loss / d logits in the logits' format."""
    scores = logits.to(_at_least_float32(logits.dtype))
    log_sum = torch.logsumexp(scores, dim=-1, keepdim=True)
    wanted = labels.unsqueeze(1)
    # gather refuses a label outside the vocabulary; an index of -1 would mean its last token.
    loss = (log_sum - scores.gather(1, wanted)).sum()
    grad = scores.sub_(log_sum).exp_()
    grad.scatter_add_(1, wanted, grad.new_full(wanted.shape, -1.0))
    return loss, grad.to(logits.dtype)


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class ObjectiveLoss(nn.Module):
    """Any module with any loss function: ``loss_fn(model(*inputs), target)`` as (sum, count).

    A loss function that returns one number is taken as the mean over its micro-batch, and weighted
    by ``weight``; one that returns a pair is taken as (sum, count).
    """

    def __init__(self, model: nn.Module, loss_fn: Any) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn

    def forward(
        self, inputs: tuple[Any, ...], named: dict[str, Any], target: Any, weight: int
    ) -> tuple[Tensor, Tensor]:
        """``inputs`` and ``named`` go to the model, ``target`` and its output to the loss."""
        found = self.loss_fn(self.model(*inputs, **named), target)
        if isinstance(found, tuple):
            return found[0], torch.as_tensor(found[1])
        return found * weight, torch.tensor(weight)
