"""Cross-entropy with a sharded vocabulary: each rank scores its tokens.

No logits are sent.

A rank multiplies the hidden states with its rows of the head. For a chunk's logits
(rows, V / n) it needs three numbers per row from the others. These are the largest
logit, the sum of exponentials and the label's score. Then it turns its logits into
gradients and drops them, as :mod:`hasten.parts.nn.losses` does on one rank. Only the
gradient of the hidden states is summed over ranks, once (Shoeybi et al.,
arXiv:1909.08053, section 3).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hasten.parts.data.collate import IGNORED
from hasten.parts.nn.losses import (
    PLAIN,
    HeadTask,
    LossTerms,
    at_least_float32,
    chunk_rows,
    scores_of,
)


class VocabularyParallelHead(nn.Module):
    """A linear head with a ``DTensor`` weight split by rows; labels in, summed loss out.

    Args:
        weight: (vocabulary, hidden), ``Shard(0)`` over ``mesh``; may be the embedding's.
        bias: (vocabulary,), cut alike.
    """

    takes_labels = True

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, mesh: DeviceMesh) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self.out_features, self.in_features = weight.shape
        self._mesh = mesh

    def forward(
        self,
        hidden: Tensor,
        labels: Tensor | HeadTask | None = None,
        chunk: int | str = "auto",
        terms: LossTerms = PLAIN,
    ) -> Any:
        """Returns the summed loss of ``hidden`` (rows, hidden), the same on every rank of the mesh.

        A task instead of labels gets states and this rank's part of weight and bias, with the
        functions that join the ranks. Its result is returned.

        Raises:
            ValueError: no labels.
        """
        if labels is None:
            raise ValueError("the head's weight is dealt out over ranks; give labels")
        weight, bias = _local(self.weight), _local(self.bias)
        assert weight is not None
        # Uses the largest shard, because ranks with fewer rows need the same number of chunks.
        shard_rows = -(-self.out_features // self._mesh.size())
        rows = chunk_rows(chunk, shard_rows)
        first = min(shard_rows * self._mesh.get_local_rank(), self.out_features)
        if torch.is_autocast_enabled(hidden.device.type):
            dtype = torch.get_autocast_dtype(hidden.device.type)
            hidden, weight = hidden.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        group = self._mesh.get_group()
        if not isinstance(labels, Tensor):

            def row_losses(
                logits: Tensor, wanted: Tensor, terms: LossTerms
            ) -> tuple[Tensor, Tensor]:
                wide = logits.to(at_least_float32(logits.dtype))
                losses, grad = _losses_and_gradients(
                    wide, wanted, first, group, terms, self.out_features
                )
                return losses, grad.to(logits.dtype)

            return labels(hidden, weight, bias, row_losses, partial(dist.all_reduce, group=group))
        options = first, group, rows, terms, self.out_features
        loss: Tensor = _VocabularyLoss.apply(hidden, weight, bias, labels, options)
        return loss

    def most_probable(self, hidden: Tensor) -> Tensor:
        """Returns the token with the largest logit of each row, the same on every rank.

        Of equal logits the first token counts, as in one process.
        """
        weight, group = _local(self.weight), self._mesh.get_group()
        assert weight is not None
        size, shard_rows = self._mesh.size(), -(-self.out_features // self._mesh.size())
        logits = F.linear(hidden, weight, _local(self.bias))
        if not logits.shape[-1]:  # fewer tokens than ranks
            logits = logits.new_full((len(hidden), 1), -torch.inf)
        largest, token = logits.max(dim=-1)
        token += shard_rows * self._mesh.get_local_rank()
        values = [torch.empty_like(largest) for _ in range(size)]
        tokens = [torch.empty_like(token) for _ in range(size)]
        dist.all_gather(values, largest, group=group)
        dist.all_gather(tokens, token, group=group)
        best = torch.stack(values).argmax(0, keepdim=True)
        return torch.stack(tokens).gather(0, best)[0]


class _VocabularyLoss(torch.autograd.Function):
    """Forms the gradients in the forward pass; the backward pass scales them.

    ``options``: first row of this rank's part of the head, group, rows of a chunk, terms of the
    loss, size of the vocabulary.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, options: Any
    ) -> Tensor:
        first, group, chunk, terms, vocabulary = options
        wide = at_least_float32(weight.dtype)
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.zeros_like(hidden, dtype=wide) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if wants_weight else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if wants_bias and bias is not None else None
        loss = hidden.new_zeros((), dtype=wide)
        for start in range(0, len(hidden), chunk):
            rows, wanted = hidden[start : start + chunk], labels[start : start + chunk]
            logits = F.linear(rows, weight, bias).to(wide)
            losses, grad = _losses_and_gradients(logits, wanted, first, group, terms, vocabulary)
            loss += losses.sum()
            narrow = grad.to(weight.dtype)
            if grad_hidden is not None:
                grad_hidden[start : start + chunk] = narrow @ weight
            if grad_weight is not None:
                grad_weight += narrow.T @ rows
            if grad_bias is not None:
                grad_bias += grad.sum(0)
        if grad_hidden is not None:
            dist.all_reduce(grad_hidden, group=group)
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        ctx.formats = hidden.dtype, weight.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, *parameters = ctx.saved_tensors
        of_hidden, of_weight = ctx.formats
        grad_hidden = None if hidden is None else (hidden * grads[0]).to(of_hidden)
        parameter_grads = (None if g is None else (g * grads[0]).to(of_weight) for g in parameters)
        return grad_hidden, *parameter_grads, None, None


def _losses_and_gradients(
    logits: Tensor, labels: Tensor, first: int, group: Any, terms: LossTerms, vocabulary: int
) -> tuple[Tensor, Tensor]:
    """Returns each row's loss over all ranks, and d loss / d of this rank's logits.

    The formulas are those at the head of :mod:`hasten.parts.nn.losses`.
    """
    scores, slope = scores_of(logits, terms)
    label_mask = (labels != IGNORED).unsqueeze(1)
    local_mask = (
        label_mask
        & (labels >= first).unsqueeze(1)
        & (labels < first + scores.shape[1]).unsqueeze(1)
    )
    wanted = (labels.unsqueeze(1) - first).masked_fill(~local_mask, 0)
    largest = scores.amax(dim=1, keepdim=True)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    exponentials = (scores - largest).exp()
    local_scores = scores.gather(1, wanted).masked_fill(~local_mask, 0.0)
    # One message: sum of exponentials, the label's score, the sum of scores.
    sums = torch.stack([exponentials.sum(1), local_scores.squeeze(1), scores.sum(1)])
    dist.all_reduce(sums, group=group)
    total, of_label, all_scores = (s.unsqueeze(1) for s in sums)
    log_sum = total.log() + largest
    smoothing = terms.label_smoothing
    losses = log_sum - (1 - smoothing) * of_label
    grad = exponentials / total
    if smoothing:
        losses = losses - smoothing * all_scores / vocabulary
    if terms.z_loss:
        losses = losses + terms.z_loss * log_sum.square()
        grad = grad * (1 + 2 * terms.z_loss * log_sum)
    if smoothing:
        grad = grad - smoothing / vocabulary
    grad = grad.scatter_add(1, wanted, local_mask.to(grad.dtype) * (smoothing - 1))
    grad = grad * slope
    return losses.masked_fill(~label_mask, 0.0).squeeze(1), grad.masked_fill(~label_mask, 0.0)


def _local(parameter: nn.Parameter | None) -> Tensor | None:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
