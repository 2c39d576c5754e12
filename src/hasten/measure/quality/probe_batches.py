"""Batches of the check on the first step: a batch cut, and two short documents in its form.

The documents differ in length. They reveal a dropped mask or a leak between documents where the
host's own batch has no padding, or only one document.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hasten.measure.quality.replay import Call
from hasten.parts.data.collate import IGNORED

PROBE_TOKENS = 256  # of the two documents
SEED = 20_260_101


def _get(batch: Any, key: str) -> Any:
    return batch.get(key) if isinstance(batch, Mapping) else None


def token_count(batch: Any) -> int:
    """Positions of a batch, or of recorded calls; 0 if it isn't known."""
    if isinstance(batch, list):
        return sum(call.tokens for call in batch)
    ids = _get(batch, "input_ids")
    return ids.numel() if isinstance(ids, Tensor) and ids.dim() == 2 else 0


def cut(batch: Any, rows: int, tokens: int) -> dict[str, Any]:
    return {
        key: value[:rows, :tokens] if isinstance(value, Tensor) and value.dim() == 2 else value
        for key, value in batch.items()
    }


FLATTENED = {
    *("position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
}


def short_documents(batch: Any, pad_id: int = 0) -> dict[str, Any] | None:
    """Two short documents in the form of ``batch``, or two short pairs; None if neither fits."""
    return uneven_documents(batch, pad_id) or uneven_pairs(batch, pad_id)


PAIR_KEYS = {"input_ids", "attention_mask", "completion_mask"}
REFERENCE_KEYS = {"ref_chosen_logps", "ref_rejected_logps"}


def uneven_pairs(batch: Any, pad_id: int = 0) -> dict[str, Any] | None:
    """Two preference pairs in the form of TRL's ``batch``: one with a common prompt, one without.

    They are a pair of the batch, and the same pair without the rejected row's first token. None
    if the batch has other keys, or one pair with a row that is too short.
    """
    ids, mask = _get(batch, "input_ids"), _get(batch, "attention_mask")
    marks = _get(batch, "completion_mask")
    tensors = [t for t in (ids, mask, marks) if isinstance(t, Tensor) and t.dim() == 2]
    if len(tensors) != 3 or {*batch} - PAIR_KEYS - REFERENCE_KEYS or len(ids) < 2:
        return None
    rows = [(ids[i][m], marks[i][m]) for i in (0, len(ids) // 2) if len(m := mask[i].bool())]
    chosen, rejected = ([t[:PROBE_TOKENS] for t in row] for row in rows)
    later = [t[1:] for t in rejected]
    documents = [chosen, chosen, rejected, later]
    if any(len(tokens) < 3 or not bool(marked[1:].any()) for tokens, marked in documents):
        return None
    longest = max(len(tokens) for tokens, _ in documents)

    def stacked(parts: Sequence[Tensor], value: int) -> Tensor:
        return torch.stack([F.pad(part, (0, longest - len(part)), value=value) for part in parts])

    references = {key: batch[key][:1].repeat(2) for key in REFERENCE_KEYS & batch.keys()}
    return references | {
        "input_ids": stacked([tokens for tokens, _ in documents], pad_id),
        "attention_mask": stacked([torch.ones_like(tokens) for tokens, _ in documents], 0),
        "completion_mask": stacked([marked for _, marked in documents], 0),
    }


def uneven_documents(batch: Any, pad_id: int = 0) -> dict[str, Any] | None:
    """Two short documents of different length in the form of ``batch``, or None.

    The first has masked labels; the shorter one is padded like the host's. The result is
    None if they aren't needed or aren't possible. They aren't needed if the batch has
    padding and rows with unlike numbers of labels, or several documents in a row. They
    aren't possible if the batch has keys other than tokens, labels, a mask and document
    boundaries.
    """
    ids, labels = _get(batch, "input_ids"), _get(batch, "labels")
    if not isinstance(ids, Tensor) or ids.dim() != 2 or not isinstance(labels, Tensor):
        return None
    keys = {str(k) for k, v in batch.items() if v is not None}
    mask, positions = batch.get("attention_mask"), batch.get("position_ids")
    padded = isinstance(mask, Tensor) and mask.shape == ids.shape and bool((mask == 0).any())
    several = isinstance(positions, Tensor) and int((positions == 0).sum()) > ids.shape[0]
    supported_keys = {"input_ids", "labels", "attention_mask", *FLATTENED}
    unlike = len(set((labels[..., 1:] != IGNORED).sum(-1).tolist())) > 1  # else a mean of means
    if (padded and unlike) or several or keys - supported_keys:
        return None
    row = ids[0][mask[0].bool()] if padded else ids[0]
    row = row[:PROBE_TOKENS]
    if len(row) < 6:
        return None
    at = len(row) // 3
    documents = row[:at], row[at:]
    wanted = [document.clone() for document in documents]
    wanted[1][: len(wanted[1]) // 2] = IGNORED
    if keys & FLATTENED:
        return _flattened(keys, documents, wanted)
    is_left = padded and not bool(mask[:, 0].all())
    if is_left:  # its filler would predict this label
        wanted[0][0] = IGNORED
    longest = len(documents[1])

    def filled(tensor: Tensor, value: int) -> Tensor:
        filler = tensor.new_full((longest - len(tensor),), value)
        return torch.cat((filler, tensor) if is_left else (tensor, filler))

    marks = [torch.ones_like(document) for document in documents]
    made = {
        "input_ids": torch.stack([filled(document, pad_id) for document in documents]),
        "labels": torch.stack([filled(label, IGNORED) for label in wanted]),
        "attention_mask": torch.stack([filled(mark, 0) for mark in marks]),
    }
    return {key: value for key, value in made.items() if key in keys}


def document_calls(calls: Sequence[Call], pad_id: int) -> list[Call] | None:
    """A call with two short documents like one of those recorded, or None.

    If the loss read nothing but logits, their gradients are random where a token is real.
    """
    for call in calls:
        plain = {k: v for k, v in call.inputs.items() if isinstance(v, Tensor) and v.dim()}
        ids, is_labelled = plain.get("input_ids"), "labels" in plain
        made = uneven_documents({"labels": ids, **plain}, pad_id)
        if made is None or not {"loss", "logits"} & call.gradients.keys():
            continue
        labels = made["labels"] if is_labelled else made.pop("labels")
        settings = {k: v for k, v in call.named.items() if isinstance(v, bool)}
        changed = replace(call, arguments=(), named={**settings, **made}, sums={})
        if "loss" in call.gradients:
            changed.shapes, changed.gradients = {"loss": torch.Size()}, {"loss": torch.ones(())}
        else:
            shape = torch.Size((*labels.shape, call.shapes["logits"][-1]))
            draw = torch.randn(shape, generator=torch.Generator().manual_seed(SEED))
            is_real = made.get("attention_mask", torch.ones_like(labels)).bool().cpu()
            changed.shapes, changed.gradients = (
                {"logits": shape},
                {"logits": draw * is_real[..., None]},
            )
        return [changed]
    return None


def _flattened(
    keys: set[str], documents: Sequence[Tensor], labels: Sequence[Tensor]
) -> dict[str, Any]:
    """Two documents in one row, with all document boundaries that the host's batch has."""
    lengths = [len(document) for document in documents]
    for label in labels:
        label[0] = IGNORED
    row = torch.cat(tuple(documents))
    bounds = row.new_tensor([0, lengths[0], sum(lengths)]).to(torch.int32)
    made = {
        "input_ids": row[None],
        "labels": torch.cat(tuple(labels))[None],
        "attention_mask": torch.ones_like(row)[None],
        "position_ids": torch.cat([torch.arange(n, device=row.device) for n in lengths])[None],
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
        "seq_idx": torch.repeat_interleave(
            torch.arange(2, dtype=torch.int32, device=row.device),
            torch.tensor(lengths, device=row.device),
        )[None],
    }
    return {key: value for key, value in made.items() if key in keys}
