"""Records of other people's datasets, in hasten's order and layout, as a ``DataLoader``.

A row is a :class:`~hasten.parts.records.TokenRecord`, or a mapping with ``input_ids`` and, if not
every token is trained, ``labels`` (-100: no loss), as Transformers' collators take them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from hasten.core.batch import Collate
from hasten.core.order import Sampler
from hasten.errors import InputError
from hasten.parts.records import TokenRecord, token_record


def record_of(row: Any) -> TokenRecord:
    """A dataset's row as a token record; filler that an attention mask marks is left out.

    Raises:
        InputError: no ``input_ids``, not one token, or labels of another length or other tokens.
    """
    if isinstance(row, TokenRecord):
        return row
    if not isinstance(row, Mapping) or "input_ids" not in row:
        keys = ", ".join(row) if isinstance(row, Mapping) else type(row).__name__
        raise InputError(f"a row of the data needs input_ids (and labels); it has {keys}")
    ids = np.asarray(row["input_ids"])
    given = row.get("labels")
    labels = ids if given is None else np.asarray(given)
    mask = row.get("attention_mask")
    kept = np.ones(ids.shape, bool) if mask is None else np.asarray(mask).astype(bool)
    if not (ids.ndim == 1 and ids.shape == labels.shape == kept.shape):
        raise InputError(
            f"a row's input_ids, labels and attention_mask have shapes {ids.shape}, "
            f"{labels.shape} and {kept.shape}; they must be rows of one length"
        )
    if not kept.any():
        raise InputError("a row of the data holds no token; leave empty rows out")
    trained = labels != -100
    if (labels[trained] != ids[trained]).any():
        raise InputError(
            "a row's labels are other tokens than its input_ids; hasten trains a model to predict "
            "its own tokens, so give labels that are input_ids or -100, not shifted"
        )
    return token_record(ids[kept], trained[kept])


def collator(lay_out: Collate) -> Callable[[Sequence[Any]], dict[str, Any]]:
    """A ``collate_fn`` that returns what the model is called with.

    ``shift_labels`` tell Transformers that these labels are at the position that predicts them.
    ``use_cache`` is off because its models tell packed records apart by their positions only where
    no cache is made; with one, attention would cross from record to record.
    """

    def collate(rows: Sequence[Any]) -> dict[str, Any]:
        inputs = dict(lay_out([record_of(row) for row in rows]).inputs)
        return {**inputs, "shift_labels": inputs["labels"], "use_cache": False}

    return collate


class StepBatches:
    """A batch sampler: of each step this rank's records, in ``passes`` batches.

    What the order keeps apart (packed rows) stays apart while there are enough passes for it. On
    several ranks a last step too small for all their passes is left out, or ranks would wait for
    each other.
    """

    def __init__(self, order: Sampler, passes: int = 1, rank: int = 0, ranks: int = 1) -> None:
        self.order, self.passes, self.rank, self.ranks, self.epoch = order, passes, rank, ranks, 0
        self._length = sum(1 for _ in self._batches(0))

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    @property
    def sampler(self) -> StepBatches:
        """Where Lightning looks for somebody to tell the epoch."""
        return self

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[list[int]]:
        yield from self._batches(self.epoch)

    def _batches(self, epoch: int) -> Iterator[list[int]]:
        of_ranks = (self.order.local_steps(epoch, r, self.ranks) for r in range(self.ranks))
        steps = list(zip(*of_ranks, strict=True))
        for number, shares in enumerate(steps, start=1):
            found = [spread([list(p) for p in share if len(p)], self.passes) for share in shares]
            least = min(len(batches) for batches in found)
            if least < self.passes and number < len(steps):
                raise InputError(
                    f"a step can't be cut into {self.passes} passes on each rank, one of them has "
                    f"{least} record(s); lower gradient_accumulation_steps"
                )
            if least == self.passes or self.ranks == 1:
                yield from found[self.rank]


def spread(pieces: list[list[int]], passes: int) -> list[list[int]]:
    """The same records in so many pieces; fewer only where there are fewer records."""
    while len(pieces) < passes and any(len(p) > 1 for p in pieces):
        at = max(range(len(pieces)), key=lambda i: len(pieces[i]))
        half = (len(pieces[at]) + 1) // 2
        pieces[at : at + 1] = [pieces[at][:half], pieces[at][half:]]
    while len(pieces) > passes:
        at = min(range(len(pieces) - 1), key=lambda i: len(pieces[i]) + len(pieces[i + 1]))
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    return pieces


class StepLoader(DataLoader[Any]):
    """A ``DataLoader`` over :class:`StepBatches` that trainers tell the epoch."""

    def __init__(self, records: Any, batches: StepBatches, collate: Any, **settings: Any) -> None:
        super().__init__(records, batch_sampler=batches, collate_fn=collate, **settings)
        self.order = batches

    def set_epoch(self, epoch: int) -> None:
        self.order.set_epoch(epoch)
