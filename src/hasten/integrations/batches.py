"""Records of other people's datasets, in hasten's order and layout, as a ``DataLoader``.

A row is a :class:`~hasten.parts.data.collate.TokenRecord`, or a mapping with ``input_ids`` and, if
not every token is trained, ``labels`` (-100: no loss), as Transformers' collators take them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from hasten.core.job import Collate, Sampler
from hasten.errors import InputError
from hasten.parts.data.collate import TokenRecord, token_record


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


def row_sizes(rows: Any) -> tuple[list[int], list[int]]:
    """Tokens of each row, and how many of them carry loss: a first token is never predicted."""
    lengths, trained = [], []
    for index in range(len(rows)):
        record = record_of(rows[index])
        lengths.append(record.length)
        trained.append(record.trained_tokens)
    return lengths, trained


def collator(lay_out: Collate) -> Callable[[Sequence[Any]], dict[str, Any]]:
    """A ``collate_fn`` that returns what the model is called with.

    ``shift_labels`` tell Transformers that these labels are at the position that predicts them.
    ``use_cache`` is off because its models tell packed records apart by their positions only where
    no cache is made; with one, attention would cross from record to record. Rows that know what
    their loss is divided by say so as Transformers' losses take it.
    """

    def collate(rows: Sequence[Any]) -> dict[str, Any]:
        inputs = dict(lay_out([record_of(row) for row in rows]).inputs)
        weighed = {"num_items_in_batch": rows.items} if isinstance(rows, Pass) else {}
        return {**inputs, "shift_labels": inputs["labels"], "use_cache": False, **weighed}

    return collate


class Pass(list[Any]):
    """The records of a pass, as positions or as rows, and what its loss sum is divided by."""

    def __init__(self, records: Sequence[Any], items: float) -> None:
        super().__init__(records)
        self.items = items


class WeightedBatches:
    """A dataset whose batches keep what their loss is divided by on their way to the collator."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]

    def __getitems__(self, indices: Sequence[int]) -> Sequence[Any]:
        """All rows of a batch, as ``DataLoader`` asks for them."""
        rows = [self.rows[index] for index in indices]
        return Pass(rows, indices.items) if isinstance(indices, Pass) else rows


class StepBatches:
    """A batch sampler: of each step this rank's records, in ``passes`` batches.

    What the order keeps apart (packed rows) stays apart while there are enough passes for it. On
    several ranks a last step too small for all their passes is left out, or ranks would wait for
    each other.

    Args:
        trained: of each record the tokens that carry loss, where the host takes the mean of the
            passes' and the ranks' losses: each pass then is a :class:`Pass` whose ``items`` make
            that mean the mean over the step's tokens. None: a pass is a list.
    """

    def __init__(
        self,
        order: Sampler,
        passes: int = 1,
        rank: int = 0,
        ranks: int = 1,
        trained: Sequence[int] | None = None,
    ) -> None:
        self.order, self.passes, self.rank, self.ranks = order, passes, rank, ranks
        self.epoch = 0
        self.first = 0  # batches of the epoch that an earlier run has had
        self.given = 0  # batches of it that were handed out, those among them
        self._trained = trained
        self._length = sum(1 for _ in self._batches(0))

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.epoch, self.first, self.given = epoch, 0, 0

    @property
    def sampler(self) -> StepBatches:
        """Where Lightning looks for somebody to tell the epoch."""
        return self

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[list[int]]:
        yield from itertools.islice(self._batches(self.epoch), self.first, None)

    def _batches(self, epoch: int) -> Iterator[list[int]]:
        of_ranks = (self.order.local_steps(epoch, r, self.ranks) for r in range(self.ranks))
        steps = list(zip(*of_ranks, strict=True))
        for number, shares in enumerate(steps, start=1):
            found = [spread([list(p) for p in share if len(p)], self.passes) for share in shares]
            least = min(len(batches) for batches in found)
            if least < self.passes and number < len(steps):
                raise InputError(
                    f"a step can't be cut into {self.passes} passes on each rank, one of them has "
                    f"{least} record(s); accumulate fewer passes"
                )
            if least == self.passes or self.ranks == 1:
                yield from self._weighed(found)

    def _weighed(self, of_ranks: Sequence[list[list[int]]]) -> list[list[int]]:
        """This rank's passes of a step."""
        mine = of_ranks[self.rank]
        if self._trained is None:
            return mine
        records = (i for batches in of_ranks for batch in batches for i in batch)
        total = sum(self._trained[i] for i in records)
        items = max(total, 1) / (self.passes * self.ranks)
        return [Pass(batch, items) for batch in mine]


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
    """A ``DataLoader`` over :class:`StepBatches` that trainers tell the epoch.

    Its state is the place in the data: epoch, and batches of it that were handed out. Lightning
    saves it in its own checkpoints and gives it back.
    """

    def __init__(self, records: Any, batches: StepBatches, collate: Any, **settings: Any) -> None:
        super().__init__(records, batch_sampler=batches, collate_fn=collate, **settings)
        self.order = batches

    def __iter__(self) -> Iterator[Any]:
        """Begins with the first ``next``: trainers may tell the epoch after ``iter``."""
        self.order.given = self.order.first
        for batch in super().__iter__():
            self.order.given += 1  # before it leaves: a checkpoint may be written while it is out
            yield batch
        self.order.first = 0

    def set_epoch(self, epoch: int) -> None:
        self.order.set_epoch(epoch)

    def state_dict(self) -> dict[str, int]:
        """Where the batch comes from that follows the last one."""
        order = self.order
        if order.given >= len(order):
            return {"epoch": order.epoch + 1, "batch": 0}
        return {"epoch": order.epoch, "batch": order.given}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on there, from the next ``iter`` on."""
        self.order.epoch = state["epoch"]
        self.order.first = self.order.given = state["batch"]
