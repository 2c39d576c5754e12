"""Language-model losses as modules that map a micro-batch to (summed loss, number of labels).

``WholeLogitsLoss`` is the common way: logits for every slot, then cross-entropy. ``LabelOnlyLoss``
computes logits for labelled positions alone, a chunk at a time, and forms the gradients in the
forward pass, so that no more than one chunk of logits ever exists: with a vocabulary of 100,000 and
four-byte floats, one slot's logits take 0.4 MB. Both know the same :class:`LossTerms`; in ``eval``
mode both are plain cross-entropy, so that a held-out loss means the same whatever was trained on.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hasten.parts.nn.causal_lm import causal_lm, trunk
from hasten.parts.nn.cross_entropy import (
    IGNORED,
    PLAIN,
    LossTerms,
    chunk_rows,
    label_only_cross_entropy,
    skips,
    whole_cross_entropy,
)


class WholeLogitsLoss(nn.Module):
    """Cross-entropy over the logits of every slot, in float32 or wider, summed over labels.

    A model that caps its logits does so itself: leave ``terms.softcap`` None.
    """

    def __init__(self, model: nn.Module, terms: LossTerms = PLAIN) -> None:
        super().__init__()
        self.model = model
        self.terms = terms

    def forward(self, labels: Tensor, **inputs: Any) -> tuple[Tensor, Tensor]:
        """``labels`` (B, T), aligned with the position that predicts them, -100: no loss."""
        logits = self.model(use_cache=False, **inputs).logits  # (B, T, vocabulary)
        terms = self.terms if self.training else self.terms.measured()
        loss = whole_cross_entropy(logits.flatten(0, -2), labels.flatten(), terms)
        return loss, (labels != IGNORED).sum()


class LabelOnlyLoss(nn.Module):
    """The trunk's hidden states at labelled positions, through a head that sees no others.

    A linear head is replaced by a :class:`LabelOnlyHead`. Any other (with an adapter around it, or
    quantised) stays where it is and is called once per chunk, and once more per chunk in the
    backward pass.
    """

    def __init__(
        self, model: nn.Module, chunk: int | str = "auto", terms: LossTerms = PLAIN
    ) -> None:
        super().__init__()
        self.model = model
        inner = causal_lm(model)
        self.terms = replace(terms, softcap=soft_cap(inner.config))
        self.chunk = chunk_rows(chunk, inner.config.vocab_size)
        self.largest_logits = 0  # rows of logits that existed at once, for whoever asks
        self.largest_slots = 0  # of a micro-batch: rows that the common way would have had
        if type(inner.lm_head) is nn.Linear:
            inner.lm_head = LabelOnlyHead(inner.lm_head)

    def forward(self, labels: Tensor, **inputs: Any) -> tuple[Tensor, Tensor]:
        """``labels`` (B, T), aligned with the position that predicts them, -100: no loss."""
        hidden = trunk(self.model)(use_cache=False, **inputs).last_hidden_state  # (B, T, hidden)
        head = causal_lm(self.model).lm_head
        terms = self.terms if self.training else self.terms.measured()
        kept = labels.flatten() != IGNORED
        rows, wanted = hidden.flatten(0, -2), labels.flatten()
        if skips(rows):
            positions = kept.nonzero().squeeze(1)
            rows, wanted = rows.index_select(0, positions), wanted.index_select(0, positions)
        self.largest_logits = max(self.largest_logits, min(len(wanted), self.chunk))
        self.largest_slots = max(self.largest_slots, labels.numel())
        if isinstance(head, TakesLabels):
            loss: Tensor = head(rows, wanted, self.chunk, terms)
        else:
            loss = head_cross_entropy(head, rows, wanted, self.chunk, terms)
        return loss, kept.sum()


@runtime_checkable
class TakesLabels(Protocol):
    """A head that is called with (hidden, labels, chunk, terms) and returns the summed loss."""

    takes_labels: bool

    def __call__(self, *inputs: Any) -> Any: ...


class LabelOnlyHead(nn.Module):
    """A linear head that owns its weight and, given labels, returns the summed loss.

    Without labels it is the linear layer it replaced, so that generation and saving go on as
    before; weight and bias are the same parameters under the same names, tied or not.
    """

    takes_labels = True

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        if type(head) is not nn.Linear:  # an adapter would be bypassed
            raise ValueError(
                f"only a plain linear head can be replaced, and this one is {head}; call "
                "head_cross_entropy with it instead"
            )
        self.weight = head.weight  # (vocabulary, hidden)
        self.bias = head.bias
        self.in_features, self.out_features = head.in_features, head.out_features

    def forward(
        self,
        hidden: Tensor,
        labels: Tensor | None = None,
        chunk: int | str = "auto",
        terms: LossTerms = PLAIN,
    ) -> Tensor:
        """Logits of ``hidden`` (..., hidden), or with ``labels`` (rows,) the loss of its rows."""
        if labels is None:
            return F.linear(hidden, self.weight, self.bias)
        return label_only_cross_entropy(hidden, self.weight, labels, chunk, self.bias, terms)


def head_cross_entropy(
    head: nn.Module, hidden: Tensor, labels: Tensor, chunk: int, terms: LossTerms = PLAIN
) -> Tensor:
    """The summed loss of any ``head``, a chunk at a time; backward computes each chunk again."""

    def piece(rows: Tensor, wanted: Tensor) -> Tensor:
        return whole_cross_entropy(head(rows), wanted, terms)

    # No rows at all are one empty chunk: its gradients are zeros, which replicas wait for.
    chunks = zip(hidden.split(chunk), labels.split(chunk), strict=True)
    losses = [checkpoint(piece, rows, wanted, use_reentrant=False) for rows, wanted in chunks]
    return torch.stack(losses).sum()


def soft_cap(config: Any) -> float | None:
    """The cap of a model's logits, from its Hugging Face config; None: it doesn't cap them."""
    cap: float | None = getattr(config, "final_logit_softcapping", None)
    return cap


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
