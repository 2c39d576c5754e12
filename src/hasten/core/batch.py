"""A micro-batch is one forward and backward pass; a step batch is all of them on this rank.

Both carry their counts, so that no later line has to look into a tensor to know how much of it was
padding: *slots* are positions of the tensor, *tokens* those that belong to a record, *trained
tokens* those that carry loss. *Pairs* are the sum of the records' squared lengths, which the work
of attention goes by.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch


@dataclass(frozen=True)
class Counts:
    """How much work a batch is, in five units."""

    records: int = 0
    tokens: int = 0
    slots: int = 0
    trained_tokens: int = 0
    pairs: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.records + other.records,
            self.tokens + other.tokens,
            self.slots + other.slots,
            self.trained_tokens + other.trained_tokens,
            self.pairs + other.pairs,
        )

    @property
    def padding_share(self) -> float:
        return 1 - self.tokens / self.slots if self.slots else 0.0


@dataclass(frozen=True)
class MicroBatch:
    """Keyword arguments of the training module, with their counts.

    ``records`` are those it was laid out from, so that BATCH can cut a failed step once more.
    """

    inputs: Mapping[str, Any]
    counts: Counts
    records: Sequence[Any] = ()

    def to(self, device: str) -> MicroBatch:
        """The same on a device; copies don't wait for the host when the memory is pinned."""
        return replace(self, inputs={k: _move(v, device) for k, v in self.inputs.items()})


Collate = Callable[[Sequence[Any]], MicroBatch]


@dataclass(frozen=True)
class StepBatch:
    """One optimizer step's work on this rank, and the whole step's counts over all ranks."""

    micro_batches: tuple[MicroBatch, ...]
    counts: Counts
    epoch: int


def language_counts(records: Sequence[Any], inputs: Mapping[str, Any]) -> Counts:
    """Counts of token records laid out as ``input_ids`` with aligned ``labels`` (-100: no loss)."""
    lengths = [len(r.input_ids) for r in records]
    return Counts(
        records=len(records),
        tokens=sum(lengths),
        slots=inputs["input_ids"].numel(),
        trained_tokens=int((inputs["labels"] != -100).sum()),  # on the host: no device waits
        pairs=sum(n * n for n in lengths),
    )


def with_language_counts(lay_out: Callable[[Sequence[Any]], Mapping[str, Any]]) -> Collate:
    """A collator of token records out of a function that only lays out tensors."""

    def collate(records: Sequence[Any]) -> MicroBatch:
        inputs = lay_out(records)
        return MicroBatch(inputs, language_counts(records, inputs))

    return collate


def _move(value: Any, device: str) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return {k: _move(v, device) for k, v in value.items()}
    if isinstance(value, tuple | list):
        moved = [_move(item, device) for item in value]
        return tuple(moved) if isinstance(value, tuple) else moved
    return value
