"""Log-probabilities of labels under a linear head; their gradients are formed in the forward pass.

A row has a state h, logits ``s = c (h W^T + b)`` and a label y. With ``p = softmax(s)``:

    l = s[y] - logsumexp(s)     dl/dh = c (onehot(y) - p) W     dl/dW = c (onehot(y) - p)^T h

How a loss reads each l is known after the forward pass alone. The gradient by h is a row of
each label, so it is formed immediately, and later scaled by the derivative of the loss. The
gradient by W is a sum over rows, each with its own derivative. For it, the rows of
``onehot(y) - p`` stay in memory if they are few. Otherwise the logits are computed again.

Without a bias ``h dl/dh`` is ``s[y] - sum(p s)``, so the entropy is ``h dl/dh - l``: it needs no
further pass over the vocabulary. The mean of the logits is ``c h mean(W)``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hasten.parts.kernels.operators import refuse_second_derivative
from hasten.parts.nn.fused_functions import in_autocast
from hasten.parts.nn.losses import (
    CHUNK_BYTES,
    LossTerms,
    add_product,
    at_least_float32,
    chunk_bytes_on,
    losses_and_gradients,
    scores_of,
    times,
)

KEPT_CHUNKS = 4  # chunks of a processor that stay in memory until the backward pass


class LabelScores(NamedTuple):
    """Numbers of each label, (rows,), in float32 or wider; all but the first without gradients."""

    log_probs: Tensor
    entropy: Tensor  # the distribution's, over the vocabulary
    mean_logits: Tensor
    is_first: Tensor  # bool: no token has a larger logit, and no earlier one the same


def label_scores(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    chunk: int,
    bias: Tensor | None = None,
    scale: float = 1.0,
    statistics: bool = True,
) -> LabelScores:
    """Returns the scores of ``labels`` (rows,) with logits ``scale * (hidden @ weight.T + bias)``.

    First derivatives only. The backward pass refuses a gradient of the entropy or the mean.

    Args:
        hidden: (rows, hidden).
        weight: (vocabulary, hidden); ``bias`` (vocabulary,).
        chunk: rows of logits that are computed at one time.
        statistics: False: fields other than ``log_probs`` are 0.
    """
    tensors = in_autocast(hidden, weight, bias)
    task = _Task(chunk, LossTerms(scale=scale), torch.is_grad_enabled(), statistics)
    return LabelScores(*_LabelScores.apply(*tensors, labels, task))


class _Task(NamedTuple):
    chunk: int
    terms: LossTerms
    is_training: bool
    has_statistics: bool


class _LabelScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, task: _Task
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        wide = at_least_float32(hidden.dtype)
        log_probs, entropy = (hidden.new_zeros(len(labels), dtype=wide) for _ in range(2))
        is_first = torch.zeros_like(labels, dtype=torch.bool)
        wants = [task.is_training and wanted for wanted in ctx.needs_input_grad[:3]]
        slopes = torch.empty_like(hidden) if wants[0] else None  # gradients of -l by the states
        # Slopes of half precision would round the entropy too much.
        by_slopes = slopes is not None and bias is None and wide == hidden.dtype
        room = max(KEPT_CHUNKS * CHUNK_BYTES, chunk_bytes_on(hidden.device))
        keeps = any(wants[1:]) and len(labels) * len(weight) * hidden.element_size() <= room
        kept: list[Tensor] = []
        for part in _parts(labels, task.chunk):
            rows = hidden[part]
            logits = logits_of(rows, weight, bias)
            if task.has_statistics:
                is_first[part] = _are_first(logits, labels[part])
                if not by_slopes:
                    entropy[part] = _entropy(logits, task.terms)
            losses, logit_slopes = losses_and_gradients(logits, labels[part], task.terms)
            log_probs[part] = -losses
            if slopes is not None:
                slopes[part] = times(logit_slopes, weight)
            kept += [logit_slopes] if keeps else []
        means = torch.zeros_like(log_probs)
        if task.has_statistics:
            means = hidden.to(wide) @ weight.mean(0, dtype=wide)
            means = task.terms.scale * (means if bias is None else means + bias.mean(dtype=wide))
        if task.has_statistics and by_slopes:
            assert slopes is not None
            entropy = -log_probs - torch.linalg.vecdot(hidden, slopes)
        ctx.save_for_backward(hidden, weight, bias, labels, slopes, *kept)
        ctx.task = task
        ctx.mark_non_differentiable(is_first)
        return log_probs, entropy, means, is_first

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        if any(grad is not None for grad in grads[1:]):
            raise ValueError(
                "the loss reads the entropy or the mean logit with a gradient, and here only "
                "log-probabilities have one; leave labelled_token_loss out"
            )
        hidden, weight, bias, labels, slopes, *kept = ctx.saved_tensors
        if grads[0] is None:
            return (None,) * 5
        wants_weight, wants_bias = ctx.needs_input_grad[1:3]
        wide = at_least_float32(weight.dtype)
        factors = -grads[0].to(wide).unsqueeze(1)
        grad_weight = torch.zeros_like(weight, dtype=wide) if wants_weight else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if wants_bias else None
        parts = _parts(labels, ctx.task.chunk) if wants_weight or wants_bias else ()
        for number, part in enumerate(parts):
            if kept:
                logit_slopes = kept[number]
            else:
                logits = logits_of(hidden[part], weight, bias)
                _, logit_slopes = losses_and_gradients(logits, labels[part], ctx.task.terms)
            if grad_weight is not None:  # scaled states cost less than scaled logits
                rows = (hidden[part] * factors[part]).to(hidden.dtype)
                add_product(grad_weight, logit_slopes, rows)
            if grad_bias is not None:
                grad_bias += (logit_slopes.T.to(wide) @ factors[part]).squeeze(1)
        return (
            None if slopes is None else (slopes * factors).to(hidden.dtype),
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(weight.dtype),
            None,
            None,
        )


def _parts(labels: Tensor, chunk: int) -> list[slice]:
    return [slice(at, at + chunk) for at in range(0, len(labels), chunk)]


def logits_of(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns the logits of states (rows, hidden) under a linear head."""
    logits = times(rows, weight.t())
    if bias is not None:
        logits += bias
    return logits


def _are_first(logits: Tensor, labels: Tensor) -> Tensor:
    places = labels.unsqueeze(1)
    are_first = logits.gather(1, places).squeeze(1) >= logits.amax(1)
    rows = are_first.nonzero().squeeze(1)  # argmax returns the earliest of equal logits
    are_first[rows] = logits.index_select(0, rows).argmax(1) == labels.index_select(0, rows)
    return are_first


def _entropy(logits: Tensor, terms: LossTerms) -> Tensor:
    scores, _ = scores_of(logits.to(at_least_float32(logits.dtype)), terms)
    log_probs = scores.log_softmax(1)
    return -torch.linalg.vecdot(log_probs.exp(), log_probs)
