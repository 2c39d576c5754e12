"""Techniques in the calls that TRL's losses make: a batch in, each label's log-probability out.

The losses of TRL's trainers (SFT, DPO, KTO, GRPO, RLOO) call a model with ``fused_lm_head=True``.
It returns log-probabilities of the labels as padded rows, (B, T - 1), and statistics for the logs.
Everything else is TRL's code: loss types, divergences, weights, metrics. So only what happens
inside such a call is replaced:

1. COLLATE: the padded rows lie end to end, two rows with a common prompt as one document that
   branches. The results return to their padded places.
2. LOSS: logits of labelled positions alone (:mod:`hasten.parts.nn.label_scores`).

A reference model gets the same calls, and so the same techniques. A call with other inputs is left
to TRL's own head.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hasten.integrations.batches import filled_spans
from hasten.measure.quality.preserved import module_of
from hasten.parts.data.collate import IGNORED, end_to_end
from hasten.parts.data.prefetch import each_tensor
from hasten.parts.nn import rebind
from hasten.parts.nn.attention import SHARES_PROMPTS, by_documents
from hasten.parts.nn.causal_lm import causal_lm, trunk
from hasten.parts.nn.label_scores import label_scores
from hasten.parts.nn.losses import LabelOnlyHead, LabelOnlyLoss

# What TRL's head was built with (trl.trainer.utils.add_fused_lm_head).
_SETTINGS = {
    *("original_forward", "text_config", "backbone_attr", "temperature", "outputs"),
    *("cast_lm_head_to_fp32", "final_logit_softcapping", "logit_scale"),
}
_FIELDS = ("log_probs", "entropy", "mean_logits", "is_top1")  # that label_scores computes
_OF_THE_HEAD = ("fused_lm_head", "labels", "shift_labels", "num_items_in_batch")
_PACKABLE = {"input_ids", "attention_mask", "use_cache", "output_router_logits"}
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class FusedHead:
    """TRL's head in a model's ``forward``."""

    forward: Callable[..., Any]  # TRL's, without the autocast that accelerate puts around it
    outputs: tuple[str, ...]  # the fields that its trainer reads
    scale: float  # factor of the logits
    has_router_loss: bool
    difference: str  # clause: what it computes that a label's scores don't have; or empty

    @classmethod
    def of(cls, forward: Any) -> FusedHead | None:
        """Returns the head in this ``forward``; None if it isn't TRL's, or a version's unknown."""
        function = getattr(forward, "__func__", None)
        if function is None or module_of(function) != "trl.trainer.utils":
            return None
        made = inspect.getclosurevars(function).nonlocals
        if made.keys() != _SETTINGS:
            return None
        more = sorted({*made["outputs"]} - {*_FIELDS})
        differences = {
            f"the trainer also reads {', '.join(more)}": more,
            "the model caps its logits": made["final_logit_softcapping"] is not None,
            "the trainer computes the head in float32": made["cast_lm_head_to_fp32"],
        }
        return cls(
            forward,
            tuple(made["outputs"]),
            made["logit_scale"] / made["temperature"],
            bool(getattr(made["text_config"], "output_router_logits", False)),
            next((text for text, differs in differences.items() if differs), ""),
        )


@dataclass
class ScoredCalls:
    """The techniques in a model's calls.

    Args:
        packs: rows are laid out end to end.
        least_share: share of the tokens from which common beginnings of rows are laid out once.
        loss: of ``labelled_token_loss``; None: TRL's head.
        context: the host's autocast.
    """

    head: FusedHead
    packs: bool
    least_share: float
    loss: nn.Module | None
    context: Callable[[], AbstractContextManager[Any]]
    _reported: set[str] = field(default_factory=set)

    def scored(self, model: Any, named: dict[str, Any]) -> Any:
        """Returns what TRL's head returns for these arguments."""
        labels = named["labels"]
        inputs = {k: v for k, v in named.items() if k not in _OF_THE_HEAD and v is not None}
        rows, columns = (labels[:, 1:] != IGNORED).nonzero(as_tuple=True)
        has_own_head = self._has_own_head(model, inputs)
        shares = has_own_head and separates_prefixes(model.config)
        least_share = self.least_share if shares else math.inf
        packed = _packed(inputs, labels, least_share) if self.packs else ""
        if isinstance(packed, str):
            self._report(packed)
            inputs, reads = {**inputs, "use_cache": False}, rows * labels.shape[1] + columns
        else:
            inputs, reads = packed.inputs, packed.reads(rows, columns)
        balance = None
        if has_own_head:
            fields = self._scores(model, inputs, reads, labels[rows, columns + 1])
        elif isinstance(packed, str):
            with self.context():
                return self.head.forward(**named)
        else:
            with self.context():
                more = {"shift_labels": packed.aligned, "fused_lm_head": True}
                output = self.head.forward(**inputs, **more)
            fields = {n: output[n].flatten().index_select(0, reads) for n in self.head.outputs}
            balance = output.aux_loss
        places = rows * (labels.shape[1] - 1) + columns
        return _output(labels, places, fields, balance, named.get("num_items_in_batch"))

    def _has_own_head(self, model: Any, inputs: Mapping[str, Any]) -> bool:
        """True if ``labelled_token_loss`` computes the head: linear, without a routers' loss."""
        head = model.get_output_embeddings()
        routers = self.head.has_router_loss or inputs.get("output_router_logits")
        return isinstance(self.loss, LabelOnlyLoss) and type(head) is LabelOnlyHead and not routers

    def _scores(
        self, model: Any, inputs: dict[str, Any], reads: Tensor, labels: Tensor
    ) -> dict[str, Tensor]:
        assert isinstance(self.loss, LabelOnlyLoss)  # _has_own_head() looked
        head, outputs = model.get_output_embeddings(), self.head.outputs
        with self.context():
            hidden = trunk(model)(**inputs).last_hidden_state.flatten(0, 1)
            rows = hidden.index_select(0, reads)
            statistics = len(outputs) > 1
            scores = label_scores(
                rows, head.weight, labels, self.loss.chunk, head.bias, self.head.scale, statistics
            )
        return {name: one for name, one in zip(_FIELDS, scores, strict=True) if name in outputs}

    def _report(self, reason: str) -> None:
        if reason and reason not in self._reported:
            self._reported.add(reason)
            _LOG.warning("speed_up: packed: left out for some batches: %s", reason)


def score_labels(module: Any, usual: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """The ``forward`` of a model in TRL's trainers with techniques in its calls."""
    calls = rebind.state_of(module, score_labels)
    is_known = not args and named.get("fused_lm_head") and named.get("shift_labels") is None
    tensors = (named.get("input_ids"), named.get("labels"))
    if calls is None or not is_known or not all(isinstance(t, Tensor) for t in tensors):
        return usual(*args, **named)
    return calls.scored(module, named)


def fused_head(model: nn.Module) -> FusedHead | None:
    """Returns TRL's head of a model that is plain, or None."""
    try:
        inner = causal_lm(model)
    except ValueError:
        return None
    return FusedHead.of(vars(inner).get("forward"))


@contextlib.contextmanager
def without_fused_head(model: nn.Module) -> Iterator[None]:
    """Inside, a model that is plain otherwise has the ``forward`` of its class."""
    head = fused_head(model)
    if head is not None:
        del vars(causal_lm(model))["forward"]
    try:
        yield
    finally:
        if head is not None:
            vars(causal_lm(model))["forward"] = head.forward


class _Packed(NamedTuple):
    """A batch's rows end to end, and where the columns of each row are."""

    inputs: dict[str, Any]
    aligned: Tensor  # labels (1, T) of each position; of no use if two rows share positions
    unshared: Tensor  # what to add to a column of a row
    shared: Tensor  # the same for columns before ``limits``, which another row has as well
    limits: Tensor

    def reads(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Returns the positions of these columns."""
        is_shared = columns < self.limits[rows]
        return columns + torch.where(is_shared, self.shared[rows], self.unshared[rows])


def _packed(inputs: Mapping[str, Any], labels: Tensor, least_share: float) -> _Packed | str:
    """Returns the packed call of a model, or a clause why its rows stay padded.

    Args:
        least_share: share of the tokens from which the beginnings of two rows are laid out once.
    """
    more = sorted(inputs.keys() - _PACKABLE)
    if more:
        return f"the model is called with {', '.join(more)}"
    ids, mask = inputs["input_ids"], inputs.get("attention_mask")
    device, ids, labels = ids.device, ids.cpu(), labels.cpu()  # one wait, none for each row
    spans = filled_spans(ids, labels, mask.cpu() if isinstance(mask, Tensor) else mask)
    if isinstance(spans, str):
        return spans
    documents = [ids[row, at:end] for row, (at, end) in enumerate(spans)]
    order, befores = _common_beginnings(documents, least_share)
    aligned = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    starts = [0] * len(spans)  # positions of the rows' unshared tokens
    parts: list[tuple[Tensor, Tensor, int]] = []
    length = 0
    for row in order:
        (at, end), (_, common) = spans[row], befores[row]
        starts[row] = length
        if end - at > common:
            parts += [(documents[row][common:], aligned[row, at + common : end], common)]
            length += end - at - common
    if not parts:
        return "a batch has no token to train"
    laid_out = end_to_end([part[0] for part in parts], [part[1] for part in parts])
    prefixes = tuple(part[2] for part in parts)
    if any(prefixes):
        positions = [torch.arange(len(part[0])) + part[2] for part in parts]
        laid_out |= {"prefixes": prefixes, "position_ids": torch.cat(positions).unsqueeze(0)}
    shifts = [
        (starts[row] - common - at, starts[before] - at, at + common)
        for row, ((at, _), (before, common)) in enumerate(zip(spans, befores, strict=True))
    ]
    laid_out = each_tensor(laid_out, lambda tensor: tensor.to(device))
    wanted = laid_out.pop("labels")
    settings = {k: v for k, v in inputs.items() if k == "output_router_logits"}
    named = {**settings, **laid_out, "use_cache": False}
    return _Packed(named, wanted, *torch.tensor(shifts, device=device).unbind(1))


def _common_beginnings(
    documents: Sequence[Tensor], least_share: float
) -> tuple[list[int], list[tuple[int, int]]]:
    """Returns an order of the rows, and for each the row before and how many tokens they share.

    A batch of pairs has the chosen rows first. Completions of one prompt are neighbours.
    """
    count, total = len(documents), sum(map(len, documents))
    best: tuple[list[int], list[tuple[int, int]]] = [*range(count)], [(0, 0)] * count
    most = least_share * total
    halves = [(row, row + count // 2) for row in range(count // 2)]
    neighbours = [(row, row + 1) for row in range(0, count, 2)]
    for pairs in (halves, neighbours) if count % 2 == 0 and least_share < 1 else ():
        befores = [(0, 0)] * count
        for one, other in pairs:
            befores[other] = one, _common(documents[one], documents[other])
        saved = sum(common for _, common in befores)
        if saved > most:
            best, most = ([row for pair in pairs for row in pair], befores), saved
    return best


def _common(one: Tensor, other: Tensor) -> int:
    shortest = min(len(one), len(other))
    differs = (one[:shortest] != other[:shortest]).nonzero()
    return int(differs[0]) if len(differs) else shortest


def separates_prefixes(config: Any) -> bool:
    """Returns True if the model's attention lets a document read the beginning of another."""
    return by_documents(config) and config.model_type in SHARES_PROMPTS


def _output(
    labels: Tensor,
    places: Tensor,
    fields: Mapping[str, Tensor],
    balance: Tensor | None,
    items: Any,
) -> Any:
    """Returns TRL's output with the fields of the labels at their padded places."""
    from trl.trainer.utils import FusedCausalLMOutput

    mask = labels[:, 1:] != IGNORED

    def padded(values: Tensor) -> Tensor:
        return values.new_zeros(mask.numel()).index_copy(0, places, values).view(mask.shape)

    rows = {name: padded(values) for name, values in fields.items()}
    count = mask.sum().clamp(min=1) if items is None else items
    return FusedCausalLMOutput(
        loss=-rows["log_probs"].sum() / count, label_mask=mask, aux_loss=balance, **rows
    )
