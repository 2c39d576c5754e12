"""Lay token records out as one tensor: padded rows, or packed end to end.

Labels are aligned with the position that predicts them: ``labels[t]`` is the token at ``t + 1``
where that token is trained and belongs to the same record, else -100. No model has to shift again,
and the last token of one packed record never predicts the first of the next. A Hugging Face model
that computes its own loss shifts ``labels``; give it these as ``shift_labels`` too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hasten.parts.data.records import TokenRecord

IGNORED = -100


def aligned_labels(record: TokenRecord) -> NDArray[np.int64]:
    """What each position of a record has to predict, (tokens,); -100 where nothing is asked."""
    labels = np.full(record.length, IGNORED, np.int64)
    labels[:-1] = np.where(record.trained[1:], record.input_ids[1:], IGNORED)
    return labels


def padded(records: Sequence[TokenRecord], pad_id: int = 0) -> dict[str, Tensor]:
    """One row per record, filled on the right to the longest: ``input_ids``, ``labels`` (B, T).

    No mask is needed: attention is causal, so a token never sees the filler behind it, and the
    filler carries no loss.
    """
    if not records:
        raise ValueError("there are no records to lay out")
    longest = max(r.length for r in records)
    ids = np.full((len(records), longest), pad_id, np.int64)
    labels = np.full((len(records), longest), IGNORED, np.int64)
    for row, record in enumerate(records):
        ids[row, : record.length] = record.input_ids
        labels[row, : record.length] = aligned_labels(record)
    return {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}


def packed(records: Sequence[TokenRecord]) -> dict[str, Any]:
    """All records end to end in one row, longest first, without a slot of padding.

    Returns ``input_ids``, ``labels``, ``position_ids`` (1, T), positions counted from each record's
    start; ``document_lengths``, a tuple of ints; and ``boundaries`` (documents + 1,), the start of
    each record and the end of the last, int32, as variable-length attention kernels take them.

    Models that read positions tell the records apart by the positions alone; see
    :mod:`hasten.parts.nn.attention` for attention that also does no work between them.
    """
    if not records:
        raise ValueError("there are no records to lay out")
    ordered = sorted(records, key=lambda r: -r.length)
    lengths = [r.length for r in ordered]
    return {
        "input_ids": _row([r.input_ids.astype(np.int64) for r in ordered]),
        "labels": _row([aligned_labels(r) for r in ordered]),
        "position_ids": _row([np.arange(n, dtype=np.int64) for n in lengths]),
        "document_lengths": tuple(lengths),
        "boundaries": torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32),
    }


def _row(pieces: Sequence[NDArray[np.int64]]) -> Tensor:
    return torch.from_numpy(np.concatenate(pieces)).unsqueeze(0)
