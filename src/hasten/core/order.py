"""Data order as a pure function of (seed, epoch, index): what resumes, splits and repeats exactly.

A *step plan* of an epoch is a list of steps, each a list of record indices over all ranks. Any rank
computes the whole of it without talking to another, then takes its own part. How a step is dealt to
ranks belongs to the order: one that packs rows keeps each row whole and deals by cost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from hasten.errors import InputError


@dataclass(frozen=True)
class GlobalBatch:
    """How much one step takes over all ranks: a number of records, or of tokens."""

    records: int | None = 32
    tokens: int | None = None

    def __post_init__(self) -> None:
        if (self.records is None) == (self.tokens is None):
            raise InputError("give global_batch_size or global_batch_tokens, one of the two")
        if (self.records or self.tokens or 0) < 1:
            raise InputError(f"the global batch must hold at least one record or token, not {self}")


class Sampler(Protocol):
    """Which records share a step; the same answer on every rank for the same arguments."""

    def steps(self, epoch: int) -> Iterator[list[int]]:
        """The epoch's steps, each the record indices of all ranks together."""

    def local_steps(self, epoch: int, rank: int, world_size: int) -> Iterator[list[list[int]]]:
        """One rank's part of the same steps, in pieces: BATCH may cut a piece, never mix two."""


@dataclass(frozen=True)
class ShuffledOrder:
    """Every record once per epoch, in an order drawn from (seed, epoch).

    Raises:
        InputError: the token budget can't hold the longest record.
    """

    lengths: Sequence[int]
    batch: GlobalBatch
    seed: int = 0

    def __post_init__(self) -> None:
        longest = max(self.lengths, default=0)
        if self.batch.tokens is not None and longest > self.batch.tokens:
            raise InputError(
                f"global_batch_tokens={self.batch.tokens} can't hold the longest record of "
                f"{longest} tokens; raise it to at least {longest} or lower cutoff_len"
            )

    def steps(self, epoch: int) -> Iterator[list[int]]:
        order = permutation(len(self.lengths), self.seed, epoch)
        if self.batch.records is not None:
            size = self.batch.records
            yield from (order[i : i + size] for i in range(0, len(order), size))
        else:
            yield from self._by_tokens(order)

    def local_steps(self, epoch: int, rank: int, world_size: int) -> Iterator[list[list[int]]]:
        for step in self.steps(epoch):
            yield [share(step, rank, world_size)]

    def _by_tokens(self, order: Sequence[int]) -> Iterator[list[int]]:
        assert self.batch.tokens is not None  # steps() asked for it
        step: list[int] = []
        filled = 0
        for index in order:
            if step and filled + self.lengths[index] > self.batch.tokens:
                yield step
                step, filled = [], 0
            step.append(index)
            filled += self.lengths[index]
        if step:
            yield step


def permutation(count: int, seed: int, epoch: int) -> list[int]:
    """A shuffle of ``range(count)`` that depends on nothing but its arguments."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    order: list[int] = torch.randperm(count, generator=generator).tolist()
    return order


def share(step: Sequence[int], rank: int, world_size: int) -> list[int]:
    """The records of one rank: every ``world_size``-th, so that ranks differ by one at most."""
    return list(step[rank::world_size])
