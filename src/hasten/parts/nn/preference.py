"""Modules that map a micro-batch of preference pairs to (summed loss, pairs).

- ``PreferenceLoss`` computes the logits of all positions, then log-softmax, as usual.
- ``RewardLoss`` reads a score at the last token of each row instead.
- ``OnePassPreferenceLoss`` computes logits for labels alone, some pairs at a time. A pair's
  loss depends on no other pair. So once its logits exist, the loss's derivative by its two
  sums is known, and gradients of states and head are formed immediately: three products with
  the head, where recomputing logits in the backward pass takes four.

Sums are float64: at 200 tokens of -8 a float32 sum is wrong by 1e-4, and bf16 loses the signal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hasten.parts.data.collate import IGNORED
from hasten.parts.kernels.operators import refuse_second_derivative
from hasten.parts.nn.attention import by_documents
from hasten.parts.nn.causal_lm import causal_lm, trunk
from hasten.parts.nn.fused_functions import in_autocast
from hasten.parts.nn.head_form import asks_router_loss, head_form
from hasten.parts.nn.label_scores import logits_of
from hasten.parts.nn.losses import (
    PLAIN,
    LossTerms,
    RowLosses,
    add_product,
    at_least_float32,
    losses_and_gradients,
    most_probable,
    scores_of,
    take_label_only_head,
    times,
)
from hasten.parts.nn.preference_objectives import Objective


@dataclass
class Answers:
    """Inputs of a micro-batch's loss; see :func:`hasten.parts.data.pairs.answers`."""

    objective: Objective
    labels: Tensor
    reads: Tensor
    owners: Tensor
    counts: Tensor
    weights: Tensor
    scales: Tensor | None
    reference: Tensor | None
    nll_unit: Tensor | float | None
    label_counts: tuple[int, ...]
    kl: Tensor | float = 0.0

    def losses(self, sums: Tensor, first: int = 0) -> Tensor:
        """Returns the weighted losses of the pairs with these sums, from pair ``first`` on."""
        pairs = slice(first, first + len(sums))
        reference = None if self.reference is None else self.reference[pairs]
        losses = self.objective(sums, reference, self.counts[pairs], self.unit, self.kl)
        return losses * self.weights[pairs]

    @property
    def unit(self) -> Tensor | float | None:
        """Returns the factor of a cross-entropy summed over tokens, per pair."""
        if self.nll_unit is not None or not self.objective.nll_weight:
            return self.nll_unit
        tokens = (self.objective.nll_tokens(self.counts) * self.weights).sum()
        return self.weights.sum() / tokens.clamp(min=1)

    def scaled(self, values: Tensor, span: slice = slice(None)) -> Tensor:
        """Returns a number of each label in ``span``, times the label's factor, in float64."""
        return values.double() if self.scales is None else values.double() * self.scales[span]

    def sums(self, log_probs: Tensor) -> Tensor:
        """Returns the sequences' log-probabilities (P, S) in float64, from the labels' (L,)."""
        wide = self.scaled(log_probs)
        return (
            wide.new_zeros(self.counts.numel())
            .index_add(0, self.owners, wide)
            .view(self.counts.shape)
        )

    def groups(self, chunk: int) -> Iterator[tuple[int, int, int, int]]:
        """Returns runs of pairs with at most ``chunk`` labels, or one pair with more.

        Each is (first pair, last pair + 1, first label, last label + 1).
        """
        size = self.counts.shape[1]
        by_pair = [
            sum(self.label_counts[i : i + size]) for i in range(0, len(self.label_counts), size)
        ]
        pair = label = rows = 0
        for index, count in enumerate(by_pair):
            if rows and rows + count > chunk:
                yield pair, index, label, label + rows
                pair, label, rows = index, label + rows, 0
            rows += count
        yield pair, len(by_pair), label, label + rows


def label_log_probs(logits: Tensor, labels: Tensor, terms: LossTerms = PLAIN) -> Tensor:
    """Returns each label's log-probability (rows,), in float32 or wider."""
    scores, _ = scores_of(logits.to(at_least_float32(logits.dtype)), terms)
    return scores.log_softmax(-1).gather(1, labels.unsqueeze(1)).squeeze(1)


def check_layout(model: nn.Module, inputs: Mapping[str, Any]) -> None:
    """Checks that the model's attention can share prompts if the inputs do.

    Raises:
        ValueError: it can't. Other attentions would ignore the argument.
    """
    if any(inputs.get("prefixes") or ()) and not by_documents(causal_lm(model).config):
        raise ValueError(
            "answers share a prompt in this row, and the model's attention would not show it to "
            "both; use document attention, or packed with shared_prompt: false"
        )


class PairLoss(nn.Module):
    """A model with a loss of preference pairs.

    ``statistics`` are sums over passes:

    - pairs, pairs with the larger reward for the chosen answer, and margins of the rewards
    - log-probability and labels of chosen answers, then of rejected ones. A reward model has
      rewards and their number instead
    - log-probability less the reference's, over both answers
    """

    def __init__(self, model: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.model, self.objective = model, objective
        self.statistics = torch.zeros(8, dtype=torch.float64)
        for module in model.modules():  # two passes of one policy must agree
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            if isinstance(getattr(module, "attention_dropout", None), float):
                module.attention_dropout = 0.0

    def take_statistics(self) -> Tensor:
        """Returns the sums since the last call, and sets them to 0."""
        taken, self.statistics = self.statistics, torch.zeros_like(self.statistics)
        return taken

    @torch.no_grad()
    def count(self, weights: Tensor, rewards: Tensor, *columns: Tensor) -> None:
        """Adds pairs with these rewards (P, 2), and further columns (P,), to the statistics."""
        chosen, rejected = rewards.unbind(1)
        better = (chosen > rejected).to(chosen.dtype)
        table = torch.stack([torch.ones_like(chosen), better, chosen - rejected, *columns], 1)
        self.statistics = self.statistics.to(table.device) + weights @ table


class PreferenceLoss(PairLoss):
    """A causal language model with the loss of preference pairs: logits of all positions.

    ``all_reduce`` sums numbers over ranks with other pairs, for KTO. Every rank calls it in each
    pass.

    Raises:
        ValueError: the model adds a loss of its routers.
    """

    def __init__(self, model: nn.Module, objective: Objective) -> None:
        super().__init__(model, objective)
        self.all_reduce: Callable[[Tensor], Tensor] = Tensor.clone
        if asks_router_loss(model):
            raise ValueError(
                "the model's config adds a loss of its routers (output_router_logits), which "
                "preference losses don't have; set it to false"
            )

    def forward(
        self,
        labels: Tensor,
        reads: Tensor | None = None,
        owners: Tensor | None = None,
        counts: Tensor | None = None,
        weights: Tensor | None = None,
        scales: Tensor | None = None,
        reference: Tensor | None = None,
        log_probs: bool = False,
        nll_unit: Tensor | float | None = None,
        label_counts: tuple[int, ...] | None = None,
        other: Mapping[str, Any] | None = None,
        kl: Tensor | None = None,
        predict: bool = False,
        **inputs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Returns the loss summed over pairs, float64, and the number of pairs.

        Args:
            labels: (L,), with ``reads``, ``owners``, ``counts``, ``weights``, ``scales`` and
                ``label_counts`` as :func:`hasten.parts.data.pairs.answers` returns them.
            reference: the reference's sums, float64, as ``log_probs`` returns them; None: 0.
            log_probs: return the sums (P, S) and ``counts`` instead, without gradients. With
                ``other`` the last column is that of the other answers.
            nll_unit: see :meth:`Objective.__call__`.
            other: a batch of the pairs' other answers, for KTO.
            kl: their :meth:`divergence`; None: computed here.
            predict: return the most probable token at each label (B, T), and the labels, as
                :class:`~hasten.parts.nn.losses.LanguageModelLoss` does.
            inputs: inputs of the model.
        """
        if predict:
            return most_probable(self.model, labels, inputs), labels[labels != IGNORED]
        assert reads is not None
        assert owners is not None
        assert counts is not None
        assert weights is not None
        if label_counts is None:  # waits for a GPU
            label_counts = tuple(counts.flatten().tolist())
        if reference is not None:  # a pair without weight may have none
            reference = reference.masked_fill(weights.unsqueeze(1) == 0, 0.0)
        others = None if other is None else self.forward(**other, log_probs=True)[0][:, 0]
        if self.objective.needs_kl and not log_probs and kl is None:
            kl = self.divergence(others, reference, weights)
        reference = None if reference is None else reference[:, :2]
        answers = Answers(
            self.objective, labels, reads, owners, counts, weights, scales, reference, nll_unit,
            label_counts, 0.0 if kl is None else kl,
        )  # fmt: skip
        if log_probs:
            with torch.no_grad():
                sums = self.loss_and_sums(answers, inputs)[1]
            return sums if others is None else torch.cat([sums, others[:, None]], 1), counts
        loss, sums = self.loss_and_sums(answers, inputs)
        wide = sums.detach()
        ratios = wide[:, :2] if reference is None else wide[:, :2] - reference
        by_side = [t[:, side] for side in (0, 1) for t in (wide, counts)]
        rewards = self.objective.rewards(wide, reference, counts)
        self.count(weights, rewards, *by_side, ratios.sum(1))
        return loss, weights.sum()

    def divergence(self, sums: Tensor | None, reference: Tensor | None, weights: Tensor) -> Tensor:
        """Returns the mean log-ratio of the other answers over all ranks' pairs, at least 0.

        Args:
            sums: log-probabilities of the other answers (P,).
            reference: those of the reference (P, 3); their last column counts. None: 0.
        """
        if sums is None:
            raise ValueError("kto needs another answer to each prompt (PreferencePair.other)")
        ratios = sums if reference is None else sums - reference[:, 2]
        ratios = ratios.masked_fill(weights == 0, 0.0)
        total, count = self.all_reduce(torch.stack([weights @ ratios, weights.sum()]))
        return (total / count.clamp(min=1)).clamp(min=0)

    def loss_and_sums(self, answers: Answers, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Returns the summed loss, and the log-probabilities (P, S)."""
        check_layout(self.model, inputs)
        logits = self.model(**{"use_cache": False} | inputs).logits.flatten(0, -2)
        rows = logits.index_select(0, answers.reads)
        sums = answers.sums(label_log_probs(rows, answers.labels))
        return answers.losses(sums).sum(), sums


class RewardLoss(PairLoss):
    """A reward model with the loss of preference pairs: a score of each row's last token.

    Args:
        model: transformers' model for sequence classification with one label.
    """

    def forward(
        self,
        reads: Tensor,
        counts: Tensor,
        weights: Tensor,
        labels: Tensor | None = None,
        owners: Tensor | None = None,
        label_counts: tuple[int, ...] | None = None,
        nll_unit: float | None = None,
        log_probs: bool = False,
        **inputs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Returns the loss summed over pairs, float64, and the number of pairs.

        ``log_probs``: return rewards (P, 2) and ``counts`` instead. ``labels`` and the rest are
        of :func:`hasten.parts.data.pairs.answers` and not read.
        """
        check_layout(self.model, inputs)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not log_probs):
            hidden = trunk(self.model)(**{"use_cache": False} | inputs).last_hidden_state
            ends = hidden.flatten(0, -2).index_select(0, reads)
            rewards = causal_lm(self.model).score(ends).double().view(-1, 2)
        if log_probs:
            return rewards, counts
        losses = self.objective(rewards, None, counts)
        chosen, rejected = rewards.detach().unbind(1)
        ones, zeros = torch.ones_like(chosen), torch.zeros_like(chosen)
        loss = (losses * weights).sum()  # first: a pass that is repeated stops here
        self.count(weights, rewards.detach(), chosen, ones, rejected, ones, zeros)
        return loss, weights.sum()


class OnePassPreferenceLoss(PreferenceLoss):
    """Log-probabilities of labels alone; gradients are formed in the forward pass.

    A linear head is replaced by a :class:`LabelOnlyHead`. Any other head (with an adapter, or
    quantised) stays. The loss calls it for each chunk, and again in the backward pass.

    Raises:
        ValueError: the model's own forward does more than trunk, head and what
            :class:`~hasten.parts.nn.head_form.HeadForm` describes.
    """

    def __init__(self, model: nn.Module, objective: Objective, chunk: int | str = "auto") -> None:
        super().__init__(model, objective)
        form = head_form(model)
        self.state_scale = form.state_scale
        self.terms = replace(PLAIN, softcap=form.softcap, scale=form.scale)
        self.chunk = take_label_only_head(model, chunk)
        self.largest_logits = 0  # most rows of logits in memory so far, for effect checks
        self.largest_positions = 0  # most positions of a micro-batch so far, for comparison

    def loss_and_sums(self, answers: Answers, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        check_layout(self.model, inputs)
        hidden = trunk(self.model)(**{"use_cache": False} | inputs).last_hidden_state
        hidden, head = hidden.flatten(0, -2), causal_lm(self.model).lm_head
        self.largest_positions = max(self.largest_positions, len(hidden))
        if self.state_scale != 1:
            hidden = hidden * self.state_scale
        if not getattr(head, "takes_labels", False):
            return self._through(head, hidden, answers)
        task = OnePass(answers, self.terms, self.chunk)
        for *_, start, stop in answers.groups(self.chunk):
            most = max((span.stop - span.start for span in task.spans(start, stop)), default=0)
            self.largest_logits = max(self.largest_logits, most)
        loss, sums = head(hidden, task)
        return loss, sums

    def _through(self, head: nn.Module, hidden: Tensor, answers: Answers) -> tuple[Tensor, Tensor]:
        """Returns loss and sums by any head, which runs again in the backward pass."""

        def chunk_log_probs(reads: Tensor, labels: Tensor) -> Tensor:
            return label_log_probs(head(hidden.index_select(0, reads)), labels, self.terms)

        self.largest_logits = max(self.largest_logits, min(len(answers.labels), self.chunk))
        # split returns one empty chunk if there is no label, so replicas get zero gradients
        chunks = zip(answers.reads.split(self.chunk), answers.labels.split(self.chunk), strict=True)
        log_probs = [checkpoint(chunk_log_probs, *chunk, use_reentrant=False) for chunk in chunks]
        sums = answers.sums(torch.cat(log_probs))
        return answers.losses(sums).sum(), sums


# A pair with up to so many chunks of labels keeps all its logits. A longer one computes them twice.
WHOLE_CHUNKS = 4


@dataclass
class OnePass:
    """Task of a linear head: the loss and sums of ``answers``, a few pairs at a time."""

    answers: Answers
    terms: LossTerms
    chunk: int

    def __call__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        row_losses: RowLosses = losses_and_gradients,
        all_reduce: Callable[[Tensor], Any] | None = None,
    ) -> Any:
        """Returns (loss, sums) of ``hidden`` (positions, hidden) through a head's weight.

        Ranks may have a part of the vocabulary each. Then ``row_losses`` exchanges what a
        row's softmax needs. ``all_reduce`` sums the gradient of ``hidden``.
        """
        tensors = in_autocast(hidden, weight, bias)
        return _PairsHead.apply(*tensors, self, row_losses, all_reduce)

    def spans(self, start: int, stop: int) -> list[slice]:
        """Returns some pairs' labels in pieces; a piece's logits are in memory together."""
        whole = stop - start <= WHOLE_CHUNKS * self.chunk
        step = max(stop - start, 1) if whole else self.chunk
        return [slice(at, min(at + step, stop)) for at in range(start, stop, step)]

    def slopes(self, sums: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Returns the loss of pairs from ``first`` on, and its derivative by their sums."""
        with torch.enable_grad():
            leaf = sums.detach().requires_grad_()
            loss = self.answers.losses(leaf, first).sum()
            (slopes,) = torch.autograd.grad(loss, leaf)
        return loss.detach(), slopes


class _Head:
    """A linear head in a forward pass, with the gradients that are wanted of it."""

    def __init__(
        self,
        task: OnePass,
        row_losses: RowLosses,
        tensors: tuple[Tensor, Tensor, Tensor | None],
        wants: tuple[bool, bool, bool],
        is_part: bool,
    ) -> None:
        self.task, self.row_losses = task, row_losses
        self.hidden, self.weight, self.bias = tensors
        self.wide = at_least_float32(self.weight.dtype)
        self.wants = any(wants)
        # sums over many rows, and over ranks, need a wide format
        formats = self.wide if is_part else self.hidden.dtype, self.wide, self.wide
        self.gradients = [
            torch.zeros_like(tensor, dtype=dtype) if wanted and tensor is not None else None
            for tensor, wanted, dtype in zip(tensors, wants, formats, strict=True)
        ]

    def log_probs(self, span: slice) -> tuple[Tensor, Tensor]:
        """Returns the labels' log-probabilities, and minus their derivative by the logits."""
        answers = self.task.answers
        rows = self.hidden.index_select(0, answers.reads[span])
        logits = logits_of(rows, self.weight, self.bias)
        losses, slopes = self.row_losses(logits, answers.labels[span], self.task.terms)
        return -losses, slopes

    def add(self, span: slice, logit_slopes: Tensor, factors: Tensor) -> None:
        """Adds the gradients of some labels, each times its factor (labels, 1).

        Scaling states costs less than scaling ``logit_slopes`` (labels, vocabulary).
        """
        hidden, weight, bias = self.gradients
        reads = self.task.answers.reads[span]
        if hidden is not None:
            rows = times(logit_slopes, self.weight) * factors
            hidden.index_add_(0, reads, rows.to(hidden.dtype))
        if weight is not None:
            rows = self.hidden.index_select(0, reads) * factors
            add_product(weight, logit_slopes, rows.to(self.hidden.dtype))
        if bias is not None:
            bias += (logit_slopes.T.to(self.wide) @ factors).squeeze(1)


class _PairsHead(torch.autograd.Function):
    """Linear head and preference loss; backward only scales the results of forward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        task: OnePass,
        row_losses: RowLosses,
        all_reduce: Callable[[Tensor], Any] | None,
    ) -> tuple[Tensor, Tensor]:
        tensors, is_part = (hidden, weight, bias), all_reduce is not None
        head = _Head(task, row_losses, tensors, ctx.needs_input_grad[:3], is_part)
        answers, size = task.answers, task.answers.counts.shape[1]
        sums = hidden.new_zeros(answers.counts.numel(), dtype=torch.float64)
        loss = sums.new_zeros(())
        for first, last, start, stop in answers.groups(task.chunk):
            spans = task.spans(start, stop)
            logit_slopes = hidden  # frees those of the last group before these take memory
            for span in spans:
                log_probs, logit_slopes = head.log_probs(span)
                sums.index_add_(0, answers.owners[span], answers.scaled(log_probs, span))
            part, slopes = task.slopes(sums[first * size : last * size].view(-1, size), first)
            loss += part
            for span in spans if head.wants else ():
                if len(spans) > 1:
                    _, logit_slopes = head.log_probs(span)
                owners = answers.owners[span] - first * size
                factors = answers.scaled(-slopes.flatten().index_select(0, owners), span)
                head.add(span, logit_slopes, factors.to(head.wide).unsqueeze(1))
        if all_reduce is not None and head.gradients[0] is not None:
            all_reduce(head.gradients[0])
        ctx.save_for_backward(*head.gradients)
        ctx.formats = hidden.dtype, weight.dtype
        sums = sums.view(-1, size)
        ctx.mark_non_differentiable(sums)
        return loss, sums

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        grad_hidden, *parameters = ctx.saved_tensors
        if grad_hidden is not None:
            wide = at_least_float32(grad_hidden.dtype)  # 1/3 in bf16 would be wrong by 0.2 %
            grad_hidden = (grad_hidden.to(wide) * grads[0].to(wide)).to(ctx.formats[0])
        grad_weight, grad_bias = (
            None if grad is None else (grad * grads[0]).to(ctx.formats[1]) for grad in parameters
        )
        return grad_hidden, grad_weight, grad_bias, None, None, None
