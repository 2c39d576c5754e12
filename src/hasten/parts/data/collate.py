"""Token records, the tensors that they are laid out in, and the cut into micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


class TokenRecord(NamedTuple):
    """One record as token ids, with a mark on every token that carries loss.

    ``trained[0]`` has no effect: nothing predicts the first token.
    """

    input_ids: NDArray[np.int32]  # (tokens,)
    trained: NDArray[np.bool_]  # (tokens,)

    @property
    def length(self) -> int:
        return len(self.input_ids)

    @property
    def trained_tokens(self) -> int:
        """Tokens that carry loss once the first, which nothing predicts, is left out."""
        return int(np.count_nonzero(self.trained[1:]))


def token_record(input_ids: Any, trained: Any = None) -> TokenRecord:
    """A record from any sequences; without ``trained`` every token carries loss."""
    ids = np.asarray(input_ids, dtype=np.int32)
    mask = np.ones(len(ids), bool) if trained is None else np.asarray(trained, dtype=np.bool_)
    if ids.ndim != 1 or mask.shape != ids.shape:
        raise ValueError(f"a record needs two equal-length rows, got {ids.shape} and {mask.shape}")
    return TokenRecord(ids, mask)


# Lay token records out as one tensor: padded rows, or packed end to end.
#
# Labels are aligned with the position that predicts them: ``labels[t]`` is the token at ``t + 1``
# where that token is trained and belongs to the same record, else -100. No model has to shift
# again, and the last token of one packed record never predicts the first of the next. A Hugging
# Face model that computes its own loss shifts ``labels``; give it these as ``shift_labels`` too.

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
    return end_to_end(
        [torch.from_numpy(r.input_ids.astype(np.int64)) for r in ordered],
        [torch.from_numpy(aligned_labels(r)) for r in ordered],
    )


def end_to_end(input_ids: Sequence[Tensor], labels: Sequence[Tensor]) -> dict[str, Any]:
    """One row of documents in the order given, as :func:`packed` returns it.

    ``input_ids`` and ``labels`` hold one tensor (tokens,) of each document.
    """
    lengths = tuple(len(ids) for ids in input_ids)
    return {
        "input_ids": torch.cat(tuple(input_ids)).unsqueeze(0),
        "labels": torch.cat(tuple(labels)).unsqueeze(0),
        "position_ids": torch.cat([torch.arange(n) for n in lengths]).unsqueeze(0),
        "document_lengths": lengths,
        "boundaries": torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32),
    }


# Records of the articles' form, {'input', 'target'} or pairs of tensors of uneven length.


def collate_fn(
    batch: Sequence[Any], *, padding: float = 0, target_padding: float = 0
) -> tuple[Tensor, Tensor]:
    """Inputs and targets (records, longest, ...), filled behind each record.

    Raises:
        ValueError: a record is neither a mapping with ``input`` and ``target`` nor a pair.
    """
    if not batch:
        raise ValueError("there are no records to lay out")
    pairs = [_pair(record, index) for index, record in enumerate(batch)]
    inputs, targets = (list(column) for column in zip(*pairs, strict=True))
    return (
        pad_sequence(inputs, batch_first=True, padding_value=padding),
        pad_sequence(targets, batch_first=True, padding_value=target_padding),
    )


def _pair(record: Any, index: int) -> tuple[Tensor, Tensor]:
    if isinstance(record, Mapping) and "input" in record and "target" in record:
        found = record["input"], record["target"]
    elif isinstance(record, tuple | list) and len(record) == 2:
        found = record[0], record[1]
    else:
        has = ", ".join(map(str, record)) if isinstance(record, Mapping) else type(record).__name__
        raise ValueError(
            f"record {index} of the batch needs 'input' and 'target', or must be a pair of them; "
            f"it has {has}"
        )
    return torch.as_tensor(found[0]), torch.as_tensor(found[1])


# Cut a step's records into micro-batches of at most so many records, or so many slots.

Record = TypeVar("Record")


def by_count(records: Sequence[Record], size: int) -> list[list[Record]]:
    """Pieces of ``size`` records in the order given; the last may be smaller.

    Raises:
        ValueError: ``size`` is below 1.
    """
    if size < 1:
        raise ValueError(f"size is {size}; a piece has at least one record")
    return [list(records[i : i + size]) for i in range(0, len(records), size)]


def by_tokens(records: Sequence[Record], lengths: Sequence[int], limit: int) -> list[list[Record]]:
    """Pieces whose tokens add up to at most ``limit``, longest records first.

    Each record goes into the fullest piece that still holds it (best fit decreasing), so that few
    pieces are needed; a record longer than the limit is a piece of its own.
    """
    pieces: list[list[Record]] = []
    room: list[int] = []
    for index in sorted(range(len(records)), key=lambda i: -lengths[i]):
        fits = [p for p in range(len(pieces)) if room[p] >= lengths[index]]
        if fits:
            best = min(fits, key=lambda p: room[p])
            pieces[best].append(records[index])
            room[best] -= lengths[index]
        else:
            pieces.append([records[index]])
            room.append(limit - lengths[index])
    return pieces


def by_slots(records: Sequence[Record], lengths: Sequence[int], limit: int) -> list[list[Record]]:
    """Pieces in the order given whose padded slots, longest x count, stay within ``limit``.

    A record longer than the limit is a piece of its own.
    """
    pieces: list[list[Record]] = []
    longest = 0
    for record, length in zip(records, lengths, strict=True):
        longest = max(longest, length)
        if pieces and longest * (len(pieces[-1]) + 1) <= limit:
            pieces[-1].append(record)
        else:
            pieces.append([record])
            longest = length
    return pieces
