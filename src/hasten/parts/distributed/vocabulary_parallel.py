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
from hasten.parts.nn.fused_functions import in_autocast
from hasten.parts.nn.losses import (
    PLAIN,
    HeadTask,
    LossTerms,
    at_least_float32,
    chunk_rows,
    label_only_cross_entropy,
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
        self._mesh, self._shard_rows = mesh, -(-len(weight) // mesh.size())

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
        group = self._mesh.get_group()
        first = min(self._shard_rows * self._mesh.get_local_rank(), self.out_features)
        row_losses = partial(
            _losses_and_gradients, first=first, group=group, vocabulary=self.out_features
        )
        sum_hidden = partial(dist.all_reduce, group=group)
        weight, bias = _local(self.weight), _local(self.bias)
        if not isinstance(labels, Tensor):
            return labels(*in_autocast(hidden, weight, bias), row_losses, sum_hidden)
        # Uses the largest shard, because ranks with fewer rows need the same number of chunks.
        options = chunk_rows(chunk, self._shard_rows), bias, terms, False, row_losses, sum_hidden
        return label_only_cross_entropy(hidden, weight, labels, *options)

    def most_probable(self, hidden: Tensor) -> Tensor:
        """Returns the token with the largest logit of each row, the same on every rank.

        Of equal logits the first token counts, as in one process.
        """
        weight, group = _local(self.weight), self._mesh.get_group()
        logits = F.linear(hidden, weight, _local(self.bias))
        if not logits.shape[-1]:  # fewer tokens than ranks
            logits = logits.new_full((len(hidden), 1), -torch.inf)
        largest, token = logits.max(dim=-1)
        token += self._shard_rows * self._mesh.get_local_rank()
        values = largest.new_empty(self._mesh.size(), len(largest))
        tokens = token.new_empty(values.shape)
        dist.all_gather(list(values), largest, group=group)
        dist.all_gather(list(tokens), token, group=group)
        return tokens.gather(0, values.argmax(0, keepdim=True))[0]


def _losses_and_gradients(
    logits: Tensor, labels: Tensor, terms: LossTerms, first: int, group: Any, vocabulary: int
) -> tuple[Tensor, Tensor]:
    """Returns each row's loss over all ranks, and d loss / d of this rank's logits.

    The formulas are those at the head of :mod:`hasten.parts.nn.losses`.

    Args:
        first: of this rank's tokens.
        vocabulary: number of tokens on all ranks.
    """
    scores, slope = scores_of(logits.to(at_least_float32(logits.dtype)), terms)
    label_mask, wanted = (labels != IGNORED).unsqueeze(1), labels.unsqueeze(1) - first
    local_mask = label_mask & (wanted >= 0) & (wanted < scores.shape[1])
    wanted = wanted.masked_fill(~local_mask, 0)
    largest = scores.amax(dim=1, keepdim=True)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    exponentials = (scores - largest).exp()
    local_scores = scores.gather(1, wanted).masked_fill(~local_mask, 0.0)
    # One message: sum of exponentials, the label's score, the sum of scores.
    sums = torch.stack([exponentials.sum(1, True), local_scores, scores.sum(1, True)])
    dist.all_reduce(sums, group=group)
    total, of_label, all_scores = sums
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
    grad = (grad * slope).masked_fill(~label_mask, 0.0).to(logits.dtype)
    return losses.masked_fill(~label_mask, 0.0).squeeze(1), grad


def _local(parameter: Any) -> Any:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
