"""Language-model losses: modules that map a micro-batch to (summed loss, label count).

- ``WholeLogitsLoss`` computes logits for every position, then cross-entropy, as usual.
- ``LabelOnlyLoss`` computes logits for labelled positions alone, a chunk at a time. It
  computes the gradients in the forward pass, so only one chunk of logits exists at a time.
  With a vocabulary of 100,000 and four-byte floats, one position's logits take 0.4 MB.

Both add the same :class:`LossTerms`. In ``eval`` mode both are plain cross-entropy, so
eval losses are comparable across training losses.

Without these terms both equal the loss of the model's own ``forward``.
``LabelOnlyLoss`` applies the scales and the cap from :mod:`hasten.parts.nn.head_form`.
It refuses a ``forward`` that does more. If a config sets ``output_router_logits``, both
add the routers' loss:

    sum over micro-batches of [cross-entropy summed over labels + labels x weight x balance]

divided by all labels of the step. ``balance`` is computed over the tokens of one
micro-batch, without padding. So the result is the mean of the micro-batches' balances
over all ranks, each weighted by its labels. With one micro-batch it is the loss that
transformers returns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hasten.machine.memory import device_bytes
from hasten.parts.data.collate import IGNORED
from hasten.parts.kernels import products
from hasten.parts.kernels import rowwise as row_kernels
from hasten.parts.kernels.operators import refuse_second_derivative
from hasten.parts.kernels.registry import is_refused
from hasten.parts.nn import fused_gpu
from hasten.parts.nn.causal_lm import causal_lm, trunk
from hasten.parts.nn.fused_functions import in_autocast, matmul
from hasten.parts.nn.head_form import (
    HeadForm,
    asks_router_loss,
    balance_of_choices,
    head_form,
)
from hasten.parts.nn.rebind import plain_class

# Cross-entropy of a linear head, a chunk of logits at a time, with the gradients of each chunk.
#
# The loss of one row with scores ``s`` over a vocabulary of V, its label y, and L = logsumexp(s):
#
#     L - (1 - e) s[y] - e mean(s) + z L^2        s = cap tanh(c logits / cap), or c logits
#
# c is the logit scale of Granite and Cohere, 1 elsewhere. e is label smoothing (Szegedy et al.,
# arXiv:1512.00567, as in torch). z is the z-loss that keeps L near 0 (PaLM, arXiv:2204.02311, 1e-4
# there). cap is the soft cap of Gemma 2's logits (arXiv:2408.00118). With p = softmax(s) its
# gradient is
#
#     d/ds = p (1 + 2 z L) - (1 - e) onehot(y) - e / V        ds/dlogits = c (1 - (s / cap)^2)
#
# So a chunk of logits is turned into gradients immediately, and then freed.

# Default bytes of one chunk of logits in float32. On a GPU, chunks of a few hundred rows would mean
# many small kernels, and a pass over the weight's full gradient for each chunk.
CHUNK_BYTES = 64 * 2**20
GPU_SHARE = 64  # a GPU's memory over the size of a chunk
FEWEST_ROWS, MOST_ROWS = 256, 8192  # rows of a chunk; products with fewer rows are slow


@dataclass(frozen=True)
class LossTerms:
    """Terms added to plain cross-entropy; the defaults add nothing.

    Raises:
        ValueError: a term outside its range.
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None  # cap of the logits; belongs to the model
    scale: float = 1.0  # factor of the logits before the cap; belongs to the model

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(
                f"label_smoothing is {self.label_smoothing}; give at least 0 and less than 1"
            )
        if not (self.z_loss >= 0 and math.isfinite(self.z_loss)):
            raise ValueError(f"z_loss is {self.z_loss}; give 0 or a small weight such as 1e-4")
        if self.softcap is not None and not (self.softcap > 0 and math.isfinite(self.softcap)):
            raise ValueError(f"softcap is {self.softcap}; give a number above 0, or None")
        if not (self.scale > 0 and math.isfinite(self.scale)):
            raise ValueError(f"scale is {self.scale}; give a number above 0")

    def measured(self) -> LossTerms:
        """Returns the terms of an eval loss: cross-entropy of the unchanged model."""
        return replace(self, label_smoothing=0.0, z_loss=0.0)


PLAIN = LossTerms()


def whole_cross_entropy(logits: Tensor, labels: Tensor, terms: LossTerms = PLAIN) -> Tensor:
    """Returns the summed loss of ``logits`` (rows, vocabulary), in float32 or wider."""
    scores, _ = scores_of(logits.to(at_least_float32(logits.dtype)), terms)
    loss: Tensor = torch.nn.functional.cross_entropy(
        scores,
        labels,
        ignore_index=IGNORED,
        reduction="sum",
        label_smoothing=terms.label_smoothing,
    )
    if terms.z_loss:
        squares = torch.logsumexp(scores, dim=-1).square()
        loss = loss + terms.z_loss * squares.masked_fill(labels == IGNORED, 0.0).sum()
    return loss


def scores_of(logits: Tensor, terms: LossTerms) -> tuple[Tensor, Tensor | float]:
    """Returns the scores for cross-entropy, and their derivative by the logits."""
    scores = logits if terms.scale == 1 else logits * terms.scale
    if terms.softcap is None:
        return scores, terms.scale
    shares = torch.tanh(scores / terms.softcap)
    return shares * terms.softcap, (1 - shares.square()) * terms.scale


def chunk_bytes(memory_bytes: int = 0) -> int:
    """Returns the bytes of a chunk on a GPU with ``memory_bytes``; 0: on a processor.

    The memory is rounded down to a power of two. Ranks that share a vocabulary need equal
    chunks, but drivers of equal GPUs may report slightly different memory.
    """
    return max((1 << max(memory_bytes.bit_length() - 1, 0)) // GPU_SHARE, CHUNK_BYTES)


def chunk_bytes_on(device: torch.device | str) -> int:
    """Returns the bytes of a chunk on a device of this machine."""
    return chunk_bytes(device_bytes(device))


def chunk_rows(chunk: int | str, vocabulary: int, size: int | None = None) -> int:
    """Returns the rows of a chunk; ``auto``: the float32 logits that ``size`` bytes hold.

    Raises:
        ValueError: ``chunk`` is neither a number from 1 on nor ``auto``.
    """
    if chunk == "auto":
        size = CHUNK_BYTES if size is None else size
        return min(max(size // (4 * vocabulary), FEWEST_ROWS), MOST_ROWS)
    if not isinstance(chunk, int) or isinstance(chunk, bool) or chunk < 1:
        raise ValueError(f"chunk is {chunk!r}; give auto, or at least one row of logits")
    return chunk


RowLosses = Callable[[Tensor, Tensor, LossTerms], tuple[Tensor, Tensor]]


def label_only_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    chunk: int | str = "auto",
    bias: Tensor | None = None,
    terms: LossTerms = PLAIN,
    skip: bool | None = None,
    row_losses: RowLosses | None = None,
    all_reduce: Callable[[Tensor], Any] | None = None,
) -> Tensor:
    """Returns the summed loss of ``hidden @ weight.T + bias`` and ``labels``, chunk by chunk.

    First derivatives only: the gradients are constants to autograd.

    Args:
        hidden: (rows, hidden).
        weight: (vocabulary, hidden); ``bias`` (vocabulary,).
        labels: (rows,), int64; -100: no loss.
        chunk: rows with logits in memory at one time, or ``auto``.
        skip: remove rows without a label first. On a GPU the host waits for their count.
            False: their logits are computed with weight 0. None: skip only on a processor.
        row_losses: returns each row's loss, and d loss / d logits; None: of a full vocabulary.
        all_reduce: sums the gradient of ``hidden`` over ranks that have parts of ``weight``.

    Raises:
        ValueError: ``chunk`` is below 1.
    """
    rows = chunk_rows(chunk, weight.shape[0], chunk_bytes_on(hidden.device))
    hidden, weight, bias = in_autocast(hidden, weight, bias)
    hidden, labels = labelled_rows(hidden, labels, skip)
    arguments = labels, rows, terms, row_losses or losses_and_gradients, all_reduce
    loss: Tensor = _ChunkedCrossEntropy.apply(hidden, weight, bias, *arguments)
    return loss


def labelled_rows(
    hidden: Tensor, labels: Tensor, skip: bool | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the rows of ``hidden`` (..., width) with a label, and their labels.

    Args:
        skip: see :func:`label_only_cross_entropy`; False: all rows.
    """
    rows, wanted = hidden.flatten(0, -2), labels.flatten()
    if skips_unlabelled(rows) if skip is None else skip:
        positions = (wanted != IGNORED).nonzero().squeeze(1)
        if len(positions) < len(wanted):
            return rows.index_select(0, positions), wanted.index_select(0, positions)
    return rows, wanted


def skips_unlabelled(hidden: Tensor) -> bool:
    """Returns True if rows without a label are removed: on a processor, which needn't wait."""
    return str(hidden.device.type) == "cpu"


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Linear head and cross-entropy; backward only scales the results of forward.

    The loss is a sum, so its gradient is linear in the incoming scalar.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        chunk: int,
        terms: LossTerms,
        row_losses: RowLosses,
        all_reduce: Callable[[Tensor], Any] | None,
    ) -> Tensor:
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        # Chunks and ranks are summed in float32, because a sum in bf16 would lose small terms.
        wide = at_least_float32(weight.dtype)
        of_hidden = hidden.dtype if all_reduce is None else wide
        grad_hidden = torch.empty_like(hidden, dtype=of_hidden) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if wants_weight else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if wants_bias and bias is not None else None
        loss = hidden.new_zeros((), dtype=wide)
        for start in range(0, hidden.shape[0], chunk):
            rows, wanted = hidden[start : start + chunk], labels[start : start + chunk]
            logits = times(rows, weight.t())
            if bias is not None:
                logits += bias
            losses, grad_logits = row_losses(logits, wanted, terms)
            loss += losses.sum()
            if grad_hidden is not None:
                grad_hidden[start : start + chunk] = times(grad_logits, weight)
            if grad_weight is not None:
                add_product(grad_weight, grad_logits, rows)
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0, dtype=wide)
            del logits, grad_logits  # freed before the next chunk takes memory
        if all_reduce is not None and grad_hidden is not None:
            all_reduce(grad_hidden)
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        ctx.dtypes = hidden.dtype, weight.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        grad_hidden, *parameters = ctx.saved_tensors
        of_hidden, of_weight = ctx.dtypes
        if grad_hidden is not None:
            grad_hidden = (grad_hidden * grads[0].to(grad_hidden.dtype)).to(of_hidden)
        grad_weight, grad_bias = (
            None if grad is None else (grad * grads[0]).to(of_weight) for grad in parameters
        )
        return grad_hidden, grad_weight, grad_bias, None, None, None, None, None


def losses_and_gradients(logits: Tensor, labels: Tensor, terms: LossTerms) -> tuple[Tensor, Tensor]:
    """Returns each row's loss in float32 or wider, and d loss / d logits in their format.

    The gradient overwrites logits that are narrower than float32, to save memory.
    """
    kernel = kernel_of_loss(logits) if terms == PLAIN else None
    if kernel is not None and (kernel is not row_losses or not (labels == IGNORED).any()):
        return kernel(logits, labels, IGNORED), logits
    scores, slope = scores_of(logits.to(at_least_float32(logits.dtype)), terms)
    log_sum = torch.logsumexp(scores, dim=-1, keepdim=True)
    labelled = (labels != IGNORED).unsqueeze(1)
    wanted = labels.unsqueeze(1).masked_fill(~labelled, 0)
    # gather raises for a label outside the vocabulary; indexing with -1 would read the last token.
    losses = log_sum - (1 - terms.label_smoothing) * scores.gather(1, wanted)
    if terms.label_smoothing:
        losses -= terms.label_smoothing * scores.mean(dim=-1, keepdim=True)
    if terms.z_loss:
        losses += terms.z_loss * log_sum.square()
    # exp(scores - infinity) is 0: a row without a label has no gradient.
    grad = scores.sub_(log_sum.masked_fill(~labelled, math.inf)).exp_()
    counted = labelled.to(grad.dtype)
    if terms.z_loss:
        grad *= 1 + 2 * terms.z_loss * log_sum
    if terms.label_smoothing:
        grad -= counted * (terms.label_smoothing / logits.shape[1])
    grad.scatter_add_(1, wanted, counted * (terms.label_smoothing - 1))
    if isinstance(slope, Tensor) or slope != 1:
        grad *= slope
    grad = grad if grad.dtype == logits.dtype else logits.copy_(grad)
    return losses.masked_fill(~labelled, 0.0).squeeze(1), grad


def kernel_of_loss(logits: Tensor) -> Callable[[Tensor, Tensor, int], Tensor] | None:
    """Returns a kernel that replaces these logits by their gradients, or None."""
    if logits.device.type == "cpu":
        fits = row_kernels.fits(logits) and row_kernels.library().library is not None
        return row_losses if fits else None
    fits = fused_gpu.fits(logits) and logits.is_contiguous()
    runs = not is_refused(fused_gpu.CROSS_ENTROPY) and fused_gpu.has_kernels(str(logits.device))
    return fused_gpu.cross_entropy_ if fits and runs else None


def row_losses(logits: Tensor, labels: Tensor, ignored: int) -> Tensor:
    """Runs the processor's kernel, which takes only rows with a label."""
    return row_kernels.cross_entropy_(logits, labels)


def times(x: Tensor, matrix: Tensor) -> Tensor:
    """Returns the product of two matrices, by hasten's kernel where it supports them."""
    return matmul(x, matrix) if products.fits(x, matrix) else torch.mm(x, matrix)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Adds ``a.T @ b`` to ``total``, which may be wider."""
    if products.fits(a, b):
        products.product_into(total, a, b, True, False, add=True)
    elif total.dtype == a.dtype:
        total.addmm_(a.T, b)  # without another matrix of its size
    else:
        total += a.T @ b


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Returns ``dtype``, or float32 if it is narrower."""
    return torch.promote_types(dtype, torch.float32)


# The losses as modules


class LanguageModelLoss(nn.Module):
    """A causal language model with the loss of its next tokens.

    Args:
        model: a Hugging Face causal language model, with an adapter or without.
        terms: terms added to cross-entropy in training.
        form: scales, cap and routers' weight of the model's own forward.
    """

    def __init__(self, model: nn.Module, terms: LossTerms, form: HeadForm) -> None:
        super().__init__()
        self.model, self.terms, self.form = model, terms, form
        # Modules that predict further tokens in training (``hasten.parts.nn.multi_token``).
        self.ahead: Any = None

    def forward(
        self,
        labels: Tensor,
        real_tokens: Tensor | None = None,
        predict: bool = False,
        token_ids: Tensor | None = None,
        **inputs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Returns the summed loss and the number of labels.

        Args:
            labels: (B, T), aligned with the position that predicts them, -100: no loss.
            real_tokens: (B, T) or (B x T,), false at padding, for the routers' loss alone;
                None: ``attention_mask``, or every position.
            predict: return the most probable token at each label, and the labels, both (count,).
                So a layout needs one kind of pass for losses, metrics and samples.
            token_ids: (B, T), the tokens for the modules that predict further ones; None:
                ``input_ids`` of the model.
            inputs: inputs of the model.
        """
        if predict:
            return most_probable(self.model, labels, inputs), labels[labels != IGNORED]
        ahead = self.ahead if self.ahead is not None and self.ahead.weight else None
        ahead = ahead if self.training else None
        with nullcontext() if ahead is None else _states_of(trunk(self.model)) as states:
            loss, count, balance = self.sums(labels, real_tokens, **inputs)
        loss = loss if balance is None else loss + count * balance
        if ahead is None or states is None:
            return loss, count
        ids = inputs.pop("input_ids", token_ids)
        inputs.pop("inputs_embeds", None)
        return loss + ahead(self.model, states[-1], labels, ids, self.terms, **inputs), count

    def mean(self, labels: Tensor, items: Tensor | int | None = None, **inputs: Any) -> Tensor:
        """Returns the loss that the model's own forward returns for these labels.

        The cross-entropy is divided by ``items`` (transformers' ``num_items_in_batch``) or,
        without it, by the number of labels. The routers' loss isn't divided. Without any label
        cross-entropy and gradient are 0; in transformers the loss is NaN, its gradient 0.
        """
        loss, count, balance = self.sums(labels, **inputs)
        divisor = count if items is None else items
        if isinstance(divisor, Tensor):  # an ``if`` on its value would wait for a GPU
            divisor = divisor.masked_fill(divisor == 0, 1)
        mean = loss / (divisor if isinstance(divisor, Tensor) else divisor or 1)
        return mean if balance is None else mean + balance

    def sums(
        self, labels: Tensor, real_tokens: Tensor | None = None, **inputs: Any
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns (summed cross-entropy, number of labels, routers' loss with its weight)."""
        routers = self.training and self.form.router_weight != 0
        if routers:
            inputs["output_router_logits"] = True
        terms = self.terms if self.training else self.terms.measured()
        loss, output = self.cross_entropy(labels, terms, inputs)
        count = (labels != IGNORED).sum()
        if not routers:
            return loss, count, None
        if not output.router_logits:
            raise ValueError(f"{type(self.model).__name__} returned no logits of its routers")
        real = inputs.get("attention_mask") if real_tokens is None else real_tokens
        balance = balance_of_choices(output.router_logits, self.form.router_top_k, real)
        return loss, count, self.form.router_weight * balance

    def cross_entropy(
        self, labels: Tensor, terms: LossTerms, inputs: dict[str, Any]
    ) -> tuple[Tensor, Any]:
        """Returns the summed loss, and the model's output with its ``router_logits``."""
        raise NotImplementedError


@contextmanager
def _states_of(decoder: nn.Module) -> Iterator[list[Tensor]]:
    """Collects the hidden states of the decoder's passes inside, after its last norm."""
    states: list[Tensor] = []
    hook = decoder.register_forward_hook(
        lambda module, args, output: states.append(output.last_hidden_state)
    )
    try:
        yield states
    finally:
        hook.remove()


class WholeLogitsLoss(LanguageModelLoss):
    """Cross-entropy over all positions' logits, in float32 or wider, summed over labels.

    The logits are those of the model's own forward, scaled and capped.

    Raises:
        ValueError: the config enables a routers' loss that isn't recognised.
    """

    def __init__(self, model: nn.Module, terms: LossTerms = PLAIN) -> None:
        super().__init__(model, terms, head_form(model) if asks_router_loss(model) else HeadForm())

    def cross_entropy(
        self, labels: Tensor, terms: LossTerms, inputs: dict[str, Any]
    ) -> tuple[Tensor, Any]:
        output = self.model(use_cache=False, **inputs)
        logits = output.logits  # (B, T, vocabulary)
        return whole_cross_entropy(logits.flatten(0, -2), labels.flatten(), terms), output


class LabelOnlyLoss(LanguageModelLoss):
    """Loss of the hidden states at labelled positions only, through the head.

    A linear head is replaced by a :class:`LabelOnlyHead`. Any other head (with an adapter,
    or quantised) stays. The loss calls it for each chunk, and again in the backward pass.

    Raises:
        ValueError: the model's own forward does more than trunk, head and what
            :class:`~hasten.parts.nn.head_form.HeadForm` describes.
    """

    def __init__(
        self, model: nn.Module, chunk: int | str = "auto", terms: LossTerms = PLAIN
    ) -> None:
        form = head_form(model)
        terms = replace(terms, softcap=form.softcap, scale=form.scale)
        super().__init__(model, terms, form)
        self.chunk = take_label_only_head(model, chunk)
        self.largest_logits = 0  # most rows of logits in memory so far, for effect checks
        self.largest_positions = 0  # most positions of a micro-batch so far, for comparison

    def cross_entropy(
        self, labels: Tensor, terms: LossTerms, inputs: dict[str, Any]
    ) -> tuple[Tensor, Any]:
        output = trunk(self.model)(**{"use_cache": False} | inputs)
        hidden = output.last_hidden_state  # (B, T, hidden)
        head = causal_lm(self.model).lm_head
        rows, wanted = labelled_rows(hidden, labels)
        if self.form.state_scale != 1:
            rows = rows * self.form.state_scale
        self.largest_logits = max(self.largest_logits, min(len(wanted), self.chunk))
        self.largest_positions = max(self.largest_positions, labels.numel())
        return head_cross_entropy(head, rows, wanted, self.chunk, terms), output


def take_label_only_head(model: nn.Module, chunk: int | str) -> int:
    """Replaces a plain linear head, and returns the most rows of logits at one time."""
    inner = causal_lm(model)
    device = next((p.device for p in model.parameters()), "cpu")
    rows = chunk_rows(chunk, inner.lm_head.out_features, chunk_bytes_on(device))
    if plain_class(inner.lm_head) is nn.Linear:
        inner.lm_head = LabelOnlyHead(inner.lm_head)
    return rows


HeadTask = Callable[..., Any]  # takes states, weight and bias, as ``preference.OnePass``


class LabelOnlyHead(nn.Module):
    """A linear head that owns its weight and, if labels are given, returns the summed loss.

    Without labels it is the linear layer that it replaced, so generation and saving work as
    before. Weight and bias are the same parameters under the same names, tied or not.
    """

    takes_labels = True

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        if plain_class(head) is not nn.Linear:  # the adapter around it would be bypassed
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
        labels: Tensor | HeadTask | None = None,
        chunk: int | str = "auto",
        terms: LossTerms = PLAIN,
    ) -> Any:
        """Returns logits of ``hidden`` (..., hidden), or with ``labels`` (rows,) the rows' loss.

        A task instead of labels gets states, weight and bias. Its result is returned.
        """
        if labels is None:
            return F.linear(hidden, self.weight, self.bias)
        if not isinstance(labels, Tensor):
            return labels(hidden, self.weight, self.bias)
        return label_only_cross_entropy(hidden, self.weight, labels, chunk, self.bias, terms)


def head_cross_entropy(
    head: nn.Module, hidden: Tensor, labels: Tensor, chunk: int, terms: LossTerms = PLAIN
) -> Tensor:
    """Returns the summed loss of any ``head``, a chunk at a time.

    A head that isn't a :class:`TakesLabels` runs again for each chunk in the backward pass.
    """
    if getattr(head, "takes_labels", False):  # called with (hidden, labels, chunk, terms)
        loss: Tensor = head(hidden, labels, chunk, terms)
        return loss

    def chunk_loss(rows: Tensor, wanted: Tensor) -> Tensor:
        return whole_cross_entropy(head(rows), wanted, terms)

    # split returns one empty chunk if there is no row. Its zero gradients are needed, because
    # replicas wait for gradients.
    chunks = zip(hidden.split(chunk), labels.split(chunk), strict=True)
    losses = [checkpoint(chunk_loss, rows, wanted, use_reentrant=False) for rows, wanted in chunks]
    return torch.stack(losses).sum()


class ObjectiveLoss(nn.Module):
    """Any module and loss function: ``loss_fn(model(*inputs), target)`` as (sum, count).

    A single number from the loss function is the mean over the micro-batch, and ``weight`` its
    count. A pair is (sum, count).
    """

    def __init__(self, model: nn.Module, loss_fn: Any) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        self.returns_mean: bool | None = None  # None before the first call

    def forward(
        self, inputs: tuple[Any, ...], named: dict[str, Any], target: Any, weight: int
    ) -> tuple[Tensor, Tensor]:
        """Returns (sum, count) of the loss between the model's output and ``target``."""
        loss = self.loss_fn(self.model(*inputs, **named), target)
        self.returns_mean = not isinstance(loss, tuple)
        pair = loss if isinstance(loss, tuple) else (loss, weight)
        sizes = [v.numel() if isinstance(v, Tensor) else 1 for v in pair]
        if not isinstance(pair[0], Tensor) or sizes != [1, 1]:
            kind = f"{sizes} numbers" if isinstance(pair[0], Tensor) else type(pair[0]).__name__
            raise ValueError(
                f"loss_fn returned {kind}; it must return the mean of the batch, a tensor of one "
                "number, or (sum, count)"
            )
        total = pair[0].reshape(())
        if not self.returns_mean:
            return total, torch.as_tensor(pair[1])
        return total * weight, torch.tensor(weight)


# The tokens that a model predicts: for token accuracy and for samples.
#
# Common trainers report the share of trained tokens that the model ranks first as accuracy, as
# classification tasks do. At each labelled position the most probable next token is compared with
# the label, without sampling.

CHUNK = 1024  # positions whose logits are in memory at one time


class TokenAccuracy:
    """The share of trained tokens that the model ranks first (``hasten.core.job.TokenMetric``)."""

    def score(self, predicted: Tensor, labels: Tensor) -> Tensor:
        """Returns the number of right tokens; both (count,)."""
        return (predicted == labels).sum()


@runtime_checkable
class Predicts(Protocol):
    """A head that returns the most probable token of each row by itself."""

    def most_probable(self, hidden: Tensor) -> Tensor: ...


@torch.no_grad()
def most_probable(model: nn.Module, labels: Tensor, inputs: Mapping[str, Any]) -> Tensor:
    """Returns the most probable token of each labelled position, row by row, (count,)."""
    hidden = trunk(model)(**{"use_cache": False} | dict(inputs)).last_hidden_state
    head, labelled = causal_lm(model).lm_head, labels.flatten() != IGNORED
    chunks = hidden.flatten(0, 1)[labelled].split(CHUNK)
    if isinstance(head, Predicts):
        return torch.cat([head.most_probable(rows) for rows in chunks])
    return torch.cat([head(rows).argmax(-1) for rows in chunks])
