"""Examples of a user's dataset, in hasten's order and layout, as a ``DataLoader``.

A row is a :class:`~hasten.parts.data.collate.TokenizedExample`, or a mapping with
``input_ids``. If not every token is trained, the mapping also has ``labels`` (-100: no
loss), as in Transformers' collators.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from hasten.core.job import Sampler
from hasten.core.slot import Slot
from hasten.core.technique import Technique
from hasten.errors import InputError
from hasten.measure.quality.preserved import nothing_else_changes
from hasten.parts.data.collate import IGNORED, TokenizedExample, end_to_end, tokenized_example
from hasten.parts.data.prefetch import each_tensor


def example_of(row: Any) -> TokenizedExample:
    """A dataset's row as a token example; filler that an attention mask marks is left out.

    Raises:
        InputError: no ``input_ids``, not one token, or labels of another length or other tokens.
    """
    if isinstance(row, TokenizedExample):
        return row
    if not isinstance(row, Mapping) or "input_ids" not in row:
        keys = ", ".join(row) if isinstance(row, Mapping) else type(row).__name__
        raise InputError(f"a row of the data needs input_ids (and labels); it has {keys}")
    ids = np.asarray(row["input_ids"])
    row_labels = row.get("labels")
    labels = ids if row_labels is None else np.asarray(row_labels)
    mask = row.get("attention_mask")
    attended = np.ones(ids.shape, bool) if mask is None else np.asarray(mask).astype(bool)
    if not (ids.ndim == 1 and ids.shape == labels.shape == attended.shape):
        raise InputError(
            f"a row's input_ids, labels and attention_mask have shapes {ids.shape}, "
            f"{labels.shape} and {attended.shape}; they must be rows of one length"
        )
    if not attended.any():
        raise InputError("a row of the data holds no token; leave empty rows out")
    trained = labels != -100
    if (labels[trained] != ids[trained]).any():
        raise InputError(
            "a row's labels are other tokens than its input_ids. Hasten trains a model to predict "
            "its own tokens, so give labels that are input_ids or -100, not shifted"
        )
    return tokenized_example(ids[attended], trained[attended])


def padded_rows(rows: Sequence[Any]) -> dict[str, Any]:
    """Returns rows as Transformers' padding collator: ``input_ids``, ``labels`` (B, T).

    A label is at the position of its own token. It is -100 at filler and at tokens without loss.
    """
    examples = [example_of(row) for row in rows]
    ids = [torch.from_numpy(r.input_ids.astype(np.int64)) for r in examples]
    labels = [
        tokens.masked_fill(~torch.from_numpy(r.trained), IGNORED)
        for tokens, r in zip(ids, examples, strict=True)
    ]
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORED),
    }


# Packing what somebody's own collator returns.
#
# The collator of a host stays in use: it tokenises, masks, truncates, adds noise as before, and its
# padded batch is then laid out end to end. So no label and no token can differ from the host's own.
# A packed batch has the form that padding-free collators of others have: ``labels`` at their own
# token, -100 at the first token of each document, and positions that restart. ``use_cache`` is off
# because Transformers' models tell documents apart by their positions only without a cache.

PLAIN_KEYS = {"input_ids", "labels", "attention_mask", "num_items_in_batch"}


def packed_batch(batch: Any) -> dict[str, Any] | str:
    """A padded batch as one row of documents, longest first; or one clause why it stays.

    Rows may be padded on either side. Without an ``attention_mask``, tokens behind the last label
    of a row are left out too: no loss depends on them in a causal model. Settings of a call that
    are True or False are kept.
    """
    if not isinstance(batch, Mapping) or not isinstance(batch.get("input_ids"), Tensor):
        return "the data collator returns no mapping with input_ids"
    settings = {k: v for k, v in batch.items() if isinstance(v, bool)}
    inputs = {k: v for k, v in batch.items() if v is not None and k not in settings}
    more = sorted(str(k) for k in inputs.keys() - PLAIN_KEYS)
    if more:
        return f"the data collator also returns {', '.join(more)}"
    ids, labels, mask = batch["input_ids"], batch.get("labels"), batch.get("attention_mask")
    if not isinstance(labels, Tensor):
        return "the data collator returns no labels"
    device = ids.device
    ids, labels = ids.cpu(), labels.cpu()  # one wait for the device, and none for each row
    if ids.dim() != 2 or ids.shape != labels.shape:
        return f"input_ids and labels have shapes {tuple(ids.shape)} and {tuple(labels.shape)}"
    spans = filled_spans(ids, labels, mask.cpu() if isinstance(mask, Tensor) else mask)
    if isinstance(spans, str):
        return spans
    filled = [(row, at, end) for row, (at, end) in enumerate(spans) if end > at]
    if not filled:
        return "a batch has no token to train"
    filled.sort(key=lambda span: span[1] - span[2])
    documents = [labels[row, at:end].clone() for row, at, end in filled]
    for document in documents:
        document[0] = IGNORED  # nothing predicts it; the token before it is another document's
    items = {k: v for k, v in inputs.items() if k == "num_items_in_batch"}
    laid_out = end_to_end([ids[row, at:end] for row, at, end in filled], documents)
    on_device = each_tensor(laid_out, lambda tensor: tensor.to(device))
    return {**settings, **on_device, "use_cache": False, **items}


def filled_spans(ids: Tensor, labels: Tensor, mask: Any) -> list[tuple[int, int]] | str:
    """Where the tokens of each row begin and end; or one clause why that isn't known."""
    if mask is None:
        at = torch.arange(1, labels.shape[1] + 1).expand_as(labels)
        # As far as the last label of each row.
        return [(0, end) for end in torch.where(labels != IGNORED, at, 0).amax(1).tolist()]
    if not isinstance(mask, Tensor) or mask.shape != ids.shape:
        return "the data collator returns an attention_mask of another shape than input_ids"
    marks = mask.bool()
    starts, lengths = marks.int().argmax(1).tolist(), marks.sum(1).tolist()
    spans = [(at, at + n) for at, n in zip(starts, lengths, strict=True)]
    has_gaps = any(not marks[row, at:end].all() for row, (at, end) in enumerate(spans))
    if has_gaps or bool((marks != mask).any()) or bool((labels[~marks] != IGNORED).any()):
        return "the data collator's attention_mask is more than a mark on filler around a row"
    firsts = zip(labels, spans, strict=True)
    if any(at and at < end and int(row[at]) != IGNORED for row, (at, end) in firsts):
        return "filler on the left predicts the first token of a row"
    return spans


def batch_for(host_batch: Any, techniques: Iterable[Technique]) -> Any:
    """The host's batch, packed where the techniques do so and it can be."""
    packed = packed_batch(host_batch) if packs(techniques) else ""
    return host_batch if isinstance(packed, str) else packed


def packs(techniques: Iterable[Technique]) -> bool:
    """Returns True if one of the techniques lays out a batch's rows."""
    return any(technique.slot is Slot.COLLATE for technique in techniques)


class StepCollator:
    """A ``collate_fn`` that gives the batch of a :class:`Pass` what its loss is divided by.

    Args:
        usual: the collator that it calls.
        packs: the batch is packed afterwards if it can be.
    """

    def __init__(self, usual: Callable[[Any], Any], packs: bool = False) -> None:
        self.usual, self.packs = usual, packs

    def __call__(self, rows: Sequence[Any]) -> Any:
        batch = self.usual(rows)
        if isinstance(rows, Pass):
            batch = {**batch, "num_items_in_batch": rows.items}
            labels = batch.get("labels")
            count = int((labels[..., 1:] != IGNORED).sum()) if isinstance(labels, Tensor) else 0
            if count != rows.trained:
                raise InputError(
                    f"the data collator labels {count} tokens of a batch, but its rows label "
                    f"{rows.trained}; with a sampler, give the loader a collator that only pads"
                )
        packed = packed_batch(batch) if self.packs else ""
        return batch if isinstance(packed, str) else packed


class Pass(list[Any]):
    """The examples of a pass, as positions or as rows, and what its loss sum is divided by.

    Args:
        trained: labels that the rows have; a collator that makes others would be weighted wrongly.
    """

    def __init__(self, examples: Sequence[Any], items: float, trained: int) -> None:
        super().__init__(examples)
        self.items, self.trained = items, trained


class SizedRows:
    """A dataset with the sizes of its rows; a :class:`Pass` of them reaches the collator.

    ``lengths`` has the tokens of each row, ``trained`` those of them that carry loss: a first token
    is never predicted. State of a user's data set is as before the reading.
    """

    def __init__(self, rows: Any) -> None:
        self.rows = rows
        with nothing_else_changes(nn.Identity(), *([rows] if hasattr(rows, "__dict__") else [])):
            examples = (example_of(rows[index]) for index in range(len(rows)))
            sizes = [(example.length, example.trained_tokens) for example in examples]
        self.lengths, self.trained = [n for n, _ in sizes], [n for _, n in sizes]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]

    def __getitems__(self, indices: Sequence[int]) -> Sequence[Any]:
        """Returns all rows of a batch; ``DataLoader`` calls it."""
        fetch = getattr(self.rows, "__getitems__", None)
        rows = fetch([*indices]) if fetch else [self.rows[index] for index in indices]
        return Pass(rows, indices.items, indices.trained) if isinstance(indices, Pass) else rows


class StepBatches:
    """A batch sampler: this rank's examples of each step, in ``passes`` batches.

    Packed rows stay separate while there are enough passes for it. On several ranks, a last
    step is left out if it is too small for all their passes. Otherwise ranks would wait for
    each other.

    Args:
        trained: for each example the number of tokens that carry loss. It is for a host
            that takes the mean of the passes' and the ranks' losses. Each pass then is a
            :class:`Pass` with ``items`` that make that mean the mean over the step's
            tokens. None: a pass is a list.
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
        self.handed_out = 0  # batches of it that were handed out, those among them
        self._trained = trained
        self._length = sum(1 for _ in self._batches(0))

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.epoch, self.first, self.handed_out = epoch, 0, 0

    @property
    def sampler(self) -> StepBatches:
        """Returns this object; Lightning sets the epoch on ``sampler``."""
        return self

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[list[int]]:
        yield from itertools.islice(self._batches(self.epoch), self.first, None)

    def _batches(self, epoch: int) -> Iterator[list[int]]:
        of_ranks = (self.order.local_steps(epoch, r, self.ranks) for r in range(self.ranks))
        steps = list(zip(*of_ranks, strict=True))
        for number, shares in enumerate(steps, start=1):
            rank_batches = [
                spread([list(p) for p in share if len(p)], self.passes) for share in shares
            ]
            least = min(len(batches) for batches in rank_batches)
            if least < self.passes and number < len(steps):
                raise InputError(
                    f"a step can't be cut into {self.passes} passes on each rank, one of them has "
                    f"{least} example(s); accumulate fewer passes"
                )
            if least == self.passes or self.ranks == 1:
                passes, trained = rank_batches[self.rank], self._trained
                if trained is not None:
                    total = sum(trained[i] for bs in rank_batches for b in bs for i in b)
                    items = max(total, 1) / (self.passes * self.ranks)
                    passes = [Pass(b, items, sum(trained[i] for i in b)) for b in passes]
                yield from passes


def spread(pieces: list[list[int]], passes: int) -> list[list[int]]:
    """The same examples in so many pieces; fewer only where there are fewer examples."""
    while len(pieces) < passes and any(len(p) > 1 for p in pieces):
        at = max(range(len(pieces)), key=lambda i: len(pieces[i]))
        half = (len(pieces[at]) + 1) // 2
        pieces[at : at + 1] = [pieces[at][:half], pieces[at][half:]]
    while len(pieces) > passes:
        at = min(range(len(pieces) - 1), key=lambda i: len(pieces[i]) + len(pieces[i + 1]))
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    return pieces


class StepLoader(DataLoader[Any]):
    """A ``DataLoader`` over :class:`StepBatches`; trainers set its epoch.

    Its state is the position in the data: the epoch, and the number of its batches that
    were handed out. Lightning saves it in its own checkpoints and restores it.
    """

    def __init__(self, examples: Any, batches: StepBatches, collate: Any, **settings: Any) -> None:
        super().__init__(examples, batch_sampler=batches, collate_fn=collate, **settings)
        self.order = batches

    def __iter__(self) -> Iterator[Any]:
        """Begins with the first ``next``, because trainers may set the epoch after ``iter``."""
        self.order.handed_out = self.order.first
        for batch in super().__iter__():
            self.order.handed_out += (
                1  # before it leaves: a checkpoint may be written while it is out
            )
            yield batch
        self.order.first = 0

    def set_epoch(self, epoch: int) -> None:
        self.order.set_epoch(epoch)

    def state_dict(self) -> dict[str, int]:
        """Where the batch comes from that follows the last one."""
        order = self.order
        if order.handed_out >= len(order):
            return {"epoch": order.epoch + 1, "batch": 0}
        return {"epoch": order.epoch, "batch": order.handed_out}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Resumes there, from the next ``iter`` on."""
        self.order.epoch = state["epoch"]
        self.order.first = self.order.handed_out = state["batch"]
